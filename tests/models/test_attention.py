"""A packed document is attended to as if it were alone; a cache gives what the whole sequence gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.models.attention import Documents, cached_attention, causal_attention, packed_attention

ROWS = {
    "one document a row": [[12], [12], [12]],
    "equal halves": [[6, 6], [6, 6], [6, 6]],
    "all single tokens": [[1] * 12] * 3,
    "ragged": [[5, 7], [12], [1, 4, 4, 3]],
    "equal lengths across a row's end": [[8, 4], [4, 8], [4, 4, 4]],
}


def heads(q_heads: int, kv_heads: int, rows: int = 3, seq_len: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    counts = (q_heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(rows, seq_len, n, 8, generator=generator, requires_grad=True) for n in counts)
    return q, k, v


def starts(rows: list[list[int]]) -> Documents:
    where = torch.tensor([0, *itertools.accumulate(itertools.chain(*rows))], dtype=torch.int32)
    return Documents(where, where)


def by_hand(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
    """Softmax attention written out, each query head with its group's key/value head."""
    group = q_BTHE.shape[2] // k_BTKE.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k_BTKE, v_BTKE))
    scores = torch.einsum("bthe,bshe->bhts", q_BTHE, k) / q_BTHE.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhts,bshe->bthe", F.softmax(scores.masked_fill(future, -torch.inf), -1), v)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_causal_attention_is_softmax_attention(kv_heads):
    q, k, v = heads(4, kv_heads)
    torch.testing.assert_close(causal_attention(q, k, v), by_hand(q, k, v))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_packed_documents_attend_as_if_each_were_alone(rows, kv_heads):
    q, k, v = heads(4, kv_heads)
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    together = packed_attention(q, k, v, starts(rows))
    gradients = torch.autograd.grad((together * weights).sum(), (q, k, v))

    sizes = list(itertools.chain(*rows))
    documents = zip(*(x.flatten(0, 1).split(sizes) for x in (q, k, v)), strict=True)
    alone = torch.cat([by_hand(*(x[None] for x in document))[0] for document in documents]).view(q.shape)
    gradients_alone = torch.autograd.grad((alone * weights).sum(), (q, k, v))

    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(gradients, gradients_alone)


def test_in_bf16_documents_are_padded_to_few_lengths_and_attend_as_if_they_were_not(monkeypatch):
    rows = [[100], [32, 1, 67], [31, 33, 36]]
    lengths, kernel = set(), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def spy(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
        assert q.shape[2] == k.shape[2] == v.shape[2]
        lengths.add(q.shape[2])
        return kernel(q, k, v, **settings)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", spy)
    wide = heads(4, 2, seq_len=100)
    weights = torch.randn(wide[0].shape, generator=torch.Generator().manual_seed(1))
    together = packed_attention(*(x.bfloat16() for x in wide), starts(rows)).float()
    gradients = torch.autograd.grad((together * weights).sum(), wide)
    assert lengths == {32, 64, 96, 128}

    monkeypatch.undo()
    expected = packed_attention(*wide, starts(rows))  # fp32: as long as they are
    expected_gradients = torch.autograd.grad((expected * weights).sum(), wide)
    for found, exact in zip((together, *gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(found, exact, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("pieces", [[12], [1] * 12, [5, 1, 6], [11, 1]], ids=str)
def test_a_cache_read_in_pieces_gives_the_whole(pieces):
    q, k, v = heads(4, 2)
    whole = by_hand(q, k, v)
    ends = list(itertools.accumulate(pieces))
    parts = [
        cached_attention(q[:, end - piece : end], k[:, :end], v[:, :end])
        for piece, end in zip(pieces, ends, strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
