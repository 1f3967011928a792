"""From rows of token ids to what the model takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from argosy.models.attention import Documents
from argosy.models.microbatch import document_positions, microbatches

END = 0
ROWS = np.array([[1, 2, END, 3, 4], [5, 6, 7, 8, 9], [END, 1, 1, END, 2], [2, END, END, 1, 1]], np.int32)


def test_targets_are_the_tokens_that_come_next():
    (micro,) = microbatches(ROWS, 4, END, torch.device("cpu"))
    assert micro.tokens_BT.tolist() == ROWS[:, :-1].tolist()
    assert micro.targets_BT.tolist() == ROWS[:, 1:].tolist()


def test_microbatches_are_the_rows_in_order():
    parts = microbatches(ROWS, 2, END, torch.device("cpu"))
    assert torch.cat([part.tokens_BT for part in parts]).tolist() == ROWS[:, :-1].tolist()
    assert [part.tokens_BT.shape[0] for part in parts] == [2, 2]


@pytest.mark.parametrize("size", [1, 4])
def test_what_is_written_into_the_targets_does_not_reach_the_tokens(size):
    """Evaluation marks targets that do not count, and of a single row both would be views of the same memory."""
    for micro, row in zip(microbatches(ROWS, size, END, torch.device("cpu")), ROWS[::size], strict=True):
        micro.targets_BT.fill_(-100)
        assert micro.tokens_BT[0].tolist() == row[:-1].tolist()


def test_a_mark_opens_a_document_and_so_does_a_row():
    (micro,) = microbatches(ROWS, 4, END, torch.device("cpu"))
    assert micro.documents.starts.tolist() == [0, 2, 4, 8, 11, 12, 13, 14, 16]
    assert micro.documents.starts.dtype == torch.int32


def test_positions_count_from_the_mark_and_from_the_row():
    (micro,) = microbatches(ROWS, 4, END, torch.device("cpu"))
    assert micro.positions_BT.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 2, 0], [0, 0, 0, 1]]


TOKENS = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=1, max_size=6)
)


@given(TOKENS)
def test_documents_tile_the_batch(rows):
    tokens = torch.tensor(rows)
    edges = Documents.of(document_positions(tokens, END)).starts.tolist()
    assert edges == sorted(set(edges)) and edges[0] == 0 and edges[-1] == tokens.numel()
    flat = tokens.flatten().tolist()
    starts = set(edges[:-1])
    assert all((i in starts) == (flat[i] == END or i % tokens.shape[1] == 0) for i in range(len(flat)))


@given(TOKENS)
def test_a_position_is_one_more_than_the_one_before_unless_a_document_starts(rows):
    tokens = torch.tensor(rows)
    positions = document_positions(tokens, END)
    assert (positions[:, 0] == 0).all()
    starts = tokens[:, 1:] == END
    assert torch.equal(positions[:, 1:], torch.where(starts, 0, positions[:, :-1] + 1))
