"""Attention with windows, soft-caps and sinks is the softmax of what a mask leaves, and costs what its window costs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from argosy.models import banded_attention as banded
from argosy.models.attention import Documents, LayerCache, cached_attention, packed_attention
from argosy.models.attention_kernels import CPU_FLASH, PLAIN_KERNEL, VisibleKeys

ROWS, TOKENS, HEADS, KV_HEADS, WIDTH = 2, 24, 4, 2, 8
DOCUMENTS = {"whole rows": [[24], [24]], "packed": [[5, 19], [1, 7, 16]]}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, TOKENS, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in [*shapes, (HEADS,)]]


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: list[list[int]], window: int, softcap: float
) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("bthe,bshe->bhts", q, k) * WIDTH**-0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    places = torch.arange(TOKENS)
    ahead = places - places[:, None]
    for row, of_row in enumerate(lengths):
        number = torch.repeat_interleave(torch.arange(len(of_row)), torch.tensor(of_row))
        seen = (ahead <= 0) & (number == number[:, None])
        seen &= ahead > -window if window else seen
        scores[row] = scores[row].masked_fill(~seen, -torch.inf)
    if sinks is None:
        return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v)
    with_sinks = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    return torch.einsum("bhts,bshe->bthe", with_sinks.softmax(-1)[..., :-1], v)


@pytest.mark.parametrize("block", [5, 256])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 7, 100])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_results_and_gradients_are_those_of_a_mask(lengths, window, softcap, has_sinks, block, monkeypatch):
    monkeypatch.setattr(banded, "BLOCK_QUERIES", block)
    q, k, v, s = inputs()
    sinks = s if has_sinks else None
    starts = torch.tensor([0, *itertools.accumulate(itertools.chain(*lengths))], dtype=torch.int32)
    documents = Documents(starts, starts)
    found = packed_attention(q, k, v, documents, window, softcap, sinks)
    expected = by_hand(q, k, v, sinks, lengths, window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    leaves = [q, k, v, s] if has_sinks else [q, k, v]
    dy = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(y, leaves, dy) for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seen", [VisibleKeys(True, 3, 4), VisibleKeys(True, 0, 2), VisibleKeys(True, 5, 0)], ids=str)
def test_both_kernels_see_the_same_band(seen: VisibleKeys):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(2, n, 2, WIDTH, generator=generator) for n in (4, 9, 9, 4))
    ours, other = (kernel.forward(q, k, v, seen) for kernel in (CPU_FLASH, PLAIN_KERNEL))
    torch.testing.assert_close(ours, other)
    gradients = (kernel.backward(dy, q, k, v, *other, seen) for kernel in (CPU_FLASH, PLAIN_KERNEL))
    torch.testing.assert_close(*gradients)


def test_the_cost_grows_with_the_window_and_not_with_the_square_of_the_sequence():
    def blocks_seen(tokens: int) -> int:
        blocks = banded.query_blocks([0, tokens], [0, tokens], 100, banded.BLOCK_QUERIES)
        return sum(len(range(*b.of_queries.indices(tokens))) * len(range(*b.of_keys.indices(tokens))) for b in blocks)

    assert blocks_seen(16_384) < 4.1 * blocks_seen(4096)
    assert blocks_seen(16_384) <= 16_384 * (100 + banded.BLOCK_QUERIES)
    q, k, v = (torch.randn(1, 512, 2, WIDTH) for _ in range(3))
    flops = []
    for window in (0, 128):
        with FlopCounterMode(display=False) as counted:
            packed_attention(q, k, v, None, window, 0.0, torch.zeros(2))
        flops.append(counted.get_total_flops())
    assert flops[1] * 4 == flops[0]


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_a_cache_gives_the_same_and_keeps_no_more_than_the_window(window: int, softcap: float):
    q, k, v, _ = inputs()
    cache, at, parts = LayerCache(TOKENS, window), 0, []
    with torch.no_grad():
        for length in (9, 1, 1, 8, 5):
            some = slice(at, at + length)
            keys, values = cache.append(k[:, some], v[:, some])
            parts.append(cached_attention(q[:, some], keys, values, window, softcap))
            at += length
            assert cache.keys.shape[1] == (min(at, window - 1) if window else TOKENS)
    assert cache.length == TOKENS
    torch.testing.assert_close(torch.cat(parts, 1), packed_attention(q, k, v, None, window, softcap))


def test_the_operator_is_whole_under_compilation():
    q, k, v, s = inputs()

    def attend(*x: Tensor) -> Tensor:
        return packed_attention(*x[:3], None, 6, 0.0, x[3]) * 1.0

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, s), packed_attention(q, k, v, None, 6, 0.0, s))
