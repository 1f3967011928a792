"""Follows a file of JSON lines that another process appends to, cuts, or replaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 2**21
"""Bytes that are read and parsed at once: some milliseconds of work, after which other threads have their turn."""
LONGEST_LINE_BYTES = 2**24
"""A longer line is no record of ours: it is read in parts, none of which is a record."""
SEAL_BYTES = 256
"""Bytes before the end of what was read that must still be there, or the file was cut or replaced."""


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


class LineFile:
    """The complete lines of a file, in chunks of which each begins and ends with a line.

    A cut, as after a recovery that lost steps, is noticed even if the file has grown longer again in the meantime: each
    chunk remembers its last bytes. A file that is gone (it may be being rotated) counts as unchanged until it is back.
    """

    def __init__(self, path: Path):
        self.path = path
        self.is_missing = True
        self._ends: list[int] = []
        self._seals: list[bytes] = []
        self._marks: list[float] = []

    @property
    def end(self) -> int:
        """Where the next line to read begins, in bytes."""
        return self._ends[-1] if self._ends else 0

    @property
    def mark(self) -> float:
        """The caller's mark of the last chunk: what it knows when it has read that far. NaN before the first one."""
        return self._marks[-1] if self._marks else float("nan")

    @mark.setter
    def mark(self, value: float) -> None:
        self._marks[-1] = value

    def forget_what_is_gone(self) -> bool:
        """Return True if any of what was read is gone from the file; `end` and `mark` are now those of what is left.

        Raises: OSError but FileNotFoundError.
        """
        before = self.end
        try:
            with self.path.open("rb") as file:
                self.is_missing = False
                while self._ends and not self._is_sealed(file):
                    del self._ends[-1], self._seals[-1], self._marks[-1]
        except FileNotFoundError:
            self.is_missing = True
        return self.end < before

    def unread_bytes(self) -> int:
        """Return how much was added since."""
        try:
            return self.path.stat().st_size - self.end
        except FileNotFoundError:
            return 0

    def read_on(self) -> Iterator[bytes]:
        """Yield what was added, as chunks of complete lines. Raises: OSError but FileNotFoundError."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            while chunk := _whole_lines(file, self.end):
                self._ends.append(self.end + len(chunk))
                self._seals.append(chunk[-SEAL_BYTES:])
                self._marks.append(float("nan"))
                yield chunk
        self._merge()

    def again(self) -> Iterator[bytes]:
        """Yield the chunks that were read before once more. Raises: OSError but FileNotFoundError."""
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

    def _is_sealed(self, file: BinaryIO) -> bool:
        seal = self._seals[-1]
        file.seek(self.end - len(seal))
        return file.read(len(seal)) == seal

    def _merge(self) -> None:
        """Make one chunk of neighbours that are short: from a run that is being watched, lines come one by one."""
        while len(self._ends) > 2 and self._ends[-2] - self._ends[-3] < CHUNK_BYTES // 2:
            del self._ends[-2], self._seals[-2], self._marks[-2]


def _whole_lines(file: BinaryIO, begin: int) -> bytes:
    """Return the complete lines from `begin` on, about CHUNK_BYTES of them; nothing if there is none yet."""
    file.seek(begin)
    read = b""
    while piece := file.read(CHUNK_BYTES):
        end = piece.rfind(b"\n") + 1
        if end:
            return read + piece[:end]
        read += piece
        if len(read) > LONGEST_LINE_BYTES:
            return read
    return b""
