"""A folder in an object store, through obstore: read, and copied to; its errors, told apart by what mends them.

Of a prepared folder the manifest is copied last: until then there is nothing prepared there.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from argosy.credentials import CREDENTIALS_REMEDY, has_credentials
from argosy.data.manifest import DATA_MANIFEST as MANIFEST
from argosy.data.manifest import SHARD_FILES, TEMPLATE, TOKENIZER, Manifest
from argosy.errors import ArgosyError, RunFailed, UserError, missing_extra
from argosy.files import expanded, json_of

SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https", "file")
STORE_CONNECT_S, STORE_ANSWER_S = 5, 30
"""Time that one request waits for a connection, and for its answer. The caller tries again."""

DOWNLOAD_BYTES = 2**20
UPLOAD_PART_BYTES = 16 * 2**20
"""Bytes of an object that are sent at once while it is written part by part: a store takes 10,000 parts."""

_STORE_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_ONE_SLASH = re.compile(rf"^({'|'.join((*SCHEMES, 'hf'))}):/(?=[^/])")
BAD_NAME = "object with invalid path"
"""Words of obstore's error for a list in which a name is none that it can ask for."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_TOO_SHORT = re.compile(
    r"Generic \w+ error: (Requested range was invalid"
    r"|Error performing GET \S+ in [^-]*- Server returned non-2xx status code: 416 )"
)
"""The first words of an error for bytes behind an object's end; the URL it quotes says nothing."""
_ATTEMPTS = re.compile(r" in [0-9.]+[mµn]?s(, after \d+ retries, max_retries: \d+, retry_timeout: \w+)? +- +")
_WRONG_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthFailure")


class StoreUnreachable(Exception):
    """The store does not answer, or answers that it cannot now: the same request may succeed later."""


def is_url(place: object) -> bool:
    """True if `place` names a folder of a store rather than one of this machine."""
    return _STORE_URL.match(str(place)) is not None or _ONE_SLASH.match(str(place)) is not None


def spelled(place: object) -> str:
    """Return a path as it is, and a URL as it was before it was taken for a path."""
    return _ONE_SLASH.sub(lambda found: f"{found[1]}://" + "/" * (found[1] == "file"), str(place))


class Store:
    """The folder at `url`. Threads may share one; forked processes may not.

    Methods raise StoreUnreachable, or UserError for what only the user can mend: credentials, permission, a bucket that
    does not exist.
    """

    def __init__(self, url: str, named: str = "data.sources: "):
        """named: what stands before the URL in messages. Raises: UserError."""
        if has_credentials(url):
            raise UserError(f"{named}{url}: {CREDENTIALS_REMEDY}.")
        url = spelled(url)
        scheme = url.partition("://")[0].lower()
        if scheme not in SCHEMES:
            raise UserError(f"{named}{url}: data cannot be read from {scheme}://. Use one of {', '.join(SCHEMES)}.")
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            raise missing_extra("obstore", "store", f"{named}{url}") from None
        self.url, self._named = url.rstrip("/"), named
        options: dict[str, Any] = {
            "client_options": {
                "connect_timeout": timedelta(seconds=STORE_CONNECT_S),
                "timeout": timedelta(seconds=STORE_ANSWER_S),
                "allow_http": scheme == "http" or _endpoint().startswith("http://"),
            },
            "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=STORE_ANSWER_S)},
        }
        if scheme == "file":
            options = {}
        try:
            options |= keys_of_profile() if scheme in ("s3", "s3a") else {}
            self._store: Any = from_url(self.url, **options)
        except (BaseError, ValueError) as problem:
            raise UserError(f"{named}{url}: {words(problem)}. Give a URL such as s3://bucket/folder.") from None

    def get(self, name: str, most_bytes: int) -> bytes | None:
        """Return the object; None if there is none. Of a longer one, its first `most_bytes` + 1 bytes."""
        try:
            return _beginning(self._store.get(name), most_bytes)
        except Exception as problem:
            self._raise_unless_absent(problem)
            return None

    def get_newer(self, name: str, etag: str, most_bytes: int) -> tuple[bytes, str] | None:
        """Return the object, as `get` does, and its ETag; None if it still has `etag`.

        Raises: FileNotFoundError if there is none.
        """
        from obstore.exceptions import NotModifiedError

        try:
            found = self._store.get(name, options={"if_none_match": etag} if etag else {})
            return _beginning(found, most_bytes), found.meta["e_tag"] or ""
        except NotModifiedError:
            return None
        except Exception as problem:
            self._raise_unless_absent(problem)
            raise FileNotFoundError(f"{self.url}/{name}") from None

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of an object. Raises: FileNotFoundError if it is missing or too short."""
        try:
            data = bytes(self._store.get_range(name, start=start, end=stop))
        except Exception as problem:
            if _TOO_SHORT.match(str(problem)):
                raise FileNotFoundError(f"{self.url}/{name}: has no bytes {start} to {stop}") from None
            self._raise_unless_absent(problem)
            raise FileNotFoundError(f"{self.url}/{name}: is missing") from None
        if len(data) != stop - start:
            raise FileNotFoundError(f"{self.url}/{name}: has no bytes {start} to {stop}")
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object in order. Raises: FileNotFoundError if there is none."""
        try:
            for chunk in self._store.get(name).stream():
                yield bytes(chunk)
        except Exception as problem:
            self._raise_unless_absent(problem)
            raise FileNotFoundError(f"{self.url}/{name}: is missing") from None

    def put(self, name: str, content: bytes | Path) -> None:
        """Write an object, whole or not at all; in parts, if it is large."""
        try:
            self._store.put(name, content)
        except Exception as problem:
            self._raise_unless_absent(problem)
            raise StoreUnreachable(words(problem)) from None

    @contextmanager
    def writer(self, name: str) -> Iterator[Any]:
        """Write an object part by part, whatever its length; after an error in the block there is none."""
        from obstore import open_writer

        try:
            writer = open_writer(self._store, name, buffer_size=UPLOAD_PART_BYTES)
            yield _Parts(writer)
            writer.close()
        except Exception as problem:
            self._raise_unless_absent(problem)
            raise StoreUnreachable(words(problem)) from None

    def delete(self, names: list[str]) -> None:
        """Delete these objects; those that are missing count as deleted."""
        try:
            self._store.delete(names)
        except Exception as problem:
            self._raise_unless_absent(problem)

    def sizes(self) -> dict[str, int] | None:
        """Return the objects of the folder and their lengths; None if the store keeps no list (http)."""
        from obstore.exceptions import NotSupportedError

        try:
            return {str(one["path"]): int(one["size"]) for page in self._store.list() for one in page}
        except NotSupportedError:
            return None
        except Exception as problem:
            if not self.url.startswith("http"):
                self._raise_unless_absent(problem)
            return None

    def _raise_unless_absent(self, problem: Exception) -> None:
        """Return if the object is missing; else raise an error that says what to mend."""
        from obstore import exceptions

        code = (_CODE.search(str(problem)) or ["", ""])[1]
        if isinstance(problem, ArgosyError | AssertionError):
            raise problem
        if BAD_NAME in str(problem):  # such as a//b, or one with a line break
            said = " ".join(str(problem).partition("Debug source")[0].split())[:300]
            raise UserError(f"{self._named}{self.url}: {said}. Rename that object, or delete it.") from None
        if code == "NoSuchBucket":
            raise UserError(f"{self._named}{self.url}: there is no such bucket. Name one that exists.") from None
        if code in _WRONG_KEYS or isinstance(problem, exceptions.UnauthenticatedError):
            raise UserError(
                f"{self._named}{self.url}: the store does not accept the credentials ({code or 'unauthenticated'}). "
                "Give those of the store by the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_SAS_TOKEN, ...)."
            ) from None
        if isinstance(problem, exceptions.PermissionDeniedError):
            raise UserError(
                f"{self._named}{self.url}: no permission ({code or 'forbidden'}). Give the account the right to list "
                "the bucket and to read its objects (s3:ListBucket, s3:GetObject; to write there, s3:PutObject)."
            ) from None
        if isinstance(problem, exceptions.NotSupportedError):
            raise UserError(
                f"{self._named}{self.url}: {words(problem)}. Use a server that serves parts of files, or copy the "
                "folder here."
            ) from None
        if isinstance(problem, exceptions.NotFoundError | FileNotFoundError):
            return
        raise StoreUnreachable(words(problem)) from None


class _Parts:
    """Passes what is written on in parts that the library can hold."""

    def __init__(self, writer: Any):
        self._writer = writer

    def write(self, data: memoryview | bytes) -> None:
        for start in range(0, len(data), UPLOAD_PART_BYTES):
            self._writer.write(bytes(data[start : start + UPLOAD_PART_BYTES]))


def _beginning(found: Any, most_bytes: int) -> bytes:
    """Return the first bytes of an object, at most one more than `most_bytes`; no more of it is held."""
    data = bytearray()
    for chunk in found.stream(min_chunk_size=DOWNLOAD_BYTES):
        data += memoryview(chunk)[: most_bytes + 1 - len(data)]
        if len(data) > most_bytes:
            break
    return bytes(data)


def words(problem: BaseException) -> str:
    """Return what a library says in one short line, without the request that it quotes."""
    code = _CODE.search(str(problem))
    lines = str(problem).strip().splitlines() or [type(problem).__name__]
    line = _ATTEMPTS.sub(": ", lines[0]).replace("Error performing ", "")
    return code[1] if code else line.split(", body:")[0][:200]


def _endpoint() -> str:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if name in os.environ), "")


def keys_of_profile() -> dict[str, str]:
    """Return the keys of AWS_PROFILE in ~/.aws/credentials, which obstore does not read; {} if the environment has keys
    or the file does not.
    """
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    path = expanded(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    profiles = configparser.ConfigParser(interpolation=None)
    try:
        profiles.read(path)
    except (OSError, configparser.Error, UnicodeDecodeError):
        return {}
    name = os.environ.get("AWS_PROFILE", "default")
    keys = profiles[name] if profiles.has_section(name) else {}
    wanted = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }
    return {option: keys[key] for key, option in wanted.items() if key in keys}


FILES_AT_ONCE = 4
"""Files that are copied at once; a large one goes in parts, several at once too."""
STORE_ATTEMPTS, STORE_PAUSE_S = 5, 3.0
REMOTE_LINE = "remote = "
COPYING = "The data are prepared; the same command goes on with copying them."
Answer = TypeVar("Answer")
COPY_JOURNAL = ".copied.jsonl"
"""The file that notes what was copied where, so that an interrupted copy goes on."""


def check_remote(url: str) -> None:
    """Ask for prepared data at `url`, before hours are spent on what could not be copied there.

    Raises: UserError if the store refuses; RunFailed if it cannot be reached.
    """
    store = Store(url, REMOTE_LINE)
    patiently(f"{REMOTE_LINE}{store.url}", store.get, MANIFEST, 1)


def upload(folder: Path, url: str, report: Callable[[int, int], None] = lambda done, files: None) -> bool:
    """Copy the prepared `folder` to `url`; False if the same is there already.

    `report` is called with the number of files that are there, and of all. After an interruption, the same call goes
    on.

    Raises: UserError if the store refuses, or other prepared data are there; RunFailed if it cannot be reached.
    """
    manifest = Manifest.load(folder)
    content = (folder / MANIFEST).read_bytes()
    store = Store(url, REMOTE_LINE)
    ask = partial(patiently, f"{REMOTE_LINE}{store.url}", then=COPYING)
    there = ask(store.get, MANIFEST, len(content))
    if there == content:
        return False
    if there is not None:
        raise UserError(
            f"{REMOTE_LINE}{store.url}: holds other prepared data. Name another folder, or delete what is there."
        )
    names = [TOKENIZER, *([TEMPLATE] if (folder / TEMPLATE).exists() else [])]
    for shard in manifest.shards():
        names += [shard.name + suffix for suffix in SHARD_FILES if (folder / (shard.name + suffix)).exists()]
    identity = [store.url, manifest.identity]
    copied = _journal(folder, identity)
    if copied and (sizes := ask(store.sizes)) is not None:  # what was copied may have been deleted there since
        copied = {name for name in copied if sizes.get(name) == (folder / name).stat().st_size}
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool, (folder / COPY_JOURNAL).open("a") as journal:
        left = [name for name in names if name not in copied]
        tasks = {name: pool.submit(ask, store.put, name, folder / name) for name in left}
        try:
            for done, (name, task) in enumerate(tasks.items(), start=1):
                task.result()
                journal.write(json.dumps([*identity, name]) + "\n")
                journal.flush()
                report(len(names) - len(left) + done, len(names))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    ask(store.put, MANIFEST, content)
    (folder / COPY_JOURNAL).unlink(missing_ok=True)
    return True


def patiently(
    where: str, ask: Callable[..., Answer], *arguments: Any, then: str = "The same command may succeed later."
) -> Answer:
    """Return the answer of a store, which is asked again if it cannot give it now. Raises: RunFailed, as `ask`."""
    problem = ""
    for attempt in range(STORE_ATTEMPTS):
        try:
            return ask(*arguments)
        except StoreUnreachable as away:
            problem = str(away)
            time.sleep(STORE_PAUSE_S if attempt + 1 < STORE_ATTEMPTS else 0)
    raise RunFailed(f"{where}: cannot be reached ({problem}). {then}")


def _journal(folder: Path, identity: list[str]) -> set[str]:
    """Return the files that an interrupted copy of the same data to the same place has copied."""
    path = folder / COPY_JOURNAL
    lines = path.read_bytes().splitlines() if path.exists() else []
    copied = set()
    for line in lines:
        with suppress(ValueError, TypeError):  # a kill cut it off
            *of, name = json_of(line)
            if of == identity:
                copied.add(str(name))
    return copied
