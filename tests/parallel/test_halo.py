"""A layer with a window gets from other ranks the tokens that its own see, and no others."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from argosy.models.attention import Documents, packed_attention
from argosy.parallel.context import RingAttention, UlyssesAttention, shard_sequence, unshard_sequence
from argosy.parallel.halo import halos
from argosy.parallel.world import World
from argosy.plan.layer_spec import halo_tokens
from workers import WorkerPool

TOKENS = 32
DOCUMENTS = {"whole rows": [[32], [32]], "packed": [[3, 13, 16], [1, 2, 20, 9]]}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, TOKENS, heads, 8) for heads in (4, 4, 4)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in [*shapes, (4,)]]


def attend(world: World, core: str, documents: Documents, window: int, softcap: float, dy: Tensor) -> list[Tensor]:
    attention = (RingAttention if core == "ring" else UlyssesAttention)(dist.group.WORLD)
    *qkv, sinks = inputs()
    leaves = [*(shard_sequence(x, world.rank, world.size).detach().requires_grad_() for x in qkv), sinks]
    y = attention(*leaves[:3], documents, window, softcap, sinks)
    return [y.detach(), *torch.autograd.grad(y, leaves, shard_sequence(dy, world.rank, world.size))]


@pytest.mark.parametrize("core", ["ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(3, 0.0), (9, 2.0), (30, 0.0), (0, 2.0)])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_results_and_gradients_are_those_of_one_process(
    workers: WorkerPool, core: str, size: int, window: int, softcap: float, lengths: list[list[int]]
) -> None:
    starts = torch.tensor([0, *itertools.accumulate(itertools.chain(*lengths))], dtype=torch.int32)
    documents = Documents(starts, starts)
    dy = torch.randn(2, TOKENS, 4, 8, generator=torch.Generator().manual_seed(1))
    leaves = inputs()
    y = packed_attention(*leaves[:3], documents, window, softcap, leaves[3])
    expected = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    *shards, sinks = zip(*workers.run(size, attend, core, documents, window, softcap, dy), strict=True)
    for of_ranks, whole in zip(shards, expected, strict=False):
        torch.testing.assert_close(unshard_sequence(of_ranks), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(sinks), expected[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "sent"), [(1, 0), (2, 1), (5, 4), (9, 8)])
def test_of_a_neighbouring_chunk_no_more_than_the_window_is_sent(window: int, sent: int) -> None:
    """8 ranks, chunks of 8: rank 3 asks rank 2 for what is before chunk 3, and rank 4 for what is before chunk 12."""
    early, late = halos(3, 8, 8, window)
    assert [(part.owner, part.length) for part in (*early, *late)] == ([(2, sent), (4, sent)] if sent else [])
    assert halo_tokens(3, 8, 8, window) == 2 * sent


@pytest.mark.parametrize("window", [1, 4, 9, 30, 200])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_planner_counts_what_is_sent(size: int, window: int) -> None:
    for rank in range(size):
        parts = [part for halo in halos(rank, size, 8, window) for part in halo if part.owner != rank]
        assert halo_tokens(rank, size, 8, window) == sum(part.length for part in parts)
