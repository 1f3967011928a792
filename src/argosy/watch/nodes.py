"""The lines that agents write of their machines and ranks (nodes/NODE.jsonl), read where they are asked for, and the
energy of all of them, added up.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from argosy.observe.events import from_the_end
from argosy.observe.line_follower import LineFollower
from argosy.observe.records import MOST_LINE_BYTES, Record, node_line, record_of

MOST_RECORDS = 400
NODES_READ_WHOLE_BYTES = 2**20
"""A stretch of the file that is shorter is read whole; of a longer one, lines that are evenly spread."""
CACHED_RECORDS = 1000


class NodeSeries:
    """The lines of one node, read where they are asked for: in a large run they are a gigabyte a day."""

    def __init__(self, path: Path):
        self.node = path.stem
        self.last: Record = {}
        """The newest line."""
        self.first: Record = {}
        self._path = path
        self._size = 0
        self._cache: OrderedDict[int, tuple[int, Record]] = OrderedDict()

    def refresh(self) -> bool:
        """Look for a newer line; return True if there is one."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return False
        if size == self._size:
            return False
        if size < self._size:
            self._cache.clear()
        self._size = size
        self.last = next((line for line in map(node_line, from_the_end(self._path)) if "time_s" in line), {})
        if not self.first:
            with suppress(OSError), self._path.open("rb") as file:
                self.first = self._after(file, 0, size)[1] or {}
        return True

    def records(
        self, first_s: float | None = None, last_s: float | None = None, most: int = MOST_RECORDS
    ) -> tuple[list[Record], bool]:
        """Return lines that were written between two times (seconds since 1970, included), about `most` at most.

        If there are more, they are evenly spread over the file, and the second result is False: not all are there.
        """
        try:
            with self._path.open("rb") as file:
                begin = 0 if first_s is None else self._offset(file, first_s)
                end = self._size if last_s is None else self._offset(file, last_s, after=True)
                records, all_there = self._between(file, begin, end, most)
        except OSError:
            return [], True
        return [r for r in records if (first_s or 0.0) <= r["time_s"] <= (last_s or float("inf"))], all_there

    def _between(self, file: BinaryIO, begin: int, end: int, most: int) -> tuple[list[Record], bool]:
        if end - begin <= NODES_READ_WHOLE_BYTES:
            file.seek(begin)
            parsed = map(_line, file.read(end - begin).split(b"\n"))
            records = [record for record in parsed if record is not None]
            if len(records) <= most:
                return records, True
            return [records[n * len(records) // most] for n in range(most)], False
        # Multiples of a power of two: as the file grows, the same lines are asked for, and most are in the cache.
        stride = 1 << ((end - begin) // max(1, most)).bit_length()
        out: list[Record] = []
        reached = -1
        for at in range(-(-begin // stride) * stride, end, stride):
            if at <= reached:  # in the line before the record that was found last, which may be long
                continue
            reached, record = self._cached(file, at)
            if record is not None:
                out.append(record)
        return out, False

    def _cached(self, file: BinaryIO, at: int) -> tuple[int, Record | None]:
        if at in self._cache:
            self._cache.move_to_end(at)
            return self._cache[at]
        found = self._after(file, at, self._size)
        if found[1] is not None:
            self._cache[at] = found[0], found[1]
            if len(self._cache) > CACHED_RECORDS:
                self._cache.popitem(last=False)
        return found

    def _offset(self, file: BinaryIO, time_s: float, after: bool = False) -> int:
        """Return where the first line begins that was written at `time_s` or later (`after`: later)."""
        low, high = 0, self._size
        while low < high:
            middle = (low + high) // 2
            at, record = self._after(file, middle, high)
            if record is None or record["time_s"] > time_s or (record["time_s"] == time_s and not after):
                high = middle
            else:
                low = at + 1
        at, record = self._after(file, low, self._size)
        return at if record is not None else self._size

    def _after(self, file: BinaryIO, offset: int, end: int) -> tuple[int, Record | None]:
        """Return the first record that begins at `offset` or later, and where; None if none does before `end`."""
        file.seek(max(0, offset - 1))
        if offset:
            file.readline(MOST_LINE_BYTES)  # the rest of a line, unless one begins right at `offset`
        while (at := file.tell()) < end:
            line = file.readline(MOST_LINE_BYTES)
            record = _line(line) if line.endswith(b"\n") else None
            if record is not None:
                return at, record
            if not line:
                break
        return end, None


def _line(line: bytes) -> Record | None:
    """Return a line that says when it was written; None if it is none."""
    record = node_line(record_of(line) or {})
    return record if "time_s" in record else None


def in_newest_world(lines: Mapping[str, Record]) -> list[str]:
    """Return the nodes whose newest lines are about the newest world: others have left, or have another name now."""
    newest = max((line.get("generation", 0) for line in lines.values()), default=0)
    return [node for node, line in lines.items() if line.get("generation", 0) == newest]


SERIES_POINTS = 500
MOST_MINUTES = 1_000_000
LONGEST_LINE_S = 120.0
"""A line that comes so much later than the one before tells of another time too: the run was stopped."""

try:
    import msgspec
except ImportError:
    msgspec = None  # type: ignore[assignment]


@dataclass(slots=True)
class _Minute:
    """The lines of a minute: their energy, and the seconds that they cover, added up over nodes."""

    joules: float = 0.0
    seconds: float = 0.0
    nodes: int = 0


class EnergySoFar:
    """The energy of a run so far. Each line of nodes/NODE.jsonl says what was used since the one before."""

    def __init__(self, folder: Path):
        """`folder`: the run's."""
        self._folder = folder / "nodes"
        self._files: dict[str, LineFollower] = {}
        self._clear()

    def _clear(self) -> None:
        self.joules = 0.0
        self._sources: set[str] = set()
        self._minutes: dict[int, _Minute] = {}
        self._last: dict[str, float] = {}
        self._counted: dict[str, int] = {}
        """Node -> the last minute that it was counted in."""

    @property
    def source(self) -> str:
        """nvml, rapl or estimate; several are joined by +."""
        return "+".join(sorted(self._sources))

    def refresh(self, nodes: Iterable[str]) -> None:
        """Read the lines that these nodes have added."""
        for node in nodes:
            self._files.setdefault(node, LineFollower(self._folder / f"{node}.jsonl"))
        try:
            if sum(file.forget_what_is_gone() for file in self._files.values()):
                self._clear()  # a file was replaced: the sum is made anew
                self._files = {node: LineFollower(file.path) for node, file in self._files.items()}
            for node, file in self._files.items():
                for chunk in file.blocks():
                    for line in _records(chunk):
                        self._add(node, line)
        except OSError:
            return

    def _add(self, node: str, line: dict[str, Any]) -> None:
        used, time_s = line.get("energy"), line.get("time_s")
        joules = used.get("joules") if isinstance(used, dict) else None
        if isinstance(joules, int | float) and isinstance(time_s, int | float) and joules >= 0:
            self.joules += joules
            self._sources.add(str(used.get("source")))  # type: ignore[union-attr]
            before_s = self._last.get(node, -math.inf)
            self._last[node] = max(time_s, before_s)
            # The first line of an agent does not say since when; and a minute may be covered in part.
            minute = int(time_s // 60)
            if 0 < time_s - before_s <= LONGEST_LINE_S and (
                minute in self._minutes or len(self._minutes) < MOST_MINUTES
            ):
                told = self._minutes.setdefault(minute, _Minute())
                told.joules, told.seconds = told.joules + joules, told.seconds + time_s - before_s
                told.nodes += self._counted.get(node) != minute
                self._counted[node] = minute

    def series(self) -> dict[str, list[float]]:
        """Return the mean power over time: W, by stretches of minutes; of each, of the part that lines tell of."""
        minutes = sorted(self._minutes)
        if not minutes:
            return {"time_s": [], "power_w": []}
        size = -(-(minutes[-1] - minutes[0] + 1) // SERIES_POINTS)
        sums: dict[int, tuple[float, float]] = {}
        for minute in minutes:
            begin = minute - (minute - minutes[0]) % size
            joules, seconds = sums.get(begin, (0.0, 0.0))
            told = self._minutes[minute]
            sums[begin] = joules + told.joules, seconds + told.seconds / told.nodes
        return {"time_s": [60.0 * m for m in sums], "power_w": [joules / seconds for joules, seconds in sums.values()]}


def _records(chunk: bytes) -> list[dict[str, Any]]:
    """Return `time_s` and `energy` of the chunk's lines."""
    if msgspec is not None:
        kind = msgspec.defstruct("Line", [("time_s", Any, None), ("energy", Any, None)], gc=False)
        try:
            found: list[Any] = msgspec.json.Decoder(kind).decode_lines(chunk)
            return [{"time_s": line.time_s, "energy": line.energy} for line in found]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # a damaged line: one by one
    return [line for line in map(record_of, chunk.split(b"\n")) if line is not None]
