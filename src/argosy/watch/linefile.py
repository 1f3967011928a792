"""Files of a run's folder, followed while other processes write them: small files that are replaced as a whole, and the
events of all processes in the order of time.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from argosy.errors import encodable
from argosy.files import read_at_most
from argosy.observe.line_follower import LineFollower
from argosy.observe.records import event_of, record_of


def spread_lines(path: Path, size: int, many: int, longest_bytes: int) -> Iterator[bytes]:
    """Yield at most `many` lines that begin at even distances in the first `size` bytes of a file.

    A longer line than `longest_bytes` is yielded in part. Raises: OSError.
    """
    with path.open("rb") as file:
        end = 0
        for n in range(many):
            at = n * size // many
            if at < end:
                continue
            file.seek(max(0, at - 1))
            if at:
                file.readline(longest_bytes)
            yield file.readline(longest_bytes)
            end = file.tell()


MOST_DOCUMENT_BYTES = 2**24
"""run.toml, plan.toml or report.json that is larger is not ours."""

T = TypeVar("T")


class WatchedFile(Generic[T]):
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
    """Return the table of a file of JSON, its numbers and texts as `record_of` leaves them.

    Raises: ValueError; UserError if it is too large; OSError.
    """
    table = record_of(read_at_most(path, MOST_DOCUMENT_BYTES), MOST_DOCUMENT_BYTES)
    if table is None:
        raise ValueError("no table of JSON")
    return table


MOST_HELD_EVENTS = 20_000
"""Most events that are held. In a longer run the events of single ranks are left out first, then the oldest."""
LEADING_BYTES, OTHER_BYTES = 2**24, 2**18
"""Bytes at the end of a file that are read at first: for processes that tell of the whole run, and for others."""
OF_ONE_RANK = frozenset(("start", "end", "save", "verified", "prune", "drained", "resume", "fetched"))
"""Events that each rank writes, and rank 0 as well."""

Event = dict[str, Any]


class EventLog:
    """The events of a run's folder, followed. Each has its `process`, the name of the file that it is in."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._tails: dict[str, LineFollower] = {}
        self._sizes: dict[str, int] = {}
        self.events: list[Event] = []
        self._left_out: Counter[str] = Counter()

    @property
    def left_out(self) -> int:
        """The number of events that were read and are not held."""
        return self._left_out.total()

    @property
    def counts(self) -> Counter[str]:
        """Kind of event -> how many were read, held or not."""
        return self._left_out + Counter(event["event"] for event in self.events)

    def refresh(self) -> bool:
        """Read what was added; return True if there is anything new. Raises: OSError if the folder cannot be read."""
        new: list[Event] = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(".jsonl") and entry.is_file(follow_symlinks=False):
                    new += self._read(entry)
        if new:
            self.events = sorted([*self.events, *new], key=lambda event: event["time_s"])
            self._bound()
        return bool(new)

    def _read(self, entry: os.DirEntry[str]) -> list[Event]:
        try:
            size = entry.stat().st_size
        except OSError:
            return []
        if size == self._sizes.get(entry.name, 0):
            return []
        process = entry.name.removesuffix(".jsonl")
        if size < self._sizes.get(entry.name, 0):  # replaced: what it held is not there any more
            self.events = [event for event in self.events if event["process"] != process]
            del self._tails[entry.name]
        if entry.name not in self._tails:
            most_bytes = LEADING_BYTES if tells_of_the_run(process) else OTHER_BYTES
            self._tails[entry.name] = LineFollower.near_end(Path(entry.path), most_bytes)
        self._sizes[entry.name] = size
        checked = map(event_of, self._tails[entry.name].take())
        return [{**event, "process": process} for event in checked if event is not None]

    def _bound(self) -> None:
        if len(self.events) <= MOST_HELD_EVENTS:
            return
        before = self.counts
        self.events = [e for e in self.events if tells_of_the_run(e["process"]) or e["event"] not in OF_ONE_RANK]
        self.events = self.events[-MOST_HELD_EVENTS:]
        self._left_out = before - Counter(event["event"] for event in self.events)


def tells_of_the_run(process: str) -> bool:
    """Return True for the processes whose events are about the whole run or a machine, not about one rank of many."""
    return not process.startswith("rank-") or process == "rank-0"
