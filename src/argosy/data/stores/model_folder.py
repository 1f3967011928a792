"""A model's folder, on this machine, in an object store or on Hugging Face's hub: its files, read range by range."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from argosy.credentials import CREDENTIALS_REMEDY, has_credentials
from argosy.data.stores.store import Store, StoreUnreachable, is_url, patiently, spelled
from argosy.errors import StorageError, UserError
from argosy.files import FILE_COPY_BYTES, RegularFile, read_at_most, sync, whole_folder

CompressedFormat = Literal["fp8", "int8", "int4"]
ExportFormat = Literal["safetensors", "gguf", CompressedFormat]
"""The forms in which a model is written."""
ExportDtype = Literal["stored", "fp32", "bf16", "fp16"]
GgufType = Literal["bf16", "f16", "q8_0", "q4_0"]
HUB = "hf://"
TOOLS_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""The chat template that transformers takes where there are tools, if a folder has one beside the other."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which a folder of PEFT is known: an adapter, without its weights."""
_HUB_NAME = re.compile(r"[^/]+/[^/]+")


class ModelFolder:
    """A folder of this machine; the base of those elsewhere."""

    def __init__(self, path: Path):
        self.name = str(path)
        """The folder as messages name it."""
        self._path = path
        self._files: dict[str, RegularFile] = {}

    def where(self, name: str) -> str:
        return f"{self.name}/{name}"

    def names(self) -> list[str]:
        """Return the files of the folder. Raises: UserError."""
        try:
            return sorted(path.name for path in self._path.iterdir() if path.is_file())
        except OSError:
            return []

    def size(self, name: str) -> int | None:
        """Return a file's length in bytes; None if there is no such file. Raises: UserError."""
        path = self._path / name
        return path.stat().st_size if path.is_file() else None

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with a file's bytes from `start` on, which must be there. Raises: StorageError."""
        try:
            if name not in self._files:
                self._files[name] = RegularFile(self._path / name)
            self._files[name].read_into(start, buffer)
        except OSError as problem:
            raise StorageError(f"{self.where(name)} cannot be read ({problem}). Get it again.") from None

    def content(self, name: str, most_bytes: int) -> bytes:
        """Return a small file whole. Raises: UserError if it is missing or longer than `most_bytes`."""
        size = self.size(name)
        if size is None:
            raise UserError(f"{self.where(name)} is not there. Get the whole folder.")
        if size > most_bytes:
            raise UserError(f"{self.where(name)} has more than {most_bytes >> 20} MiB: it is not what its name says.")
        data = bytearray(size)
        self.read_into(name, 0, memoryview(data))
        return bytes(data)


class ModelInStore(ModelFolder):
    """A folder of an object store."""

    def __init__(self, url: str, named: str):
        """named: what stands before the URL in messages. Raises: UserError."""
        self._store, self.name = Store(url, named), f"{named}{url}".rstrip("/")
        self._sizes: Mapping[str, int] | None = None

    def names(self) -> list[str]:
        return sorted(name for name in self._known() if "/" not in name)

    def size(self, name: str) -> int | None:
        return self._known().get(name)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        for done in range(0, len(buffer), FILE_COPY_BYTES):
            some = buffer[done : done + FILE_COPY_BYTES]
            first = start + done
            try:
                some[:] = patiently(self.where(name), self._store.get_range, name, first, first + len(some))
            except FileNotFoundError as problem:
                raise StorageError(f"{problem}. Copy the model there again.") from None

    def _known(self) -> Mapping[str, int]:
        if self._sizes is None:
            sizes = patiently(self.name, self._store.sizes)
            if sizes is None:
                raise UserError(f"{self.name}: the server keeps no list of its files. Give s3://, gs:// or az://.")
            self._sizes = sizes
        return self._sizes


class ModelOnHub(ModelFolder):
    """A model of Hugging Face's hub: hf://OWNER/NAME, with @REVISION if not the newest."""

    def __init__(self, url: str, named: str):
        """named: what stands before the URL in messages. Raises: UserError."""
        self.name = f"{named}{url}".rstrip("/")
        self._repository = url.removeprefix(HUB).strip("/")
        if not _HUB_NAME.fullmatch(self._repository):
            raise UserError(f"{self.name}: no model. Give hf://OWNER/NAME, or hf://OWNER/NAME@REVISION.")
        try:
            from huggingface_hub import HfFileSystem
        except ImportError:
            raise UserError(
                f"{self.name}: needs the package huggingface_hub. pip install 'argosy[hub]', or copy the folder here."
            ) from None
        self._hub: Any = HfFileSystem()
        self._sizes: dict[str, int] | None = None

    def names(self) -> list[str]:
        return sorted(name for name in self._known() if "/" not in name)

    def size(self, name: str) -> int | None:
        return self._known().get(name)

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        for done in range(0, len(buffer), FILE_COPY_BYTES):
            some = buffer[done : done + FILE_COPY_BYTES]
            some[:] = patiently(self.where(name), self._ask, name, start + done, len(some))

    def _ask(self, name: str, first: int, count: int) -> bytes:
        try:
            data = self._hub.cat_file(f"{self._repository}/{name}", start=first, end=first + count)
        except Exception as problem:  # the library's, httpx's, and the system's
            raise StoreUnreachable(str(problem).partition("\n")[0]) from None
        if len(data) != count:
            raise StoreUnreachable(f"gave {len(data)} of {count} bytes")
        return bytes(data)

    def _known(self) -> dict[str, int]:
        if self._sizes is None:
            try:
                found = self._hub.find(self._repository, detail=True)
            except Exception as problem:  # no such model, no right to it, no network
                why = str(problem).partition("\n")[0] or "there is no such model"
                raise UserError(
                    f"{self.name}: cannot be read ({why}). Check the name, your rights there (hf auth login) and the "
                    "network."
                ) from None
            self._sizes = {name.split("/", 2)[2]: int(entry["size"]) for name, entry in found.items()}
        return self._sizes


def is_model_folder(place: str | Path) -> bool:
    """Return True for a Hugging Face folder, or a URL; False for a run, which may have come from one."""
    return is_url(place) or ((Path(place) / "config.json").is_file() and not (Path(place) / "run.toml").is_file())


def model_folder(place: str | Path, named: str = "") -> ModelFolder:
    """Return the model's folder at a path or URL. named: what stands before a URL in messages. Raises: UserError."""
    text = spelled(place)
    if has_credentials(text):
        raise UserError(f"{named}{text}: {CREDENTIALS_REMEDY}.")
    if text.startswith(HUB):
        return ModelOnHub(text, named)
    return ModelInStore(text, named) if is_url(text) else ModelFolder(Path(place))


class ByteSink(Protocol):
    """Takes the bytes of a file, in order."""

    def write(self, data: memoryview | bytes, /) -> object: ...


class Destination(Protocol):
    """A folder that is being written: it is there once the last file is, or nothing is."""

    def file(self, name: str) -> AbstractContextManager[ByteSink]:
        """Open a new file."""
        ...


@contextmanager
def new_folder(place: str | Path) -> Iterator[Destination]:
    """Make a folder, here or in a store, out of the files that the block writes; after an error nothing is left.

    Raises: UserError if it exists already, or cannot be a folder; StorageError if it cannot be written.
    """
    if str(place).startswith(HUB):
        raise UserError(
            f"{place}: nothing is written to the hub. Give a folder here, then: hf upload OWNER/NAME FOLDER"
        )
    make = _new_in_store(str(place)) if is_url(place) else _new_here(Path(place))
    with make as destination:
        yield destination


def refuse_existing(folder: Path) -> None:
    """Raise UserError if a folder that is to be written exists."""
    if folder.exists():
        raise UserError(f"{folder} exists already. Choose another folder, or remove it first.")


class _Here:
    def __init__(self, partial: Path):
        self._partial = partial

    @contextmanager
    def file(self, name: str) -> Iterator[ByteSink]:
        with (self._partial / name).open("xb") as file:
            yield file
            sync(file)


@contextmanager
def _new_here(folder: Path) -> Iterator[_Here]:
    refuse_existing(folder)
    with whole_folder(folder) as partial:
        yield _Here(partial)


class _InStore:
    def __init__(self, store: Store):
        self._store, self.written = store, list[str]()

    @contextmanager
    def file(self, name: str) -> Iterator[ByteSink]:
        self.written.append(name)
        with self._store.writer(name) as sink:
            yield sink


@contextmanager
def _new_in_store(url: str) -> Iterator[_InStore]:
    store = Store(url, "")
    if there := patiently(url, store.sizes):
        raise UserError(f"{url} exists already, with {min(there)}. Choose another folder, or remove it first.")
    destination = _InStore(store)
    try:
        yield destination
    except BaseException as problem:
        with suppress(Exception):
            store.delete(destination.written)
        if isinstance(problem, StoreUnreachable):
            raise StorageError(f"{url} could not be written ({problem}). Run the same command again.") from None
        raise


def with_tools(template: str, of_tools: str) -> str:
    """Return one chat template of two: `of_tools` where there are tools."""
    of_tools, template = of_tools.removesuffix("\n"), template.removesuffix("\n")  # as jinja2 does
    return f"{{% if tools %}}{of_tools}{{% else %}}{template}{{% endif %}}"


def read_beside(place: str | Path, names: Sequence[str], most_bytes: int) -> dict[str, bytes]:
    """Return those of `names` that are files of the folder at `place`, as they are. Raises: UserError, OSError."""
    if not is_url(place):
        folder = Path(place)
        return {name: read_at_most(folder / name, most_bytes) for name in names if (folder / name).is_file()}
    there = model_folder(place)
    return {name: there.content(name, most_bytes) for name in names if there.size(name) is not None}
