"""A JSONL file, followed while other processes append to it, cut it back after a recovery, or replace it."""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO, Self

from argosy.observe.records import record_of

LINE_READ_BYTES = 2**21
"""Bytes that are read at once: some milliseconds of work, after which other threads have their turn."""
LONGEST_RECORD_BYTES = 2**24
"""A longer line is no record of ours: it is read in parts, none of which is a record."""
SEAL_BYTES = 256
"""Bytes at the end of a block that must still be there, or the file was cut or replaced."""
DENSE = 64
"""Last blocks that `marks` keeps exactly. It keeps fewer of those before, the older they are."""
TAIL_BYTES = 2**20
"""More than a thousand lines of metrics."""

Mark = tuple[int, int, int]
"""Begin and end of the sealed part of a block, and its CRC-32."""


class LineFollower:
    """The complete lines of a file, in blocks of which each begins and ends with a line.

    Each block is sealed by a checksum of its last bytes, so a cut is noticed even if the file has grown longer again in
    the meantime. A file that is gone (it may be being rotated) counts as unchanged until it is back.
    """

    def __init__(self, path: Path, *, by_line: bool = False, last_bytes: int = 0, marks: Iterable[Mark] = ()):
        """by_line: each line is a block, and sealed as a whole: after a cut, no line that stayed is read again.
        last_bytes: of what was added since the last look, or is there at first, read only so much at the end; 0: all.
        marks: what `marks` returned when the file was last read.
        """
        self.path, self._by_line, self._last_bytes = path, by_line, last_bytes
        self._starts, self._ends, self._sums, self._notes = array("Q"), array("Q"), array("Q"), array("d")
        for mark in marks:
            self._know(*mark)
        self.is_missing = True
        self.was_cut = False
        """True if the last `take` found that lines that were read are gone, or changed."""
        self.kept: dict[str, Any] | None = None
        """By line: the record of the last line that stayed, if the last `take` found a cut; None if none stayed. Of an
        evaluation it is not: those may come late, after lines of later steps."""

    @classmethod
    def near_end(cls, path: Path, last_bytes: int = TAIL_BYTES) -> Self:
        """Return a follower by line that passes over all but the last bytes of what was added at once."""
        return cls(path, by_line=True, last_bytes=last_bytes)

    @property
    def end(self) -> int:
        """Offset of the next line to read, in bytes."""
        return self._ends[-1] if self._ends else 0

    @property
    def note(self) -> float:
        """The caller's note on the last block: what it knows when it has read that far. NaN before the first one."""
        return self._notes[-1] if self._notes else float("nan")

    @note.setter
    def note(self, value: float) -> None:
        self._notes[-1] = value

    def take(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return the records of the new lines, `most` of them at most. A file that cannot be read has none for now."""
        self.was_cut = False
        try:
            self.was_cut = self.forget_what_is_gone()
            if self.was_cut:
                self.kept = self._last_record()
            lines = (line for block in self.blocks() for line in _lines_of(block))
            return list(islice((record for line in lines if (record := record_of(line)) is not None), most))
        except OSError:
            return []

    def forget_what_is_gone(self) -> bool:
        """Return True if any of what was read is gone from the file; `end` and `note` are now those of what is left.

        Raises: OSError but FileNotFoundError.
        """
        known = len(self._ends)
        try:
            with self.path.open("rb") as file:
                self.is_missing = False
                while known and zlib.crc32(self._sealed(file, known - 1)) != self._sums[known - 1]:
                    known -= 1
        except FileNotFoundError:
            self.is_missing = True
        is_cut = known < len(self._ends)
        for numbers in (self._starts, self._ends, self._sums, self._notes):
            del numbers[known:]
        return is_cut

    def unread_bytes(self) -> int:
        """Return how much was added since."""
        try:
            return self.path.stat().st_size - self.end
        except FileNotFoundError:
            return 0

    def blocks(self) -> Iterator[bytes]:
        """Yield what was added. Raises: OSError but FileNotFoundError."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            begin = self._begin(file)
            while read := _whole_lines(file, begin):
                for block in _lines_of(read) if self._by_line else [read]:
                    seal = block if self._by_line else block[-SEAL_BYTES:]
                    begin += len(block)
                    self._know(begin - len(seal), begin, zlib.crc32(seal))
                    yield block
        if not self._by_line:
            self._merge()
        elif self._last_bytes:
            self._forget_oldest()

    def again(self) -> Iterator[bytes]:
        """Yield the blocks that were read before once more. Raises: OSError but FileNotFoundError."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            begin = 0
            for end in list(self._ends):
                file.seek(begin)
                yield file.read(end - begin)
                begin = end

    def marks(self) -> list[Mark]:
        """Return by what blocks are recognized, in order: the last `DENSE`, and of older ones every second, every
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

    def _know(self, start: int, end: int, checksum: int) -> None:
        self._starts.append(start)
        self._ends.append(end)
        self._sums.append(checksum)
        self._notes.append(float("nan"))

    def _begin(self, file: BinaryIO) -> int:
        """Return where to read on."""
        size = file.seek(0, os.SEEK_END)
        if not self._last_bytes or size - self.end <= self._last_bytes:
            return self.end
        file.seek(size - self._last_bytes - 1)
        file.readline(self._last_bytes)  # the rest of a line, unless one begins right here
        return file.tell()

    def _sealed(self, file: BinaryIO, index: int) -> bytes:
        file.seek(self._starts[index])
        return file.read(self._ends[index] - self._starts[index])

    def _last_record(self) -> dict[str, Any] | None:
        if not self._by_line:
            return None
        with self.path.open("rb") as file:
            for index in reversed(range(len(self._ends))):
                begin = self._ends[index - 1] if index else self._starts[0]  # of older lines only some are known
                file.seek(begin)
                for line in reversed(_lines_of(file.read(self._ends[index] - begin))):
                    record = record_of(line)
                    if record is not None and ("loss" in record or "validation_loss" not in record):
                        return record
        return None

    def _merge(self) -> None:
        """Make one block of neighbours that are short: from a run that is being watched, lines come one by one."""
        while len(self._ends) > 2 and self._ends[-2] - self._ends[-3] < LINE_READ_BYTES // 2:
            for numbers in (self._starts, self._ends, self._sums, self._notes):
                del numbers[-2]

    def _forget_oldest(self) -> None:
        """Forget lines that would not be read again if the file were cut back to them."""
        old = 0
        while old < len(self._ends) - 1 and self._ends[old] < self.end - self._last_bytes:
            old += 1
        for numbers in (self._starts, self._ends, self._sums, self._notes):
            del numbers[:old]


def _whole_lines(file: BinaryIO, begin: int) -> bytes:
    """Return the complete lines from `begin` on, about LINE_READ_BYTES of them; nothing if there is none yet."""
    file.seek(begin)
    read = b""
    while piece := file.read(LINE_READ_BYTES):
        end = piece.rfind(b"\n") + 1
        if end:
            return read + piece[:end]
        read += piece
        if len(read) > LONGEST_RECORD_BYTES:
            return read
    return b""


def _lines_of(block: bytes) -> list[bytes]:
    """Return the lines of a block, each with its end; a part of a line that is too long is one."""
    *lines, rest = block.split(b"\n")
    return [*(line + b"\n" for line in lines), *([rest] if rest else [])]


RUN_FILE_LOOK_S = 0.1
"""Seconds between two looks at the file."""
OnStep = Callable[[dict[str, Any]], object]


class Following:
    """A block in which a function is called with each new record of a run's metrics.jsonl, in a thread.

    Training does not wait for it. If it raises, `stop` is called once, and the block ends with what it raised. (No
    generator: what it raises may be StopIteration.)
    """

    def __init__(self, run_dir: Path, on_step: OnStep | None, stop: Callable[[], None]):
        """`on_step`: the function; None: nothing is followed."""
        self._stop = stop
        self._is_over = Event()
        self._raised: BaseException | None = None
        self._thread: Thread | None = None
        if on_step is not None:
            self._lines = LineFollower(run_dir / "metrics.jsonl", by_line=True)
            self._lines.take()  # what is there now is not new
            self._thread = Thread(target=self._follow, args=(on_step,), name="argosy-on-step", daemon=True)

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *ended: object) -> None:
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join()
        if self._raised is not None:
            raise self._raised

    def _follow(self, on_step: OnStep) -> None:
        is_last = False
        try:
            while not is_last:
                is_last = self._is_over.wait(RUN_FILE_LOOK_S)
                for record in self._lines.take():
                    on_step(record)
        except BaseException as error:
            self._raised = error
            self._stop()
