"""Attention in parts: which blocks of its matrix a rank of a ring computes in each step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import groupby, pairwise
from typing import NamedTuple


class Tile(NamedTuple):
    """A block of the attention matrix that is whole, or causal and square: in which rows, which queries see which keys.

    Queries and keys count in the order in which their ranks hold them. A query sees itself in exactly one causal tile.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def ring_tiles(documents: list[int], rows: int, seq_len: int, rank: int, size: int) -> list[list[Tile]]:
    """Return what the tokens of `rank` see in each step of the ring; in step i, of the tokens of rank - i.

    `documents`: where they start in `rows` rows of `seq_len` tokens laid end to end, then the number of tokens.
    """
    assert seq_len % (2 * size) == 0 and documents[-1] == rows * seq_len
    bounds = []
    for start in range(0, rows * seq_len, seq_len):
        of_row = documents[bisect_left(documents, start) : bisect_right(documents, start + seq_len)]
        assert of_row[0] == start and of_row[-1] == start + seq_len, "a row's start is the start of a document"
        bounds.append([position - start for position in of_row])
    steps = []
    for step in range(size):
        of_rows = [_row_tiles(of_row, rank, (rank - step) % size, size) for of_row in bounds]
        alike = [list(run) for _, run in groupby(range(rows), key=of_rows.__getitem__)]
        steps.append([Tile(slice(run[0], run[-1] + 1), *tile) for run in alike for tile in of_rows[run[0]]])
    return steps


def _row_tiles(bounds: list[int], rank: int, owner: int, size: int) -> list[tuple[slice, slice, bool]]:
    """Return what the tokens of `rank` see of `owner`'s, in a row of documents between consecutive `bounds`."""
    chunk = bounds[-1] // (2 * size)

    def held_before(position: int, rank: int) -> int:
        """Return how many of `rank`'s tokens lie before `position` of the row."""
        firsts = (rank * chunk, (2 * size - 1 - rank) * chunk)
        return sum(min(max(position - first, 0), chunk) for first in firsts)

    if owner == rank:  # tokens are held in their order: what is left of a document here is causal in itself
        cuts = sorted({held_before(bound, rank) for bound in bounds})
        return [(slice(a, b), slice(a, b), True) for a, b in pairwise(cuts)]
    # An earlier rank's first chunk is before all of ours and its second after; of a later rank's, both lie between
    # our two. All keys being before all queries, the only document with both is the first query's.
    first_query, last_key = (0, chunk) if owner < rank else (chunk, 2 * chunk)
    position = chunk * (rank if owner < rank else 2 * size - 1 - rank)
    document = bisect_right(bounds, position)
    first_key = held_before(bounds[document - 1], owner)
    last_query = held_before(bounds[document], rank)
    return [(slice(first_query, last_query), slice(first_key, last_key), False)] if first_key < last_key else []
