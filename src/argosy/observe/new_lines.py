"""The lines of a file that another process writes, as they come and go: steps that are lost are forgotten again."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from argosy.observe.records import record_of

DENSE = 64
"""Last lines that `marks` keeps exactly. It keeps fewer of those before, the older they are."""

Mark = tuple[int, int, int]
"""Where a known line begins and ends, and its CRC-32."""


class NewLines:
    """The complete lines of a file that are new since the last look. The file may be cut back, and be written anew."""

    def __init__(self, path: Path, marks: Iterable[Mark] | None = None):
        """`marks`: what `marks` returned when the file was last read; without them, what is there now is not new."""
        self._path = path
        self._starts, self._ends, self._sums = array("Q"), array("Q"), array("Q")
        self.was_cut = False
        """True if the last `take` found that known lines are gone, or changed."""
        self.kept: dict[str, Any] | None = None
        """The record of the last known line that stayed, if the last `take` found a cut; None if none stayed."""
        for start, end, line_sum in marks or ():
            self._know(start, end, line_sum)
        if marks is None:
            self.take()

    def take(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return the records of the new lines, `most` of them at most."""
        self.was_cut = False
        try:
            with self._path.open("rb") as file:
                self._forget_what_changed(file)
                self.kept = record_of(self._read(file, -1)) if self.was_cut and self._ends else None
                return list(islice(self._records(file), most))
        except FileNotFoundError:
            self._forget_from(0)
            self.kept = None
            return []

    def marks(self) -> list[Mark]:
        """Return by what known lines are recognized, in order: the last `DENSE`, and of older ones every second, every
        fourth, ...

        If the file was cut back before one that is left out, some lines that did not change are new again.
        """
        kept, stride, index = [], 1, len(self._ends) - 1
        while index >= 0:
            kept.append((self._starts[index], self._ends[index], self._sums[index]))
            if len(kept) % DENSE == 0:
                stride *= 2
            index -= stride
        return kept[::-1]

    def _records(self, file: BinaryIO) -> Iterator[dict[str, Any]]:
        end = self._ends[-1] if self._ends else 0
        file.seek(end)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                return
            self._know(end, end + len(line), zlib.crc32(line))
            end += len(line)
            if (record := record_of(line)) is not None:  # else a kill cut it off
                yield record

    def _know(self, start: int, end: int, line_sum: int) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._sums.append(line_sum)

    def _forget_what_changed(self, file: BinaryIO) -> None:
        """Forget known lines from the end on, until one is there as it was."""
        known = len(self._ends)
        while known and zlib.crc32(self._read(file, known - 1)) != self._sums[known - 1]:
            known -= 1
        self._forget_from(known)

    def _forget_from(self, index: int) -> None:
        self.was_cut = index < len(self._ends)
        for numbers in (self._starts, self._ends, self._sums):
            del numbers[index:]

    def _read(self, file: BinaryIO, index: int) -> bytes:
        file.seek(self._starts[index])
        return file.read(self._ends[index] - self._starts[index])
