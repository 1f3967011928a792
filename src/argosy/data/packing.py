"""Rows of whole conversations: how words in a shard carry tokens and their marks, and how conversations become rows.

A shard of conversations consists of rows of as many words as a sequence has tokens, so that each window of the token
stream is a row: order, loader, stores and caches treat it as text. A word (int32) is a token's id and, in the bits
above it, the token's marks, so that masks travel with the tokens wherever they go.

Which conversations share a row is decided when data are prepared, and follows from their order and lengths alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ID_BITS = 26
"""Bits of a word that hold the token's id; the sign bit is always 0, so five marks are left."""
ID_MASK = (1 << ID_BITS) - 1
START_BIT = 1 << ID_BITS
"""The token begins a sequence (a conversation, or one side of a preference pair): nothing before it is attended to."""
TRAINED = 2 << ID_BITS
"""The token is one that the model learns to predict: a part of an answer."""
REJECTED_BIT = 4 << ID_BITS
"""At a START: the sequence is the rejected side of a pair, or an answer that was judged undesirable."""
MISMATCHED_BIT = 8 << ID_BITS
"""At a START: an answer to another prompt, from which KTO estimates its KL term."""

CHOSEN_SIDE, REJECTED_SIDE, MISMATCHED_SIDE = 1, 2, 3
"""Kinds of sequences: the better side or a desirable answer, the other, an answer to another prompt."""
IGNORED = -100
"""A target that is not counted."""

OPEN_ROWS = 256
"""Rows that are filled at once. With more, rows have a little less padding."""

Words = npt.NDArray[np.int32]


class PackedRows(NamedTuple):
    """The contents of rows [n, T]."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    """The token after each token; IGNORED where that is not part of an answer."""
    positions: npt.NDArray[np.int64]
    """Each token's place in its sequence."""


class RowSequences(NamedTuple):
    """The sequences in rows [n, T]. But for `starts`, each array says something where a sequence begins, and is 0
    elsewhere."""

    starts: npt.NDArray[np.int64]
    """Start of the sequence of each token."""
    kinds: npt.NDArray[np.int64]
    """CHOSEN_SIDE, REJECTED_SIDE or MISMATCHED_SIDE; 0: nothing that counts begins there."""
    partners: npt.NDArray[np.int64]
    """Start of the sequence after it: of the chosen side of a pair, the rejected one."""
    lengths: npt.NDArray[np.float32]
    """Tokens of the answer."""


def sequences_in(rows: Words) -> RowSequences:
    """Return the sequences of rows of pairs or judged answers [n, T+1]."""
    _, targets, positions = unpack(rows)
    words = rows[:, :-1]
    starts = np.arange(words.shape[1]) - positions
    lengths = np.zeros(words.shape, np.float32)
    row_of = np.broadcast_to(np.arange(len(rows))[:, None], words.shape)
    np.add.at(lengths, (row_of, starts), targets != IGNORED)
    is_other, is_mismatched = words & REJECTED_BIT != 0, words & MISMATCHED_BIT != 0
    sides = np.where(is_mismatched, MISMATCHED_SIDE, np.where(is_other, REJECTED_SIDE, CHOSEN_SIDE))
    kinds = np.where(lengths > 0, sides, 0)
    partners = np.zeros(words.shape, np.int64)
    for row, found in enumerate(words & START_BIT != 0):
        begins = np.flatnonzero(found)
        partners[row, begins[:-1]] = begins[1:]
    return RowSequences(starts, kinds, partners, lengths)


def without_rejected(rows: Words) -> Words:
    """Return rows in which only chosen or desirable answers are learned."""
    found = sequences_in(rows)
    is_chosen = np.take_along_axis(found.kinds, found.starts, 1) == CHOSEN_SIDE
    kept = rows.copy()
    kept[:, :-1] = np.where(is_chosen, kept[:, :-1], kept[:, :-1] & ~TRAINED)
    return kept


def is_packed(rows: npt.NDArray[Any]) -> bool:
    """Return True if `rows` [n, T+1] are rows of conversations: these begin with a START, and text has no marks."""
    return bool(len(rows)) and bool(int(rows[0, 0]) & START_BIT)


def unpack(rows: Words) -> PackedRows:
    """Return the contents of rows of conversations [n, T+1], whose last word belongs to the next row."""
    words = rows[:, :-1].astype(np.int64)
    following = np.roll(words, -1, axis=1)
    is_target = (following & TRAINED != 0) & (following & START_BIT == 0)
    is_target[:, -1] = False
    index_T = np.arange(words.shape[1])
    starts = np.maximum.accumulate(np.where(words & START_BIT, index_T, 0), axis=1)
    return PackedRows(words & ID_MASK, np.where(is_target, following & ID_MASK, IGNORED), index_T - starts)


class _OpenRow(NamedTuple):
    room: int
    number: int


class Packer:
    """Packs units (a conversation, or what must stay together) into rows: best fit among OPEN_ROWS open rows.

    Best fit is within a few per cent of the fewest rows possible (Ding et al. 2024, "Fewer Truncations Improve
    Language Modeling"). A unit is at most as long as a row.

    Args:
        row_words: words of a row.
        filler: the token that fills what is left of a row; a filling is a sequence of its own, without answers.
    """

    def __init__(self, row_words: int, filler: int):
        self._row_words, self._filler = row_words, filler
        self._open: list[_OpenRow] = []
        self._rows: dict[int, list[Words]] = {}
        self._next = 0

    def add(self, unit: Words) -> list[list[Words]]:
        """Take a unit in, and return the rows that are finished by it, each as its units; the last holds the filler."""
        at = bisect_left(self._open, _OpenRow(len(unit), -1))
        if at == len(self._open):
            insort(self._open, _OpenRow(self._row_words, self._next))
            self._rows[self._next] = []
            self._next += 1
            at = bisect_left(self._open, _OpenRow(len(unit), -1))
        room, number = self._open.pop(at)
        self._rows[number].append(unit)
        insort(self._open, _OpenRow(room - len(unit), number))
        finished = []
        if len(self._open) > OPEN_ROWS or self._open[0].room == 0:
            finished.append(self._finish(self._open.pop(0)))
        return finished

    def flush(self) -> list[list[Words]]:
        """Return the rows that are not full, the oldest first."""
        rows = [self._finish(row) for row in sorted(self._open, key=lambda row: row.number)]
        self._open.clear()
        return rows

    def _finish(self, row: _OpenRow) -> list[Words]:
        units = self._rows.pop(row.number)
        if row.room:
            filling = np.full(row.room, self._filler, np.int32)
            filling[0] |= START_BIT
            units[-1] = np.concatenate([units[-1], filling])
        return units
