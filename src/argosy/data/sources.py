"""Turn `prepare.input` into one ordered list of files: files, folders, globs, URLs, builtin corpora, and the user's
sources (source:NAME or source:NAME:ARGUMENT), which are functions that yield documents.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain, islice, repeat, takewhile
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from argosy.credentials import CREDENTIALS_REMEDY, has_credentials
from argosy.data.manifest import CUTTING_JOURNAL
from argosy.data.manifest import DATA_MANIFEST as MANIFEST
from argosy.errors import UserError, a_kind, near_names
from argosy.extend.declared import CodeFile
from argosy.extend.loading import Extension, find
from argosy.files import fsspec_place

BUILTIN_PREFIX = "builtin:"
PYTHON = "builtin:python"


def builtin_files(item: str) -> list[Path]:
    """Return the files of a builtin corpus, in a fixed order.

    Raises: UserError if `item` is not a builtin corpus, or this Python has no sources.
    """
    if item != PYTHON:
        raise UserError(f"input = {item}: there is no such builtin corpus. Use {PYTHON}, or name files or folders.")
    files = _standard_library() + _torch()
    if not files:
        raise UserError(f"input = {item}: this Python comes without its .py sources. Name files or folders instead.")
    return files


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages"}
    return [path for path in sorted(root.rglob("*.py")) if not outside.intersection(path.relative_to(root).parts)]


def _torch() -> list[Path]:
    """Find the .py files of torch without importing it."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return []
    return sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))


COMPRESSED_ENDINGS = (".gz", ".zst")
RECORDS = (".jsonl", ".ndjson", ".parquet")
OF_CONVERSATIONS = (*RECORDS, ".json")
"""Suffixes that conversations are read from."""
TEXTS = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".htm", ".xml", ".csv", ".tsv"),
    *(".py", ".pyi", ".ipynb", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt"),
    *(".js", ".ts", ".jsx", ".tsx", ".css", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".scala", ".swift", ".cs"),
    *(".hs", ".ml", ".ex", ".exs", ".clj", ".lisp", ".sh", ".bash", ".sql", ".proto", ".cmake", ".mk"),
    *(".toml", ".yaml", ".yml", ".ini", ".cfg", ".json"),
)
"""Suffixes that are read from a folder or a glob. A file that is named itself, or by a glob whose last part is no
pattern (*/README), is read as text whatever its suffix."""


SPLIT_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
"""Words in names of files and folders by which Hugging Face datasets knows the splits of a data set."""


@dataclass(frozen=True)
class InputFile:
    name: str
    """A path or a URL, as messages show it."""
    fs: Any
    """The fsspec file system of the file."""
    path: str
    """Path in `fs`."""
    size: int | None
    """Size as stored, bytes; None if the server does not say."""
    stamp: str
    """A value that changes when the file does, as far as the file system can tell."""
    texts: Callable[[], Iterable[str]] | None = None
    """Gives the documents of a source of the user's, which has no file; else None."""
    is_seekable: bool = True
    """False if the server gives the file only from its beginning."""
    field: str = "text"
    """Field or column of its records that holds the text."""

    @property
    def as_found(self) -> tuple[str, int | None, str, bool, str]:
        """The facts that another process needs to open it."""
        return self.name, self.size, self.stamp, self.is_seekable, self.field

    @property
    def suffix(self) -> str:
        """The kind of records: the suffix, in lower case, without that of a compression."""
        return _suffixes(self.path)[0]

    @property
    def compression(self) -> str:
        """One of `COMPRESSED_ENDINGS`, or the empty string."""
        return _suffixes(self.path)[1]


@dataclass(frozen=True)
class Input:
    """The files that `prepare.input` names."""

    files: list[InputFile]
    left_out: list[InputFile]
    """Files of folders and globs that are not read, since their suffix is not known. Hidden files and
    prepared data are in neither."""
    other_splits: list[InputFile] = field(default_factory=list)
    """Files of data sets that are not read, since they are of another split than train."""


def find_files(
    items: Iterable[str],
    extensions: Sequence[str] = (),
    code: Sequence[CodeFile] = (),
    fields: Iterable[str] = (),
    of_conversations: bool = False,
) -> Input:
    """Find all files that the items of `prepare.input` name, in order of items; those of a folder or glob by path.

    extensions: suffixes that are text beside TEXTS; * stands for any. code: where sources of the user's are declared.
    fields: for each item, the field of its records that holds the text. of_conversations: other files of a folder or
    glob are left out.
    Raises: UserError if an item names nothing, or its protocol is unknown or lacks a package.
    """
    usual = OF_CONVERSATIONS if of_conversations else (*TEXTS, *RECORDS)
    found = [
        Input([user_source(item, code)], []) if item.startswith(SOURCE_PREFIX) else _expand(item, extensions, usual)
        for item in items
    ]
    if not found:
        raise UserError("input = []: nothing to prepare. Name files, folders, globs, URLs or builtin:python.")
    of_each = chain(fields, repeat(InputFile.field))
    files = [replace(file, field=field) for each, field in zip(found, of_each, strict=False) for file in each.files]
    named = {file.name for file in files}  # what one item leaves out, another may name
    left_out = {file.name: file for each in found for file in each.left_out if file.name not in named}
    other_splits = [file for each in found for file in each.other_splits if file.name not in named]
    return Input(files, list(left_out.values()), other_splits)


def user_source(item: str, code: Sequence[CodeFile]) -> InputFile:
    """Return the source of the user's that `item` names, as a file. Raises: UserError."""
    texts, checksum = texts_of(item, code)
    return InputFile(item, None, item, None, checksum, texts)


def _expand(item: str, extensions: Sequence[str], usual: Sequence[str]) -> Input:
    if not item.strip():  # a shell's variable that is not set; fsspec would read the folder that one is in
        raise UserError(f"input = {item!r}: an empty name. Name files or a folder; . is the one that you are in.")
    if item.startswith(BUILTIN_PREFIX):
        local = fsspec.filesystem("file")
        return Input([_file(local, str(path), local.info(str(path))) for path in builtin_files(item)], [])
    if has_credentials(item):
        raise UserError(f"input = {item}: {CREDENTIALS_REMEDY}.")
    fs, path = _file_system(item)
    try:
        return _look_up(item, fs, path, extensions, usual)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(
            f"input = {item}: there is no such file or folder. Check the path, or quote the glob so that the shell "
            "leaves it alone."
        ) from None
    except Exception as error:  # each remote file system has errors of its own: no network, no such repository
        raise UserError(
            f"input = {item}: cannot be read ({error}). Check the address, your rights there and the network."
        ) from None


def _file_system(item: str) -> tuple[Any, str]:
    try:
        return fsspec_place(item)
    except Exception as error:  # the protocol's package is missing, there is no such protocol, or it asks the network
        raise UserError(f"input = {item}: {error}. Install what it asks for, or copy the files here.") from None


def _look_up(item: str, fs: Any, path: str, extensions: Sequence[str], usual: Sequence[str]) -> Input:
    if fs.isfile(path):
        return Input([_file(fs, path, fs.info(path))], [])
    if fs.isdir(path):
        found, what, root = fs.find(path, detail=True), "folder", path
    elif _has_wildcard(path):
        found, what = fs.glob(path, detail=True), "glob"
        root = str(PurePosixPath(*takewhile(lambda part: not _has_wildcard(part), PurePosixPath(path).parts)))
    else:
        raise FileNotFoundError(path)
    is_folder = what == "folder"  # a glob has no files of the folders that it matches
    links = {name: info for name, info in found.items() if info.get("islink") and (is_folder or not fs.isdir(name))}
    linked = _behind(fs, links, {os.path.realpath(root)})
    found = {name: info for name, info in found.items() if name not in links} | linked
    prepared = _prepared(found)
    if path.rstrip("/") in prepared:
        raise UserError(
            f"input = {item}: this folder holds prepared data, which are tokens already. Name it in data.sources, "
            "or give the text that it was made of."
        )
    prepared |= {file.rpartition("/")[0] for file in found if file.endswith(f"/{CUTTING_JOURNAL}")} - {path}
    names_hidden = "/." in path[len(root) :]
    files = [
        _file(fs, name, info)
        for name, info in sorted(found.items())
        if info["type"] == "file"
        and (names_hidden or not _is_hidden(name, root))
        and not any(name.startswith(f"{folder}/") for folder in prepared)
    ]
    if what == "glob" and files and not _has_wildcard(PurePosixPath(path).name):
        return Input(_once(files, linked), [])
    known = {*usual, *(f".{extension.lower().lstrip('.')}" for extension in extensions)}
    taken = _once(files if "*" in extensions else [file for file in files if file.suffix in known], linked)
    if not taken:
        raise UserError(
            f"input = {item}: this {what} holds {len(files)} files, none of a known kind "
            f"({' '.join(usual)}, also with {' or '.join(COMPRESSED_ENDINGS)}). "
            "If they are text, name the files themselves, or their extensions in `extensions` (.log; * for any)."
        )
    left_out = [] if "*" in extensions else [file for file in files if file.suffix not in known]
    taken, other_splits = _of_train(item, path, taken, is_hub="hf" in fs.protocol) if is_folder else (taken, [])
    return Input(taken, left_out, other_splits)


def _behind(fs: Any, links: dict[str, dict[str, Any]], above: set[str]) -> dict[str, dict[str, Any]]:
    """Return the files that links of a local folder lead to, by the links' names. above: folders that hold the links,
    so that a circle ends."""
    found = dict[str, dict[str, Any]]()
    for name, info in links.items():
        target = os.path.realpath(name)
        if not fs.isdir(name):  # a link to nothing is told when it is read
            found[name] = fs.info(name) if fs.exists(name) else info | {"type": "file"}
        elif target not in above:
            inside = fs.find(name, detail=True)
            further = {path: each for path, each in inside.items() if each.get("islink")}
            found |= {path: each for path, each in inside.items() if path not in further}
            found |= _behind(fs, further, above | {target})
    return found


def _once(files: Sequence[InputFile], linked: Collection[str]) -> list[InputFile]:
    """Leave out files behind links (`linked`) that are there without, or behind another link."""
    taken = {os.path.realpath(file.path) for file in files if file.path not in linked} if linked else set()
    kept = []
    for file in files:
        if file.path in linked:
            target = os.path.realpath(file.path)
            if target in taken:
                continue
            taken.add(target)
        kept.append(file)
    return kept


def _of_train(item: str, folder: str, files: list[InputFile], is_hub: bool) -> tuple[list[InputFile], list[InputFile]]:
    """Return the files of a data set's train split, and those of its others; all files if this is no data set.

    A data set is a folder of Parquet files whose names or folders name splits, as Hugging Face datasets lay them out,
    or a data set of its hub. What lies beside its tables, such as its README, is not part of it.
    """
    splits = {file.name: _split(file.path[len(folder) :]) for file in files}
    of_hub = {file.name for file in files if file.suffix in RECORDS or (file.suffix == ".json" and splits[file.name])}
    tables = [file for file in files if file.suffix == ".parquet" or (is_hub and file.name in of_hub)]
    splits = {file.name: splits[file.name] for file in tables}
    if not any(splits.values()):
        return (tables if is_hub and tables else files), []
    train = [file for file in tables if splits[file.name] == "train"]
    if not train:
        raise UserError(
            f"input = {item}: this data set has no split train, but {', '.join(sorted({*splits.values()} - {''}))}. "
            "Name the files that are meant, or their folder."
        )
    return train, [file for file in tables if splits[file.name] != "train"]


def _split(path: str) -> str:
    """Return the split that a path below a data set's folder names: train, test, validation, or ""."""
    for part in reversed(PurePosixPath(path.lower()).parts):
        words = re.split(r"[^a-z]+", part)
        for split, names in SPLIT_WORDS.items():
            if any(name in words for name in names):
                return split
    return ""


def _prepared(files: Iterable[str]) -> set[str]:
    """Return the folders that hold prepared data: a manifest, and an index of documents."""
    indexed = {file.rpartition("/")[0] for file in files if file.endswith(".idx")}
    return {
        folder for file in files if file.endswith(f"/{MANIFEST}") and (folder := file.rpartition("/")[0]) in indexed
    }


def _has_wildcard(path: str) -> bool:
    return any(letter in path for letter in "*?[")


def _is_hidden(name: str, folder: str) -> bool:
    """Return True if a file below `folder` is in a dot folder, such as .git, or is a dot file."""
    return any(part.startswith(".") for part in PurePosixPath(name[len(folder) :]).parts)


def _file(fs: Any, path: str, info: dict[str, Any]) -> InputFile:
    stamp = next((str(info[key]) for key in ("mtime", "ETag", "etag", "LastModified", "blob_id") if info.get(key)), "")
    is_local, is_http = "file" in fs.protocol, "http" in fs.protocol
    name = path if is_local else str(fs.unstrip_protocol(path))
    is_seekable = not is_http or info.get("partial", False)
    return InputFile(name, fs, path, info.get("size"), stamp, is_seekable=is_seekable)


def file_again(found: Sequence[Any], code: Sequence[CodeFile]) -> InputFile:
    """Return a file from its `as_found`, in another process. Raises: UserError as `find_files`."""
    name, size, stamp, is_seekable, field = found
    if name.startswith(SOURCE_PREFIX):
        return user_source(name, code)
    fs, path = (fsspec.filesystem("file"), name) if name.startswith("/") else _file_system(name)
    return InputFile(name, fs, path, size, stamp, is_seekable=is_seekable, field=field)


def _suffixes(path: str) -> tuple[str, str]:
    """Return (kind, compression) of a path; the query of a URL does not belong to its suffix."""
    name = path.partition("?")[0] if "://" in path else path
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED_ENDINGS else ""
    return (suffixes[-1] if suffixes else ""), compression


SOURCE_PREFIX = "source:"
TRIED = 8
"""Documents that are read twice before anything is written, to see that they come again."""


def texts_of(item: str, code: Sequence[CodeFile]) -> tuple[Callable[[], Iterable[str]], str]:
    """Return what gives the documents of `item`, and the checksum of the code that does.

    Raises: UserError if there is no such source, or it raises, yields other than text, or does not repeat itself.
    """
    name, _, argument = item.removeprefix(SOURCE_PREFIX).partition(":")
    declared = {d.name: file for file in code for d in file.declarations if d.kind == "source"}
    if name not in declared:
        near = near_names(name, sorted(declared)) if declared else "no file of extensions declares one (--extend FILE)."
        raise UserError(f"input = {item}: there is no source {name!r}; {near}")
    extension = find(code, "source", name)

    def texts() -> Iterator[str]:
        yield from _checked(extension, item, argument)

    first, second = list(islice(texts(), TRIED)), list(islice(texts(), TRIED))
    if first != second:
        raise UserError(
            f"{extension.declared.place}: the {extension.declared} yields other documents when it is read again. It is "
            "read several times, so it must repeat itself: sort what it lists, and seed what it draws."
        )
    return texts, declared[name].sha256_for(name)


def checksums_of(items: Iterable[str], code: Sequence[CodeFile]) -> dict[str, str]:
    """Return the checksum of the code of each source of the user's among `items`."""
    names = {item.removeprefix(SOURCE_PREFIX).partition(":")[0] for item in items if item.startswith(SOURCE_PREFIX)}
    return {
        d.name: file.sha256_for(d.name)
        for file in code
        for d in file.declarations
        if d.kind == "source" and d.name in names
    }


def _checked(extension: Extension, item: str, argument: str) -> Iterator[str]:
    number = 0
    try:
        for number, text in enumerate(extension.function(argument), 1):
            if not isinstance(text, str):
                raise TypeError(f"document {number} is {a_kind(text)}, not text")
            yield text
    except Exception as error:
        raise UserError(f"{extension.raised(error)}, after {number} documents of {item}.") from error
