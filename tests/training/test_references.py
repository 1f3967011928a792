"""Each sample has the log-probabilities of its own answers before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from argosy.data.order import Samples
from argosy.data.shards import BadShard
from argosy.parallel.world import World
from argosy.training.rows import References, ReferenceScorer
from chats import SEQ_LEN, conversations, rows_of


def test_samples_of_several_sources_have_the_rows_of_their_windows() -> None:
    one = np.array([[-1.0], [-2.0]], np.float32)
    other = np.array([[-3.0, -4.0], [-5.0, -6.0], [-7.0, -8.0]], np.float32)
    samples = Samples(np.array([1, 0, 1]), np.zeros(3, np.int64), np.array([2, 1, 0]))
    assert References([one, other]).of(samples).tolist() == [[-7, -8], [-2, 0], [-3, -4]]


class Damaged:
    """A source of six rows, two in each shard, whose second shard cannot be read."""

    name = "pairs"
    rows = rows_of(conversations())[:6]

    def windows(self, seq_len: int) -> int:
        return len(self.rows)

    def in_shards(self, windows: Any, seq_len: int, shards: Any) -> Any:
        return np.isin(windows // 2, list(shards))

    def read_windows(self, windows: Any, out: Any) -> None:
        if 1 in windows // 2:
            raise BadShard("a bit has flipped", self.name, 1)
        out[:] = self.rows[windows]


def test_rows_that_cannot_be_read_have_no_reference_and_are_never_compared(tmp_path: Path) -> None:
    model = MagicMock(dp_rank=0, dp=1, microbatches_at_once=1)
    model.score_batch = lambda micros: [torch.full((*m.tokens_BT.shape, 2), -1.0) for m in micros]
    data = MagicMock(sources=[Damaged()], seq_len=SEQ_LEN, filler=1, identity="x")

    def scored(skips: bool) -> References:
        about = (World(), tmp_path, 4, False, skips, MagicMock(), MagicMock())
        return ReferenceScorer(model, data, *about).references(steps_done=0)

    with pytest.raises(BadShard):
        scored(skips=False)
    found = scored(skips=True)
    (table,) = found.tables
    assert found.unread == [("pairs", 1)] and not table[2:4].any() and (table[[0, 1, 4, 5], 0] == -1).all()
    (tmp_path / "reference-x.npz").rename(tmp_path / "before")
    np.savez(tmp_path / "reference-x.npz", table)  # as a version wrote it that did not skip
    assert scored(skips=True).unread == []
    (tmp_path / "before").replace(tmp_path / "reference-x.npz")
    assert scored(skips=False).unread == [("pairs", 1)], "a run that goes on leaves them out too"
