"""Requests are laid out in rows whole and once each; reference values are those of each sample's own source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.order import Samples
from argosy.data.packing import ID_MASK, START_BIT, TRAINED
from argosy.training.rows import References, request_rows

SEQ_LEN, FILLER = 12, 99
TOKENS = st.lists(st.integers(0, 98), min_size=1, max_size=15)


def read_back(row: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """The sequences of a row, each as its tokens and those of them that are learned."""
    starts = np.flatnonzero(row & START_BIT)
    parts = [row[first:end] for first, end in zip(starts, [*starts[1:], len(row)], strict=True)]
    return [((part & ID_MASK).tolist(), (part[part & TRAINED != 0] & ID_MASK).tolist()) for part in parts]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=12))
def test_each_request_is_at_its_place_and_its_continuation_alone_is_learned(requests):
    rows, places = request_rows(requests, SEQ_LEN, FILLER)
    assert rows.shape[1] == SEQ_LEN + 1 and len(set(places)) == len(requests)
    for (context, continuation), (row, number) in zip(requests, places, strict=True):
        tokens, learned = read_back(rows[row])[number]
        assert tokens == [*context, *continuation][-SEQ_LEN:]  # of a long one the end
        assert learned == continuation[-SEQ_LEN:]
    for row in range(len(rows)):  # behind the last request there is filler, of which nothing is learned
        used = sum(place[0] == row for place in places)
        assert all(set(tokens) == {FILLER} and not learned for tokens, learned in read_back(rows[row])[used:])


def test_short_requests_share_a_row():
    rows, places = request_rows([([1], [2]), ([3] * 6, [4]), ([5, 6], [7])], SEQ_LEN, FILLER)
    assert len(rows) == 1 and places == [(0, 2), (0, 0), (0, 1)]  # the longest first
    assert (rows[0] & ID_MASK).tolist() == [3, 3, 3, 3, 3, 3, 4, 5, 6, 7, 1, 2, FILLER]


@pytest.mark.parametrize("order", [[0, 1, 1, 0], [1, 0, 0, 1]])
def test_references_come_from_the_table_of_the_samples_source(order):
    tables = np.array([[1.0], [2.0]], np.float32), np.array([[3.0, 4.0], [5.0, 6.0]], np.float32)
    windows = np.array([0, 1, 0, 1])
    samples = Samples(np.array(order), np.zeros(4, np.int64), windows)
    expected = [[*tables[source][window], 0.0][:2] for source, window in zip(order, windows, strict=True)]
    assert References(tables).of(samples).tolist() == expected
