"""The small files of a run's folder, which are replaced as a whole; and which files are read at all."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from argosy.observe.records import encodable, record_of

MOST_DOCUMENT_BYTES = 2**24
"""run.toml, plan.toml or report.json that is larger is not ours."""

T = TypeVar("T")


class Document(Generic[T]):
    """A small file that is replaced as a whole, and parsed anew when it was."""

    def __init__(self, path: Path, parse: Callable[[Path], T]):
        self._path, self._parse = path, parse
        self._version: tuple[int, int, int] | None = None
        self.value: T | None = None
        self.problem = ""

    def refresh(self) -> bool:
        """Parse the file if it is another than before; return True if it was. Raises: OSError."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            changed, self.value, self._version, self.problem = self._version is not None, None, None, ""
            return changed
        version = (found.st_ino, found.st_size, found.st_mtime_ns)
        if version == self._version:
            return False
        self._version, self.value, self.problem = version, None, ""
        if found.st_size > MOST_DOCUMENT_BYTES:
            self.problem = f"{self._path.name}: too large to be a run's, and not read"
            return True
        try:
            self.value = self._parse(self._path)
        except FileNotFoundError:
            self._version = None
        except Exception as error:  # whatever the parser meets: the file may hold anything
            first_line = encodable(str(error)).partition("\n")[0]
            self.problem = f"{self._path.name}: cannot be understood ({first_line[:300]})"
        return True


def leads_away(folder: Path, name: str) -> bool:
    """Return True for what must not be read: a link to outside of `folder`, a pipe, a device."""
    path = folder / name
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # there is nothing, which is for the reader to say
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return True
    return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())


def table_of(path: Path) -> dict[str, Any]:
    """Return the table of a file of JSON, its numbers and texts as `record_of` leaves them. Raises: ValueError."""
    table = record_of(path.read_bytes(), MOST_DOCUMENT_BYTES)
    if table is None:
        raise ValueError("no table of JSON")
    return table
