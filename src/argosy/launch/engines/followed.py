"""A file that a job prints to, read as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from argosy.files import open_regular

PIECE_BYTES = 1 << 16
LOOK_S = 0.5
"""How often a file that is followed is looked at."""


def follow(files: Mapping[str, Path], has_ended: Callable[[], bool]) -> Iterator[bytes]:
    """Yield what the files hold, and what is added until `has_ended`. Keys: marks of their lines, if several."""
    followed = [Followed(path, mark) for mark, path in files.items()]
    is_last = False
    while not is_last:
        is_last = has_ended()  # before the last look: what was printed until then is read
        for file in followed:
            yield from file.new(len(followed) > 1, is_last)
        if not is_last:
            time.sleep(LOOK_S)


class Followed:
    """A file, and how far it was read."""

    def __init__(self, path: Path, mark: str):
        """mark: stands before each line if several files are printed."""
        self._path, self._mark = path, mark.encode()
        self._at, self._rest = 0, b""

    def new(self, is_marked: bool, is_last: bool) -> Iterator[bytes]:
        """Yield what was added, in pieces. is_marked: whole lines only, with the mark before each."""
        try:
            file = open_regular(self._path)
        except OSError:
            return  # not there yet, or not to be read
        with file:
            file.seek(self._at)
            while text := file.read(PIECE_BYTES):
                self._at += len(text)
                yield from self._lines(text) if is_marked else [text]
        if is_last and self._rest:
            yield from self._lines(b"\n")

    def _lines(self, text: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            yield b"%s: %s\n" % (self._mark, line)
