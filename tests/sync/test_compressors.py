"""What replicas get is the sum, but for what their residuals keep; it is the same bits on each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.sync import SyncConfig
from argosy.parallel.world import World
from argosy.sync.compressor import BucketFacts, Lane, Segment, SumTime
from argosy.sync.compressors import COMPRESSOR_OF

SEGMENTS = (Segment(1, 40, 30), Segment(3, 17, 19), Segment(1, 5, 7))
NUMBERS = sum(segment.elements for segment in SEGMENTS)
WITH_RESIDUAL = ("int8", "int4", "powersgd", "topk", "sign")
SETTINGS: dict[str, Any] = {"block": 16, "rank": 2, "density": 0.05, "momentum": 0.0}
"""block: the shortest, of which two replicas have an odd number each."""


def facts(word: str, **settings: Any) -> BucketFacts:
    way = COMPRESSOR_OF[word](SyncConfig(**{**SETTINGS, **settings}))
    return BucketFacts(3, SEGMENTS, way.memory(SEGMENTS, torch.device("cpu")), seed=7)


def gradients(rank: int, step: int) -> Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(100 * step + rank))


def summed(word: str, flat: Tensor, bucket: BucketFacts, moment: SumTime, **settings: Any) -> Tensor:
    way = COMPRESSOR_OF[word](SyncConfig(**{**SETTINGS, **settings}))
    lane = Lane(torch.device("cpu"))
    assert dist.group.WORLD is not None
    return lane.finish(lane.submit(way.sum(flat, [dist.group.WORLD] * way.messages, bucket, moment), [way.messages]))


def steps(world: World, word: str, many: int, scale: float = 1.0, **settings: Any) -> list[tuple[Tensor, Tensor]]:
    """Sum and residual of each step."""
    bucket, found = facts(word, **settings), []
    for step in range(many):
        flat = gradients(world.rank, step) * scale
        sums = summed(word, flat, bucket, SumTime(step, scale), **settings)
        bucket.memory.commit()
        found.append((sums.float(), bucket.memory.kept.get("residual", torch.zeros(NUMBERS)).clone()))
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("word", WITH_RESIDUAL)
def test_sums_and_residuals_together_lose_nothing(workers, word, size):
    found = workers.run(size, steps, word, 3)
    before = torch.zeros(NUMBERS)
    for step in range(3):
        sums = found[0][step][0]
        assert all(torch.equal(sums, ranks[step][0]) for ranks in found), "the same bits on each"
        after = sum(ranks[step][1] for ranks in found)
        exact = sum(gradients(rank, step) for rank in range(size))
        torch.testing.assert_close(sums + after, exact + before, rtol=1e-4, atol=1e-4)
        assert not torch.equal(sums, exact)
        before = after


@pytest.mark.parametrize("word", WITH_RESIDUAL)
def test_a_loss_scale_changes_neither_sum_nor_residual(workers, word):
    for plain, scaled in zip(workers.run(2, steps, word, 2), workers.run(2, steps, word, 2, 1024.0), strict=True):
        for (sums, left), (scaled_sums, same) in zip(plain, scaled, strict=True):
            assert torch.equal(sums, scaled_sums / 1024) and torch.equal(left, same)


@pytest.mark.parametrize(("word", "most"), [("bf16", 8e-3), ("int8", 0.02), ("int4", 0.4), ("powersgd", 1.0)])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_sum_is_as_near_as_its_levels_are(workers, word, most, rounding):
    exact = gradients(0, 0) + gradients(1, 0)
    for found in workers.run(2, one_step, word, rounding):
        assert (found - exact).norm() / exact.norm() < most


def one_step(world: World, word: str, rounding: str) -> Tensor:
    return steps(world, word, 1, rounding=rounding)[0][0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("word", ["bf16", *WITH_RESIDUAL])
def test_a_number_that_is_not_finite_reaches_all_ranks(workers, word, bad):
    assert workers.run(3, with_bad_number, word, bad) == [False] * 3


def with_bad_number(world: World, word: str, bad: float) -> bool:
    flat = gradients(world.rank, 0)
    if world.rank == 1:
        flat[77] = bad
    return bool(summed(word, flat, facts(word), SumTime()).isfinite().all())


@pytest.mark.parametrize("word", WITH_RESIDUAL)
def test_a_step_that_is_done_again_gives_the_same_bits(workers, word):
    assert all(workers.run(2, done_again, word))


def done_again(world: World, word: str) -> bool:
    settings = {"rounding": "stochastic", "momentum": 0.5}
    bucket = facts(word, **settings)
    for step in range(2):
        summed(word, gradients(world.rank, step), bucket, SumTime(step), **settings)
        bucket.memory.commit()
    found = []
    for _ in range(2):
        bucket.memory.drop()
        found.append(summed(word, gradients(world.rank, 2), bucket, SumTime(2), **settings))
    return torch.equal(*found)


def test_topk_sends_of_each_parameter_however_small_its_gradients_are(workers):
    for sums in workers.run(2, with_small_gradients):
        of_each = sums.split([segment.elements for segment in SEGMENTS])
        for part, least in zip(of_each, (60, 49, 2), strict=True):  # a twentieth, of one rank or of both
            assert least <= int(part.count_nonzero()) <= 2 * least


def with_small_gradients(world: World) -> Tensor:
    flat = gradients(world.rank, 0)
    flat[: SEGMENTS[0].elements] *= 1e-6
    return summed("topk", flat, facts("topk"), SumTime())


def test_bf16_is_the_sum_of_pytorchs_hook(workers):
    for ours, theirs in workers.run(2, beside_bf16_hook):
        assert torch.equal(ours / 2, theirs)


def beside_bf16_hook(world: World) -> tuple[Tensor, Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    theirs = hooked(bf16_compress_hook, None, [gradients(world.rank, 0)])[0]
    return steps(world, "bf16", 1)[0][0], theirs


class FlatBucket:
    """What a hook of PyTorch asks of DDP's bucket."""

    def __init__(self, flat: Tensor):
        self._flat = flat

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[Tensor]:
        rows, cols = 40, 30
        return [self._flat.view(rows, cols)]


def hooked(hook: Any, state: Any, flats: list[Tensor]) -> list[Tensor]:
    means = []
    for flat in flats:
        found = hook(state, FlatBucket(flat)).wait()
        means.append((found[0] if isinstance(found, (list, tuple)) else found).clone())
    return means


def test_powersgd_is_that_of_pytorch(workers):
    for ours, theirs in workers.run(2, beside_powersgd_hook):
        for our, their in zip(ours, theirs, strict=True):
            torch.testing.assert_close(our / 2, their, rtol=1e-4, atol=1e-5)


def beside_powersgd_hook(world: World) -> tuple[list[Tensor], list[Tensor]]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    one = (Segment(1, 40, 30),)
    flats = [gradients(world.rank, step)[:1200] for step in range(4)]
    state = PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2, random_seed=5)
    exact = hooked(powerSGD_hook, state, [flat.clone() for flat in flats[:2]])
    state.iter = 2
    draw = PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2, random_seed=5).rng
    first_q = torch.randn(1, 30, 3, generator=torch.Generator().manual_seed(int(draw.randint(1_000_000_000))))
    theirs = hooked(powerSGD_hook, state, [flat.clone() for flat in flats])
    way = COMPRESSOR_OF["powersgd"](SyncConfig(rank=3))
    bucket = BucketFacts(0, one, way.memory(one, torch.device("cpu")), seed=0)
    bucket.memory.kept["q"] = first_q.flatten()
    lane, ours = Lane(torch.device("cpu")), []
    assert dist.group.WORLD is not None and len(exact) == 2
    for step, flat in enumerate(flats):
        sending = way.sum(flat.clone(), [dist.group.WORLD] * way.messages, bucket, SumTime(step))
        ours.append(lane.finish(lane.submit(sending, [way.messages])))
        bucket.memory.commit()
    return ours, theirs


@pytest.mark.parametrize("one", [Segment(1, 7, 3), Segment(3, 5, 2, is_stack=True), Segment(1, 4, 1), Segment(1, 0, 6)])
@pytest.mark.parametrize("k", [2, 4])
def test_the_parts_of_a_parameter_are_rows_of_its_matrices_and_make_it_whole_again(one, k):
    numbers = torch.arange(2.0 * one.elements).view(2, -1) + 1
    parts_nkw = one.cut(numbers, k)
    part = one.part(k)
    assert parts_nkw.shape == (2, k, part.elements)
    first = parts_nkw[0, 0].view(part.batch, part.rows, part.cols)
    assert torch.equal(first, numbers[0].view(one.batch, one.rows, one.cols)[:, : part.rows])
    for parts_kw, row in zip(parts_nkw, numbers, strict=True):
        assert torch.equal(one.joined(parts_kw), row)
