"""Cut the input into pieces: the tasks that workers share.

The pieces follow from the list of files alone, so every machine and every repetition has the same. What is made of the
input does not depend on them: documents keep the order of the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from argosy.data.sources import InputFile

PIECE_BYTES = 16 * 2**20
"""Stored bytes of a piece at most: some ten seconds of one core's work, so that little is lost with a worker."""
LEAST_PIECE_BYTES = 2**20
"""Stored bytes of the first pieces: less would cost more to hand out than it is worth."""
MOST_OF_BEFORE = 1 / 16
"""The next ones grow with what is before them: at most this part of it. So workers share a small input evenly, and are
not far ahead of where `max_text_bytes` ends a large one."""
MOST_FILES = 1000
"""Files of a piece at most: even empty ones take time to open."""
SPLITTABLE = (".jsonl", ".ndjson", ".parquet")
"""Kinds of files that a worker can read a part of, if they are not compressed as a whole."""


@dataclass(frozen=True)
class InputPiece:
    """Consecutive files of the input, or a part of one file.

    A part holds the lines, or row groups, that begin at its bytes of the file.
    """

    first: int
    end: int
    """The files `first` to `end` - 1."""
    from_byte: int = 0
    to_byte: int | None = None
    """Where the part begins and ends; None: at the end of the file."""


def cut_input(files: Sequence[InputFile], most_bytes: int = PIECE_BYTES) -> list[InputPiece]:
    """Return the pieces of `files`, in order, of `most_bytes` or less where files can be divided."""
    pieces: list[InputPiece] = []
    first, held, before = 0, 0, 0  # the files from `first` on, `held` bytes, are in no piece yet
    for number, file in enumerate(files):
        size = file.size
        room = _room(before, most_bytes)
        if number > first and (size is None or size >= room or held + size > room or number - first >= MOST_FILES):
            pieces.append(InputPiece(first, number))
            first, held, before = number, 0, before + held
            room = _room(before, most_bytes)
        if size is None or size >= room:
            pieces += _parts(number, file, before, most_bytes)
            first, before = number + 1, before + (size or most_bytes)
        else:
            held += size
    if first < len(files):
        pieces.append(InputPiece(first, len(files)))
    return pieces


def _room(before: int, most_bytes: int) -> int:
    """Return the bytes of a piece, given those before it."""
    return min(most_bytes, max(LEAST_PIECE_BYTES, int(before * MOST_OF_BEFORE)))


def _parts(number: int, file: InputFile, before: int, most_bytes: int) -> Iterator[InputPiece]:
    """Yield the pieces of a file that has one or more for itself."""
    at, size = 0, file.size if _is_splittable(file) else None
    while size is not None and (end := at + _room(before + at, most_bytes)) < size:
        yield InputPiece(number, number + 1, at, end)
        at = end
    yield InputPiece(number, number + 1, at)


def _is_splittable(file: InputFile) -> bool:
    return file.suffix in SPLITTABLE and not file.compression and file.is_seekable and file.texts is None
