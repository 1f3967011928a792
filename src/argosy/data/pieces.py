"""Cut the input into pieces: the tasks that workers share.

The pieces follow from the list of files alone, so every machine and every repetition has the same. What is made of the
input does not depend on them: documents keep the order of the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.data.sources import InputFile

PIECE_BYTES = 16 * 2**20
"""Stored bytes of a piece: some ten seconds of one core's work, so that little is lost with a worker."""
MOST_FILES = 1000
"""Files of a piece at most: even empty ones take time to open."""
SPLITTABLE = (".jsonl", ".ndjson", ".parquet")
"""Kinds of files that a worker can read a part of, if they are not compressed as a whole."""


@dataclass(frozen=True)
class Piece:
    """Consecutive files of the input, or a part of one file.

    A part holds the lines, or row groups, that begin in its share of the file's bytes.
    """

    first: int
    end: int
    """The files `first` to `end` - 1."""
    part: int = 0
    parts: int = 1


def cut_input(files: Sequence[InputFile], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Return the pieces of `files`, in order."""
    pieces: list[Piece] = []
    first, held = 0, 0
    for number, file in enumerate(files):
        size = file.size
        if size is None or size >= piece_bytes or held + size > piece_bytes or number - first >= MOST_FILES:
            if number > first:
                pieces.append(Piece(first, number))
            first, held = number, 0
        if size is None or size >= piece_bytes:
            parts = -(-size // piece_bytes) if size is not None and _is_splittable(file) else 1
            pieces += [Piece(number, number + 1, part, parts) for part in range(parts)]
            first = number + 1
        else:
            held += size
    if first < len(files):
        pieces.append(Piece(first, len(files)))
    return pieces


def _is_splittable(file: InputFile) -> bool:
    return file.suffix in SPLITTABLE and not file.compression and file.is_seekable and file.texts is None
