"""Context parallelism gives the numbers of one process, tile by tile, whatever rows and documents are cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from argosy import compiler
from argosy.models.attention import AttentionCore, Documents, causal_attention, packed_attention
from argosy.models.attention_kernels import (
    CPU_FLASH,
    CUDA_FLASH,
    PLAIN_KERNEL,
    SEES_ALL,
    SEES_EARLIER,
    Kernel,
    VisibleKeys,
    kernel_for,
)
from argosy.parallel.context import (
    RingAttention,
    UlyssesAttention,
    ring_tiles,
    shard_sequence,
    unshard_sequence,
)
from argosy.parallel.recompute import selective_contexts
from argosy.parallel.world import World
from argosy.simulate.record import LiveBytes

KERNELS = {"flash": CPU_FLASH, "plain": PLAIN_KERNEL}
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's kernel")


def tile_inputs(q_heads: int, kv_heads: int, queries: int = 12, keys: int = 12, width: int = 8) -> list[Tensor]:
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
    q, k, v, _ = tile_inputs(4, kv_heads, queries=5, keys=12)
    y, lse = kernel.forward(q, k, v, SEES_ALL)
    expected_y, expected_lse = written_out(q, k, v)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_causal_tile_and_its_gradients_are_those_of_the_model(kernel: Kernel, kv_heads: int):
    q, k, v, dy = tile_inputs(4, kv_heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = causal_attention(*leaves)
    y, lse = kernel.forward(q, k, v, SEES_EARLIER)
    torch.testing.assert_close(y, expected)
    gradients = kernel.backward(dy, q, k, v, y, lse, SEES_EARLIER)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, leaves, dy), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_with_the_whole_output_and_log_sum_exp_gradients_of_parts_add_up(kernel: Kernel, kv_heads: int):
    q, k, v, dy = tile_inputs(4, kv_heads)
    whole = kernel.forward(q, k, v, SEES_ALL)
    dq, dk, dv = kernel.backward(dy, q, k, v, *whole, SEES_ALL)
    parts = [kernel.backward(dy, q, k[:, s], v[:, s], *whole, SEES_ALL) for s in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], dim=1), dk)
    torch.testing.assert_close(torch.cat([part[2] for part in parts], dim=1), dv)


def test_the_gpu_kernel_takes_these_arguments_and_gives_these_shapes():
    """On the meta device: torch's own operators, all but the arithmetic; they are private, and may change."""
    q, k, v, dy = (x.to("meta", torch.bfloat16) for x in tile_inputs(4, 2, queries=5, keys=12))
    y, lse = CUDA_FLASH.forward(q, k, v, SEES_ALL)
    assert y.shape == q.shape and lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    gradients = CUDA_FLASH.backward(dy, q, k, v, y, lse, SEES_ALL)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("seen", [SEES_ALL, SEES_EARLIER])
def test_the_gpu_kernel_gives_the_plain_numbers(seen: VisibleKeys):
    q, k, v, dy = (x.to("cuda", torch.bfloat16) for x in tile_inputs(4, 2, queries=64, keys=64, width=64))
    assert kernel_for(q) is CUDA_FLASH
    y, lse = CUDA_FLASH.forward(q, k, v, seen)
    expected_y, expected_lse = PLAIN_KERNEL.forward(q, k, v, seen)
    torch.testing.assert_close(y.float(), expected_y, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    gradients, expected = (kernel.backward(dy, q, k, v, y, lse, seen) for kernel in (CUDA_FLASH, PLAIN_KERNEL))
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


SEQ_LEN = 48
DOCUMENTS = {
    "one document a row": [[48], [48], [48]],
    "equal halves": [[24, 24]] * 3,
    "single tokens": [[1] * 48] * 3,
    "ragged": [[5, 30, 13], [48], [1, 20, 26, 1]],
    "at the chunks' ends": [[6, 6, 36], [12, 12, 24], [42, 6]],
    "most of a row": [[1, 46, 1], [47, 1], [1, 47]],
}
CORES: dict[str, Callable[[dist.ProcessGroup], AttentionCore]] = {
    "ring": RingAttention,
    "ring, plain kernel": lambda group: RingAttention(group, PLAIN_KERNEL),
    "ulysses": UlyssesAttention,
}

Result = tuple[Tensor, ...]
"""The output and the gradients of q, k, v."""


def starts(rows: list[list[int]]) -> Documents:
    where = torch.tensor([0, *itertools.accumulate(itertools.chain(*rows))], dtype=torch.int32)
    return Documents(where, where)


def inputs(q_heads: int, kv_heads: int, rows: int = 3, seq_len: int = SEQ_LEN) -> list[Tensor]:
    """Whole q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    heads = (q_heads, kv_heads, kv_heads, q_heads)
    return [torch.randn(rows, seq_len, n, 8, generator=generator) for n in heads]


def attend(core: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dy: Tensor, documents: Documents) -> Result:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = core(*leaves, documents)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def attend_to_shards(
    world: World, core: str, whole: list[Tensor], documents: list[Documents], wrapper: str = ""
) -> list[Result]:
    """This rank's tokens of the results, for each of `documents`."""
    attention: Any = CORES[core](dist.group.WORLD)
    if wrapper:
        attention = WRAPPERS[wrapper](attention)
    shards = [shard_sequence(x, world.rank, world.size) for x in whole]
    return [attend(attention, *shards, d) for d in documents]


def compiled(core: Any, fullgraph: bool = False) -> Any:
    compiler.load()
    return torch.compile(lambda *args: core(*args) * 1.0, backend="aot_eager", fullgraph=fullgraph)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "recomputed": lambda core: lambda *args: checkpoint(core, *args, use_reentrant=False),
    "recomputed in part": lambda core: (
        lambda *args: checkpoint(core, *args, use_reentrant=False, context_fn=selective_contexts)
    ),
    "compiled": compiled,
    "compiled whole": lambda core: compiled(core, fullgraph=True),
}
ULYSSES_WRAPPERS = [("ulysses", wrapper) for wrapper in WRAPPERS if wrapper != "compiled whole"]


def assert_equal_whole(
    results: list[list[Result]], whole: list[Tensor], documents: list[Documents], **tolerance: float
):
    for of_ranks, d in zip(zip(*results, strict=True), documents, strict=True):
        expected = attend(packed_attention, *whole, d)
        for shards, reference in zip(zip(*of_ranks, strict=True), expected, strict=True):
            torch.testing.assert_close(unshard_sequence(shards), reference, **tolerance)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_row_is_cut_into_an_early_and_a_late_chunk_for_each_rank(size: int):
    x = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    shards = [shard_sequence(x, rank, size) for rank in range(size)]
    chunk = SEQ_LEN // (2 * size)
    assert shards[0][0].tolist() == [*range(chunk), *range(SEQ_LEN - chunk, SEQ_LEN)]
    assert torch.equal(unshard_sequence(shards), x)


def test_a_row_that_cannot_be_cut_evenly_is_refused():
    with pytest.raises(AssertionError, match="46 tokens cannot be cut into 4 equal chunks"):
        shard_sequence(torch.zeros(1, 46), 0, 2)


@pytest.mark.parametrize(
    ("size", "kv_heads"),
    [(2, 4), (2, 2), (2, 1), (4, 2), *(pytest.param(4, heads, marks=pytest.mark.slow) for heads in (4, 1))],
)
@pytest.mark.parametrize("core", CORES)
def test_outputs_and_gradients_are_those_of_one_process(workers, size: int, core: str, kv_heads: int):
    whole, documents = inputs(4, kv_heads), [starts(rows) for rows in DOCUMENTS.values()]
    results = workers.run(size, attend_to_shards, core, whole, documents)
    assert_equal_whole(results, whole, documents, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("core", CORES)
def test_a_group_of_one_is_no_special_case(workers, core: str):
    whole, documents = inputs(4, 2), [starts(DOCUMENTS["ragged"])]
    assert_equal_whole(workers.run(1, attend_to_shards, core, whole, documents), whole, documents)


@pytest.mark.parametrize("core", CORES)
def test_bf16_loses_little_to_bf16_in_one_process(workers, core: str):
    whole, documents = inputs(4, 2), [starts(DOCUMENTS["ragged"]), starts(DOCUMENTS["one document a row"])]
    halves = [x.bfloat16() for x in whole]
    results = workers.run(4, attend_to_shards, core, halves, documents)
    exact = [attend(packed_attention, *(x.float() for x in halves), d) for d in documents]
    alone = [attend(packed_attention, *halves, d) for d in documents]
    for of_ranks, one_process, reference in zip(zip(*results, strict=True), alone, exact, strict=True):
        for shards, theirs, true in zip(zip(*of_ranks, strict=True), one_process, reference, strict=True):
            ours = unshard_sequence(shards)
            assert ours.dtype == torch.bfloat16
            # What is computed of each part is rounded, and their sum once more: up to twice the variance.
            assert (ours.float() - true).square().mean() <= 2 * (theirs.float() - true).square().mean()


@pytest.mark.parametrize("core, wrapper", [*itertools.product(["ring"], WRAPPERS), *ULYSSES_WRAPPERS])
def test_a_core_may_be_recomputed_and_stand_in_compiled_code(workers, core: str, wrapper: str):
    whole, documents = inputs(4, 2), [starts(DOCUMENTS["ragged"])]
    results = workers.run(2, attend_to_shards, core, whole, documents, wrapper)
    assert_equal_whole(results, whole, documents, rtol=1e-5, atol=1e-5)


def messages(world: World, wrapper: str) -> tuple[int, int]:
    """How many times keys, values or their gradients set out for the next rank, in forward and in backward."""
    ring = RingAttention(dist.group.WORLD)
    counted = mock.Mock(wraps=dist.batch_isend_irecv)
    *leaves, dy = (shard_sequence(x, world.rank, world.size) for x in inputs(4, 2))
    with mock.patch.object(dist, "batch_isend_irecv", counted):
        y = WRAPPERS[wrapper](ring)(*(x.requires_grad_() for x in leaves), starts(DOCUMENTS["ragged"]))
        forward = counted.call_count
        y.backward(dy)
    return forward, counted.call_count - forward


@pytest.mark.parametrize("wrapper, again", [("recomputed", 1), ("recomputed in part", 0)])
def test_selective_recomputation_keeps_what_a_ring_found_and_sends_nothing_again(workers, wrapper: str, again: int):
    n = 4
    assert workers.run(n, messages, wrapper) == [(n - 1, again * (n - 1) + (n - 1) + n)] * n


def heads_over(world: World, core: str, q_heads: int, kv_heads: int) -> None:
    q, k, v, _ = (shard_sequence(x, world.rank, world.size) for x in inputs(q_heads, kv_heads, rows=1))
    CORES[core](dist.group.WORLD)(q, k, v, starts([[SEQ_LEN]]))


@pytest.mark.parametrize("core, q_heads, kv_heads", [("ulysses", 6, 6), ("ulysses", 12, 3), ("ring", 4, 3)])
def test_heads_that_do_not_fit_are_refused(workers, core: str, q_heads: int, kv_heads: int):
    with pytest.raises(AssertionError, match="key/value heads"):
        workers.run(4, heads_over, core, q_heads, kv_heads)


def bytes_of_ring(world: World, tokens: int) -> tuple[int, int, int]:
    """Return what one rank with `tokens` tokens keeps for backward, its peak in forward, and in backward."""
    q, k, v, dy = (shard_sequence(x, world.rank, world.size) for x in inputs(4, 4, rows=1, seq_len=tokens * world.size))
    ring = RingAttention(dist.group.WORLD)
    with LiveBytes() as live:
        y = ring(*(x.requires_grad_() for x in (q, k, v)), starts([[tokens * world.size]]))
        kept, forward, live.most = live.now, live.most, 0
        torch.autograd.grad(y, (q, k, v), dy)
    return kept, forward, live.most


def test_a_ring_needs_memory_for_a_few_times_a_ranks_tokens_however_many_the_others_have(workers):
    tokens, tensor, lse = 512, 512 * 4 * 8 * 4, 512 * 4 * 4
    two, four = (workers.run(size, bytes_of_ring, tokens) for size in (2, 4))
    assert {*two} == {*four}, "what a rank needs depends on its own tokens only"
    for kept, forward, backward in four:
        assert kept == tensor + lse, "the output and its log-sum-exp; q, k and v are the caller's"
        assert forward <= 8 * tensor, "two blocks of k and v, the output, a tile's"
        assert backward <= 18 * tensor, "also gradients: q's, those found here, those sent and received"
