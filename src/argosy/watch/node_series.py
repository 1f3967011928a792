"""What an agent wrote down of its machine and ranks: nodes/NODE.jsonl, lines in the order of time."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from argosy.observe.events import from_the_end
from argosy.observe.records import node_line, record_of

MOST_RECORDS = 400
READ_WHOLE_BYTES = 2**20
"""A stretch of the file that is shorter is read whole; of a longer one, lines that are evenly spread."""
CACHED_RECORDS = 1000

Record = dict[str, Any]


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
        if end - begin <= READ_WHOLE_BYTES:
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
            file.readline()  # the rest of a line, unless one begins right at `offset`
        while (at := file.tell()) < end:
            line = file.readline()
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
