"""A prepared folder in an object store: its manifest is brought here, its blocks are fetched into the cache."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
import uuid
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt

from argosy.data.manifest import (
    CHECKSUM_BLOCK_BYTES,
    MOST_MANIFEST_BYTES,
    TEMPLATE,
    TOKENIZER,
    BlockChecksums,
    Manifest,
    Shard,
    read_checksums,
)
from argosy.data.manifest import DATA_MANIFEST as MANIFEST
from argosy.data.stores.cache import Cache
from argosy.data.stores.store import Store, StoreUnreachable
from argosy.errors import ArgosyError, ArgosyWarning, DataError, Retryable, UserError
from argosy.files import write_unsynced

BLOCK_FETCHES = 3
"""A block that does not match its checksum is fetched so often."""
OPEN_S = 20.0
"""Time for which the folder's manifest is asked for when a run starts."""
STORE_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses between attempts to reach a store; the last again and again."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class FetchedBlocks:
    """The outcome of fetching blocks."""

    unstored: dict[int, bytes] = field(default_factory=dict)
    """Blocks that are needed now and are not in the cache."""
    had_room: bool = True
    """False if the cache had no room for them."""


class StoreFolder:
    """Prepared data at a URL: manifest and tokenizer, brought here, and blocks of its shards.

    Raises: UserError if there is nothing prepared, or the store refuses; Retryable if it cannot be reached and nothing
    of the folder is here.
    """

    def __init__(self, url: str, cache: Cache, check_shards: bool = False):
        self.store, self.cache = Store(url), cache
        self.url = self.store.url
        self.local = cache.folder / "folders" / self.folder_name(self.url)
        self.news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=100)
        """Events for the run: name and facts."""
        self.hits = self.misses = self.fetched_bytes = 0
        """Blocks that were here when they were read, or not; bytes that this process has fetched, ahead too."""
        self._counting = threading.Lock()
        self._away_since: float | None = None
        self._was_full = False
        self._sums: dict[str, npt.NDArray[np.uint32]] = {}
        self.local.mkdir(parents=True, exist_ok=True)
        self.manifest = self._open(check_shards)

    @staticmethod
    def folder_name(url: str) -> str:
        """Return the name of the folder in the cache that has the manifest of `url`."""
        return hashlib.sha256(url.encode()).hexdigest()[:16]

    def _open(self, check_shards: bool) -> Manifest:
        began_s = time.monotonic()
        for pause_s in _pauses():
            try:
                is_new, manifest = self._brought()
                if is_new and check_shards:
                    self._check_sizes(manifest)
                if manifest.rows is not None and not (self.local / TEMPLATE).exists():
                    self._bring_template()
                return manifest
            except StoreUnreachable as problem:
                if time.monotonic() - began_s + pause_s < OPEN_S:
                    time.sleep(pause_s)
                    continue
                if not (self.local / MANIFEST).exists():
                    raise Retryable(
                        f"data.sources: {self.url} cannot be reached ({problem}). Look whether the URL and the store's "
                        "endpoint and region (AWS_ENDPOINT_URL, AWS_REGION, ...) are right, then repeat the command."
                    ) from None
                warnings.warn(
                    f"data.sources: {self.url} cannot be reached ({problem}); going on with what {self.cache.folder} "
                    "has of it.",
                    ArgosyWarning,
                    stacklevel=2,
                )
                return self._parsed()
        raise AssertionError

    def _brought(self) -> tuple[bool, Manifest]:
        """Bring the manifest here, again if it was damaged on its way; True if it is another than before."""
        for _ in range(BLOCK_FETCHES - 1):
            is_new = self._bring()
            with suppress(ArgosyError):
                return is_new, self._parsed()
        return self._bring(), self._parsed()

    def _bring(self) -> bool:
        """Bring manifest and tokenizer here; True if the manifest is another than that which was here."""
        etag = self.local / "etag"
        known = etag.read_text() if etag.exists() and (self.local / MANIFEST).exists() else ""
        try:
            newer = self.store.get_newer(MANIFEST, known, MOST_MANIFEST_BYTES)
        except FileNotFoundError:
            raise UserError(
                f"data.sources: {self.url}: no prepared data here ({MANIFEST} is missing). Prepare it: argosy prepare "
                f"TEXT --remote {self.url}"
            ) from None
        if newer is None:
            return False
        tokenizer = self.store.get(TOKENIZER, MOST_MANIFEST_BYTES)
        if tokenizer is None:
            raise UserError(f"data.sources: {self.url}/{TOKENIZER} is missing. Put it there again.")
        for name, content in ((TOKENIZER, tokenizer), (MANIFEST, newer[0])):
            if len(content) > MOST_MANIFEST_BYTES:
                raise UserError(
                    f"data.sources: {self.url}/{name} has more than {MOST_MANIFEST_BYTES >> 20} MiB: it is not what "
                    "its name says. Put the prepared data there again."
                )
        (self.local / TEMPLATE).unlink(missing_ok=True)
        for name, content in ((TOKENIZER, tokenizer), (MANIFEST, newer[0]), ("url", self.url.encode())):
            _put(self.local / name, content)
        _put(etag, newer[1].encode())
        return True

    def _bring_template(self) -> None:
        """Bring the chat template here, if there is one: copies of earlier versions lack it."""
        with suppress(UserError):  # who may not list a bucket is refused what it does not have
            template = self.store.get(TEMPLATE, MOST_MANIFEST_BYTES)
            if template is not None and len(template) <= MOST_MANIFEST_BYTES:
                _put(self.local / TEMPLATE, template)

    def _parsed(self) -> Manifest:
        try:
            return Manifest.load(self.local, check_shards=False)
        except ArgosyError as problem:
            (self.local / "etag").unlink(missing_ok=True)  # it is brought again next time
            raise type(problem)(str(problem).replace(str(self.local), self.url)) from None

    def _check_sizes(self, manifest: Manifest) -> None:
        sizes = self.store.sizes()
        for shard in manifest.shards() if sizes is not None else ():
            found, wanted = (sizes or {}).get(f"{shard.name}.bin"), shard.tokens * np.dtype(manifest.dtype).itemsize
            if found != wanted and wanted:
                (self.local / "etag").unlink(missing_ok=True)
                state = "is missing" if found is None else f"has {found} bytes instead of {wanted}"
                raise DataError(f"{self.url}/{shard.name}.bin {state}. Copy it there again, or prepare the data again.")

    def checksums(self, shard: Shard, again: bool = False) -> npt.NDArray[np.uint32]:
        """Return the checksums of a shard's blocks. A folder without them has the whole shard read once.

        again: from the store, not from here. Raises: StoreUnreachable; DataError if the shard is damaged or missing.
        """
        path = self.cache.path(shard.bin_sha256, 0).with_name("crc32")
        blocks = -(-shard.tokens * np.dtype(self.manifest.dtype).itemsize // CHECKSUM_BLOCK_BYTES)
        if not again and (found := read_checksums(path)) is not None and len(found) == blocks:
            return found
        data = self.store.get(f"{shard.name}.crc32", 4 * blocks)
        if data is None or len(data) != 4 * blocks:
            data = self._computed(shard)
        with suppress(OSError):  # a full disk: they are asked for again
            self.cache.shard_folder(shard.bin_sha256)
            _put(path, data)
        return np.frombuffer(data, "<u4")

    def _computed(self, shard: Shard) -> bytes:
        """Read a whole shard that has no checksums of its blocks, and compare it with its manifest."""
        sums, whole = BlockChecksums(), hashlib.sha256()
        try:
            for chunk in self.store.chunks(f"{shard.name}.bin"):
                sums.update(chunk)
                whole.update(chunk)
        except FileNotFoundError as problem:
            raise DataError(f"{problem}. Copy it there again, or prepare the data again.") from None
        if whole.hexdigest() != shard.bin_sha256:
            raise DataError(
                f"{self.url}/{shard.name}.bin does not match its checksum (manifest {shard.bin_sha256[:12]}, there "
                f"{whole.hexdigest()[:12]}). Copy it there again, or prepare the data again."
            )
        return sums.to_bytes()

    def fetch(self, shard: Shard, first: int, stop: int, due: int) -> FetchedBlocks:
        """Fetch blocks `first` to `stop` of a shard, and store those that the cache has room for.

        What another process is fetching is left out, unless it is needed now (due = 0).
        Blocks that are needed now (due = 0) are returned if they are not stored.

        Raises: StoreUnreachable; DataError if a block stays damaged, or is missing.
        """
        blocks: dict[int, IO[bytes] | None] = {}
        with ExitStack() as stack:
            try:
                for block in range(first, stop):
                    blocks[block] = stack.enter_context(self.cache.claimed(shard.bin_sha256, block))
                if due:
                    blocks = _first_run(blocks)
                wanted = [block for block in blocks if not self.cache.path(shard.bin_sha256, block).exists()]
                is_stored = bool(wanted) and self.cache.take_room(len(wanted), due)
            except OSError as problem:
                self._full(problem)
                is_stored, wanted = False, list(range(first, stop))
            if not wanted or (due and not is_stored):
                return FetchedBlocks(had_room=not wanted)
            stored = 0
            try:
                data = self._sound(shard, wanted[0], wanted[-1] + 1)
                for block in wanted if is_stored else ():
                    if (file := blocks.get(block)) is not None:
                        self.cache.keep(file, shard.bin_sha256, block, data[block])
                        stored += 1
                        del data[block]
            except OSError as problem:
                self._full(problem)
            finally:
                if is_stored and stored < len(wanted):
                    self.cache.give_back(len(wanted) - stored)
        return FetchedBlocks({} if due else data, is_stored)

    def _full(self, problem: OSError) -> None:
        if problem.errno in (errno.EMFILE, errno.ENFILE):
            return  # no descriptor is left for now, which says nothing of the disk
        self.cache.disk_is_full(problem)
        if not self._was_full:
            self._was_full = True
            self.news.append(("cache_full", {"problem": str(problem.strerror), "bytes": self.cache.capacity}))

    def _sound(self, shard: Shard, first: int, stop: int) -> dict[int, bytes]:
        """Return blocks that match their checksums, as the store has them."""
        size = shard.tokens * np.dtype(self.manifest.dtype).itemsize
        sums = self.checksums(shard)
        for attempt in range(BLOCK_FETCHES):
            start = first * CHECKSUM_BLOCK_BYTES
            try:
                data = memoryview(
                    self.store.get_range(f"{shard.name}.bin", start, min(stop * CHECKSUM_BLOCK_BYTES, size))
                )
            except FileNotFoundError as problem:
                if attempt + 1 < BLOCK_FETCHES:  # the store may have sent less than it has
                    continue
                raise DataError(f"{problem}. Copy the shard there again, or prepare the data again.") from None
            self.count(fetched_bytes=len(data))
            self._reached()
            found = {
                first + i: data[i * CHECKSUM_BLOCK_BYTES : (i + 1) * CHECKSUM_BLOCK_BYTES] for i in range(stop - first)
            }
            bad = [block for block, content in found.items() if zlib.crc32(content) != int(sums[block])]
            if not bad:
                return {block: bytes(content) for block, content in found.items()}
            self.news.append(("block_damaged", {"shard": f"{self.url}/{shard.name}.bin", "block": bad[0]}))
            if attempt + 1 < BLOCK_FETCHES:
                sums = self._sums[shard.name] = self.checksums(shard, again=True)  # they may be what is damaged
        raise DataError(
            f"{self.url}/{shard.name}.bin: the block at byte {bad[0] * CHECKSUM_BLOCK_BYTES} does not match its "
            f"checksum, though it was fetched {BLOCK_FETCHES} times. Copy the shard there again, or prepare the data "
            "again."
        )

    def count(self, hits: int = 0, misses: int = 0, fetched_bytes: int = 0) -> None:
        """Add to what is counted; any thread may call it."""
        with self._counting:
            self.hits += hits
            self.misses += misses
            self.fetched_bytes += fetched_bytes

    def fetch_surely(self, shard: Shard, first: int, stop: int) -> FetchedBlocks:
        """Fetch blocks that are needed now, however long the store is away.

        Raises: Retryable once that is longer than data.cache.timeout_s; DataError.
        """
        return self._surely(lambda: self.fetch(shard, first, stop, due=0))

    def checksums_surely(self, shard: Shard) -> npt.NDArray[np.uint32]:
        """Return `checksums`, however long the store is away; kept in memory. Raises: as `fetch_surely`."""
        if shard.name not in self._sums:
            self._sums[shard.name] = self._surely(lambda: self.checksums(shard))
        return self._sums[shard.name]

    def _surely(self, ask: Callable[[], Answer]) -> Answer:
        began_s = time.monotonic()
        for pause_s in _pauses():
            try:
                return ask()
            except (StoreUnreachable, UserError) as problem:  # a permission that was taken away may come back
                self.away(problem)
                if (away_s := time.monotonic() - began_s) + pause_s > self.cache.timeout_s:
                    raise Retryable(
                        f"data.sources: {self.url} has not answered for {away_s:.0f} s, more than data.cache.timeout_s "
                        f"({problem}), and what was fetched ahead is used up. The same command goes on from the last "
                        "checkpoint once the store is back."
                    ) from None
                time.sleep(pause_s)
        raise AssertionError

    def away(self, problem: Exception) -> None:
        """Note that the store does not answer."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            self.news.append(("store_unreachable", {"url": self.url, "problem": str(problem)}))

    def _reached(self) -> None:
        if self._away_since is not None:
            self.news.append(
                ("store_back", {"url": self.url, "seconds": round(time.monotonic() - self._away_since, 1)})
            )
            self._away_since = None


def _pauses() -> Iterator[float]:
    return chain(STORE_PAUSES_S, repeat(STORE_PAUSES_S[-1]))


def _put(path: Path, content: bytes) -> None:
    """Write a small file that several processes may write at once, each the same."""
    write_unsynced(path, content, by=uuid.uuid4().hex[:8])


def _first_run(blocks: dict[int, IO[bytes] | None]) -> dict[int, IO[bytes] | None]:
    """Return the first of the claimed blocks that follow each other."""
    claimed = [block for block, file in blocks.items() if file is not None]
    run = [block for number, block in enumerate(claimed) if block == claimed[0] + number]
    return {block: blocks[block] for block in run}
