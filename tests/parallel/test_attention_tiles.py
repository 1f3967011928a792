"""The parts of attention cover it once, and with the log-sum-exp of the whole their gradients add up."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from argosy.models.attention import causal_attention
from argosy.models.attention_kernels import CAUSAL, CPU_FLASH, CUDA_FLASH, PLAIN, WHOLE, Kernel, Seen, kernel_for
from argosy.parallel.attention_tiles import ring_tiles
from argosy.parallel.context import shard_sequence

KERNELS = {"flash": CPU_FLASH, "plain": PLAIN}
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's kernel")


def inputs(q_heads: int, kv_heads: int, queries: int = 12, keys: int = 12, width: int = 8) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(queries, q_heads), (keys, kv_heads), (keys, kv_heads), (queries, q_heads)]
    return [torch.randn(2, tokens, heads, width, generator=generator) for tokens, heads in shapes]


def written_out(q_BTHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q_BTHE.shape[2] // x.shape[2], dim=2) for x in (k_BSKE, v_BSKE))
    scores_BHTS = torch.einsum("bthe,bshe->bhts", q_BTHE, k) / q_BTHE.shape[-1] ** 0.5
    return torch.einsum("bhts,bshe->bthe", scores_BHTS.softmax(-1), v), scores_BHTS.logsumexp(-1)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_whole_tile_is_softmax_attention_with_its_log_sum_exp(kernel: Kernel, kv_heads: int):
    q, k, v, _ = inputs(4, kv_heads, queries=5, keys=12)
    y, lse = kernel.forward(q, k, v, WHOLE)
    expected_y, expected_lse = written_out(q, k, v)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_causal_tile_and_its_gradients_are_those_of_the_model(kernel: Kernel, kv_heads: int):
    q, k, v, dy = inputs(4, kv_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = causal_attention(*leaves)
    y, lse = kernel.forward(q, k, v, CAUSAL)
    torch.testing.assert_close(y, expected)
    gradients = kernel.backward(dy, q, k, v, y, lse, CAUSAL)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves, dy), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_with_the_whole_output_and_log_sum_exp_gradients_of_parts_add_up(kernel: Kernel, kv_heads: int):
    q, k, v, dy = inputs(4, kv_heads)
    whole = kernel.forward(q, k, v, WHOLE)
    dq, dk, dv = kernel.backward(dy, q, k, v, *whole, WHOLE)
    parts = [kernel.backward(dy, q, k[:, s], v[:, s], *whole, WHOLE) for s in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], dim=1), dk)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], dim=1), dv)


def test_the_gpu_kernel_takes_these_arguments_and_gives_these_shapes():
    """On the meta device: torch's own operators, all but the arithmetic; they are private, and may change."""
    q, k, v, dy = (x.to("meta", torch.bfloat16) for x in inputs(4, 2, queries=5, keys=12))
    y, lse = CUDA_FLASH.forward(q, k, v, WHOLE)
    assert y.shape == q.shape and lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    gradients = CUDA_FLASH.backward(dy, q, k, v, y, lse, WHOLE)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


@NEEDS_CUDA
@pytest.mark.parametrize("seen", [WHOLE, CAUSAL])
def test_the_gpu_kernel_gives_the_plain_numbers(seen: Seen):
    q, k, v, dy = (x.to("cuda", torch.bfloat16) for x in inputs(4, 2, queries=64, keys=64, width=64))
    assert kernel_for(q) is CUDA_FLASH
    y, lse = CUDA_FLASH.forward(q, k, v, seen)
    expected_y, expected_lse = PLAIN.forward(q, k, v, seen)
    torch.testing.assert_close(y.float(), expected_y, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    gradients, expected = (kernel.backward(dy, q, k, v, y, lse, seen) for kernel in (CUDA_FLASH, PLAIN))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_tiles_of_all_steps_are_each_visible_pair_once_and_no_other(size: int):
    """Over random documents, against the mask written out."""
    rng = random.Random(size)
    seq_len, rows = 12 * size, 3
    for _ in range(100):
        cuts = {int(rng.triangular(0, rows * seq_len, 0)) for _ in range(rng.randrange(8))}
        documents = sorted({*cuts, *range(0, (rows + 1) * seq_len, seq_len)})
        assert torch.equal(seen_through_tiles(documents, rows, seq_len, size), causal_mask(documents, rows, seq_len))


def seen_through_tiles(documents: list[int], rows: int, seq_len: int, size: int) -> Tensor:
    """[rows, queries, keys]: how often each query sees each key."""
    seen = torch.zeros(rows, seq_len, seq_len, dtype=torch.int64)
    held = [shard_sequence(torch.arange(seq_len), rank, size, dim=0) for rank in range(size)]
    for rank in range(size):
        for step, tiles in enumerate(ring_tiles(documents, rows, seq_len, rank, size)):
            for tile in tiles:
                queries, keys = held[rank][tile.queries], held[(rank - step) % size][tile.keys]
                block = torch.ones(len(queries), len(keys), dtype=torch.int64)
                seen[tile.rows, queries[:, None], keys] += block.tril() if tile.causal else block
    return seen


def causal_mask(documents: list[int], rows: int, seq_len: int) -> Tensor:
    document = torch.bucketize(torch.arange(rows * seq_len), torch.tensor(documents), right=True).view(rows, seq_len)
    return (document[:, :, None] == document[:, None, :]).long().tril()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_whole_rows_give_every_rank_as_many_scores_to_compute_in_every_step(size: int):
    def scores(tile: Any) -> int:
        queries, keys = (s.stop - s.start for s in (tile.queries, tile.keys))
        return queries * (queries + 1) // 2 if tile.causal else queries * keys

    chunk = 16
    steps = [ring_tiles([0, 2 * size * chunk], 1, 2 * size * chunk, rank, size) for rank in range(size)]
    counts = [[[scores(tile) for tile in tiles] for tiles in of_rank] for of_rank in steps]
    assert counts == [[[chunk * (2 * chunk + 1)], *[[2 * chunk * chunk]] * (size - 1)]] * size, "one tile a step"
