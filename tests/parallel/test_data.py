"""Sums over data-parallel ranks under any ZeRO stage; fully sharded parameters are gathered where they are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # there is no public way to see every collective

from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel import buckets
from argosy.parallel.buckets import GradientSync, SumRanks
from argosy.parallel.data import BUCKETS_AHEAD, GradientSum
from argosy.parallel.mesh import Replicas, SumTier
from argosy.parallel.pieces import PlacedPiece
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.sync.compressor import Lane
from tiny import eager, gradients, laid_out

WIDTHS = (3, 5, 7, 2)  # rows that neither 2 nor 4 ranks share evenly; of 2 rows, 4 ranks get some nothing
ONE_BUCKET = 2**20
A_BUCKET_EACH = 1
ZERO = (0, 1, 2)


@contextmanager
def sent() -> Iterator[list[tuple[str, int]]]:
    """Which collectives start, and how many values each takes, in order."""
    messages: list[tuple[str, int]] = []
    homes = {"all_reduce": dist, "reduce_scatter_single": buckets, "all_gather_single": buckets}
    real = {name: getattr(home, name) for name, home in homes.items()}

    def counting(name: str) -> Any:
        def counted(*arguments: Any, **keys: Any) -> Any:
            messages.append((name, (arguments[0] if name == "all_reduce" else arguments[1]).numel()))
            return real[name](*arguments, **keys)

        return counted

    for name, home in homes.items():
        setattr(home, name, counting(name))
    try:
        yield messages
    finally:
        for name, home in homes.items():
            setattr(home, name, real[name])


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)))


def held(model: nn.Module, world: World, zero: int, sharing: int | None = None) -> list[PlacedPiece]:
    """The pieces that `world.rank` holds: all, or with ZeRO its rows, where `sharing` ranks share."""
    n = sharing or world.size
    pieces = []
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if zero:
            rows = -(-value.shape[0] // n)
            value = value[rows * (world.rank % n) :][:rows]
        pieces.append(
            PlacedPiece(
                name, value, tuple(parameter.shape), parameter=parameter, offset=(0,) * parameter.ndim, replicas=1
            )
        )
    return pieces


def sum_of(
    pieces: list[PlacedPiece], zero: int, bucket_bytes: int = ONE_BUCKET, dtype: torch.dtype = torch.float32
) -> GradientSum:
    world = dist.group.WORLD if dist.get_world_size() > 1 else None
    ranks = SumRanks(world if zero else None, Replicas((world,) if world is not None and not zero else ()))
    return grouped(pieces, ranks, zero, bucket_bytes, dtype)


def grouped(
    pieces: list[PlacedPiece], ranks: SumRanks, zero: int, bucket_bytes: int, dtype: torch.dtype
) -> GradientSum:
    how = GradientSync(Lane(torch.device("cpu")), bucket_bytes=bucket_bytes)
    return GradientSum(pieces, ranks, dtype, keep=zero < 2, how=how)


def inputs(rank: int, microbatch: int) -> Tensor:
    return torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(10 * rank + microbatch))


def backward(model: nn.Module, rank: int, microbatch: int) -> None:
    model(inputs(rank, microbatch)).square().sum().backward()


def expected(ranks: int, microbatches: tuple[int, ...]) -> dict[str, Tensor]:
    """What one process computes that has all rows."""
    model = layers()
    for rank in range(ranks):
        for microbatch in microbatches:
            backward(model, rank, microbatch)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def part_of(whole: Tensor, rank: int, ranks: int, zero: int) -> Tensor:
    """As `held` cuts it."""
    rows = -(-whole.shape[0] // ranks)
    return whole[rows * rank :][:rows] if zero else whole


Step = tuple[dict[str, Tensor], list[tuple[str, int]]]


def train_steps(world: World, zero: int, bucket_bytes: int) -> list[Step]:
    """The pieces' gradients and what was sent, of two steps of two microbatches each."""
    model = layers()
    pieces = held(model, world, zero)
    summing = sum_of(pieces, zero, bucket_bytes)
    steps = []
    for step in range(2):
        model.zero_grad(set_to_none=True)
        with sent() as messages:
            summing.arm(2)
            summing.before_backward(last=False)
            backward(model, world.rank, 2 * step)
            assert messages == [], "before the last microbatch nothing travels"
            summing.before_backward(last=True)
            backward(model, world.rank, 2 * step + 1)
            summing.finish()
        steps.append(({piece.name: piece.value.grad.clone() for piece in pieces}, messages))
    return steps


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET, 100, A_BUCKET_EACH])
def test_every_rank_has_its_part_of_the_sum_over_ranks_and_microbatches(workers, zero, size, bucket_bytes):
    for rank, found in enumerate(workers.run(size, train_steps, zero, bucket_bytes)):
        for step, (sums, _) in enumerate(found):
            for name, whole in expected(size, (2 * step, 2 * step + 1)).items():
                torch.testing.assert_close(sums[name], part_of(whole, rank, size, zero), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(("bucket_bytes", "messages"), [(ONE_BUCKET, 1), (A_BUCKET_EACH, 2 * (len(WIDTHS) - 1))])
def test_each_gradient_travels_once_a_step(workers, zero, bucket_bytes, messages):
    shapes = [parameter.shape for parameter in layers().parameters()]
    filled = sum(-(-shape[0] // 2) * 2 * shape[1:].numel() for shape in shapes)  # up to equal parts
    for found in workers.run(2, train_steps, zero, bucket_bytes):
        for _, sizes in found:
            assert {name for name, _ in sizes} == {"reduce_scatter_single" if zero else "all_reduce"}
            assert sum(size for _, size in sizes) == (filled if zero else sum(shape.numel() for shape in shapes))
            assert len(sizes) == messages


def test_alone_a_rank_sends_nothing_and_its_gradients_stay_where_they_are(workers):
    assert workers.run(1, own_gradients) == [(True, 0)]


def own_gradients(world: World) -> tuple[bool, int]:
    model = layers()
    pieces = held(model, world, zero=0)
    summing = sum_of(pieces, zero=0)
    with sent() as messages:
        summing.arm(1)
        backward(model, 0, 0)
        summing.finish()
        summing.after_update()
    same = all(piece.value.grad.data_ptr() == piece.parameter.grad.data_ptr() for piece in pieces)
    return same, len(messages)


def test_where_some_share_and_others_have_copies_the_sum_is_over_all(workers):
    for rank, sums in enumerate(workers.run(4, shared_by_two)):
        for name, whole in expected(4, (0,)).items():
            torch.testing.assert_close(sums[name], part_of(whole, rank % 2, 2, zero=1), rtol=1e-4, atol=1e-5, msg=name)


def shared_by_two(world: World) -> dict[str, Tensor]:
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    shard, replicate = (next(g for ranks, g in some if world.rank in ranks) for some in _halves(list(groups.items())))
    model = layers()
    pieces = held(model, world, zero=1, sharing=2)
    summing = grouped(pieces, SumRanks(shard, Replicas((replicate,))), 1, 100, torch.float32)
    summing.arm(1)
    backward(model, world.rank, 0)
    summing.finish()
    return {piece.name: piece.value.grad.clone() for piece in pieces}


@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET, A_BUCKET_EACH])
@pytest.mark.parametrize("sharing", [1, 2])
def test_in_tiers_the_sum_is_over_all_and_a_part_of_it_crosses(workers, bucket_bytes, sharing):
    size = 4 * sharing
    for rank, (sums, messages) in enumerate(workers.run(size, summed_in_tiers, bucket_bytes, sharing)):
        for name, whole in expected(size, (0,)).items():
            mine = part_of(whole, rank % sharing, sharing, zero=sharing - 1)
            torch.testing.assert_close(sums[name], mine, rtol=1e-4, atol=1e-5, msg=name)
        numbers = [sum(many for kind, many in messages if kind == name) for name in ("all_reduce", "all_gather_single")]
        assert numbers[0] == numbers[1] > 0, "what two neighbours gather is what each of them has summed across"


def summed_in_tiers(world: World, bucket_bytes: int, sharing: int) -> tuple[dict[str, Tensor], list[tuple[str, int]]]:
    """Return the sums and messages of two groups of two replicas, each on `sharing` ranks."""
    ranks = torch.arange(world.size).view(2, 2, sharing)
    across, inside, gather, shard = (
        next(group for group, members in made if world.rank in members)
        for made in (
            [(dist.new_group(members), members) for members in ranks.movedim(dim, -1).flatten(0, -2).tolist()]
            for dim in (0, 1, 1, 2)
        )
    )
    model = layers()
    pieces = held(model, world, zero=sharing - 1, sharing=sharing)
    ranks_of = SumRanks(shard if sharing > 1 else None, Replicas((across,), (SumTier(inside, gather),)))
    summing = grouped(pieces, ranks_of, sharing - 1, bucket_bytes, torch.float32)
    with sent() as messages:
        summing.arm(1)
        backward(model, world.rank, 0)
        summing.finish()
    return {piece.name: piece.value.grad.clone() for piece in pieces}, messages


def _halves(items: list[Any]) -> tuple[list[Any], list[Any]]:
    return items[: len(items) // 2], items[len(items) // 2 :]


@pytest.mark.parametrize("zero", ZERO)
def test_the_first_bucket_leaves_before_backward_has_reached_the_first_layer(workers, zero):
    name = "reduce_scatter_single" if zero else "all_reduce"
    assert workers.run(2, sent_when_backward_reaches_the_first_layer, zero) == [[(name, 2), (name, 14)]] * 2


def sent_when_backward_reaches_the_first_layer(world: World, zero: int) -> list[tuple[str, int]]:
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2))
    summing = sum_of(held(model, world, zero), zero, A_BUCKET_EACH)
    so_far: list[tuple[str, int]] = []
    with sent() as messages:
        # Backward computes this gradient on its way to the first layer, whose own come after it.
        model[0].register_full_backward_pre_hook(lambda *_: so_far.extend(messages))
        summing.arm(1)
        backward(model, world.rank, 0)
        summing.finish()
    return so_far


@pytest.mark.parametrize(("zero", "left"), [(0, False), (1, True), (2, False)])
def test_each_gradient_is_freed_once_it_is_sent_except_under_zero_1(workers, zero, left):
    for at_the_first_layer, at_the_end in workers.run(2, gradients_in_memory, zero):
        assert at_the_first_layer == [left, left]
        assert at_the_end == [left] * 4


def gradients_in_memory(world: World, zero: int) -> tuple[list[bool], list[bool]]:
    """Return which of the last layer's are there when backward reaches the first, and which at the end."""
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2))
    summing = sum_of(held(model, world, zero), zero, A_BUCKET_EACH)
    so_far: list[bool] = []
    model[0].register_full_backward_pre_hook(
        lambda *_: so_far.extend(p.grad is not None for p in model[1].parameters())
    )
    summing.arm(1)
    backward(model, world.rank, 0)
    summing.finish()
    return so_far, [parameter.grad is not None for parameter in model.parameters()]


class Branches(nn.Module):
    """Two layers side by side; which of them backward reaches first differs between even and odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4, bias=False), nn.Linear(3, 6, bias=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        parts = [self.left, self.right] if rank % 2 else [self.right, self.left]
        return sum((part(x).sum() for part in parts), start=torch.zeros(()))


@pytest.mark.parametrize("zero", ZERO)
def test_the_order_of_the_messages_is_the_same_on_all_ranks_whichever_gradient_is_ready_first(workers, zero):
    orders, ready = zip(*workers.run(2, order_of_messages, zero), strict=True)
    assert ready[0] != ready[1]
    assert orders[0] == orders[1] == [18, 12]


def order_of_messages(world: World, zero: int) -> tuple[list[int], list[int]]:
    model, ready = Branches(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ready.append(p.numel()))
    summing = sum_of(held(model, world, zero), zero, A_BUCKET_EACH)
    with sent() as messages:
        summing.arm(1)
        model(inputs(world.rank, 0), world.rank).backward()
        summing.finish()
    return [size for _, size in messages], ready


@pytest.mark.parametrize("zero", ZERO)
def test_gradients_that_were_set_without_a_backward_are_summed_too(workers, zero):
    """A pipeline schedule that splits backward computes those of the weights by itself."""
    for rank, sums in enumerate(workers.run(2, set_by_hand, zero)):
        for piece_sums in sums:
            assert torch.equal(piece_sums, torch.full_like(piece_sums, 1.0 + 2.0)), rank


def set_by_hand(world: World, zero: int) -> list[Tensor]:
    model = layers()
    pieces = held(model, world, zero)
    summing = sum_of(pieces, zero, 100)
    for _ in range(2):  # and again: nothing is left over from the step before
        summing.arm(3)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, world.rank + 1.0)
        summing.finish()
    return [piece.value.grad for piece in pieces]


def test_a_parameter_that_took_no_part_is_named(workers):
    with pytest.raises(AssertionError, match=r"2\.bias: every parameter takes part in every step"):
        workers.run(1, leave_one_out)


def leave_one_out(world: World) -> None:
    model = layers()
    summing = sum_of(held(model, world, zero=0), zero=0)
    summing.arm(1)
    backward(model, 0, 0)
    model[2].bias.grad = None
    summing.finish()


@pytest.mark.parametrize("zero", ZERO)
def test_sums_in_bf16_are_rounded_and_reach_the_pieces_in_their_own_dtype(workers, zero):
    for rank, sums in enumerate(workers.run(2, sums_in_bf16, zero)):
        for name, whole in expected(2, (0,)).items():
            exact = part_of(whole, rank, 2, zero)
            assert sums[name].dtype == torch.float32
            assert torch.equal(sums[name], sums[name].bfloat16().float()), "as few bits as were sent"
            torch.testing.assert_close(sums[name], exact, rtol=3e-2, atol=0.2)


def sums_in_bf16(world: World, zero: int) -> dict[str, Tensor]:
    model = layers()
    pieces = held(model, world, zero)
    summing = sum_of(pieces, zero, dtype=torch.bfloat16)
    summing.arm(1)
    backward(model, world.rank, 0)
    summing.finish()
    return {piece.name: piece.value.grad for piece in pieces}


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("size", [2, 4])
def test_after_an_update_every_rank_has_what_each_has_updated(workers, zero, size):
    found = workers.run(size, update, zero)
    for name, initial in layers().state_dict().items():
        rows = [-(-initial.shape[0] // size)] * size
        by = torch.repeat_interleave(torch.arange(1.0, size + 1), torch.tensor(rows))[: initial.shape[0]]
        by = by.view(-1, *[1] * (initial.ndim - 1)) if zero else 1.0
        for values, gathers in found:
            assert torch.equal(values[name], initial + by), name
            assert gathers == bool(zero)


@pytest.mark.parametrize("zero", [1, 2])
def test_values_are_taken_over_layer_by_layer_as_they_are_needed(workers, zero):
    for first, last, at_once, in_all in workers.run(2, taken_in_turn, zero):
        assert first == [True, False]
        assert last == [True, True]
        assert (at_once, in_all) == (BUCKETS_AHEAD, 2 * (len(WIDTHS) - 1))


def taken_in_turn(world: World, zero: int) -> tuple[list[bool], list[bool], int, int]:
    """Return True for the first and the last layer if they have what the other rank has updated, before and after the
    last is needed; then how many messages travel at once, and in all."""
    model = layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pieces = held(model, world, zero)
    summing = sum_of(pieces, zero, A_BUCKET_EACH)
    for piece in pieces:
        piece.value.add_(1)

    def are_whole() -> list[bool]:
        return [torch.equal(model.state_dict()[name], before[name] + 1) for name in ("0.weight", "2.weight")]

    with sent() as messages:
        summing.after_update()
        at_once = len(messages)
        summing.need(model[0])
        first = are_whole()
        summing.need(model[2])
    return first, are_whole(), at_once, len(messages)


def update(world: World, zero: int) -> tuple[dict[str, Tensor], bool]:
    """Each rank adds its number, from 1, to what it updates; without ZeRO all do the same."""
    model = layers()
    pieces = held(model, world, zero)
    summing = sum_of(pieces, zero, 100)
    for piece in pieces:
        piece.value.add_(world.rank + 1 if zero else 1)
    with sent() as messages:
        summing.after_update()
        summing.settle()
    return {name: value.clone() for name, value in model.state_dict().items()}, bool(messages)


ROWS = np.random.default_rng(0).integers(0, 400, (8, 33)).astype(np.int32)
FSDP_UNITS = 3  # two blocks, and the rest


class Collectives(TorchDispatchMode):
    """Counts the operations of process groups, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.counts[func._schema.name.strip("_").removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives(world: World, plan: str) -> tuple[int, int, int]:
    """Gathers, sums and bytes of parameters that stay, in one step of several microbatches."""
    layout = eager(plan)
    model = laid_out(world, layout)
    share = len(ROWS) // layout.dp
    batch = microbatches(ROWS[model.dp_rank * share :][:share], layout.microbatch, 0, world.device)
    with Collectives() as seen:
        model.forward_backward(batch, 1.0, StepClock(world.device))
        model.finish_gradients()
    gathers = sum(n for op, n in seen.counts.items() if "allgather" in op)
    scatters = sum(n for op, n in seen.counts.items() if "reduce_scatter" in op)
    return gathers, scatters, sum(piece.value.nbytes for piece in model.pieces)


@pytest.mark.parametrize("plan", ["dp_shard=4,microbatch=2", "dp_shard=4", "dp_shard=2"])
def test_gradients_are_summed_once_a_step_however_many_microbatches(workers, plan):
    microbatches = eager(plan).microbatches(len(ROWS))
    for gathers, scatters, _ in workers.run(eager(plan).world_size, collectives, plan):
        assert scatters == FSDP_UNITS
        # In each microbatch blocks are gathered for forward and again for backward; the rest stays for the latter,
        # and the last block, with which backward begins, may too.
        assert FSDP_UNITS * microbatches <= gathers <= 2 * FSDP_UNITS * microbatches


def test_a_rank_holds_its_share_and_no_more(workers):
    (alone,) = workers.run(1, collectives, "microbatch=8")
    for _, _, nbytes in workers.run(4, collectives, "dp_shard=4"):
        assert nbytes == pytest.approx(alone[2] / 4, rel=0.01)


def loss_of_new_values(world: World, plan: str) -> tuple[float, float]:
    """The loss that is left once all values are zeros: before and after another forward without gradients."""
    layout, found = eager(plan), []
    for is_used in (False, True):
        model = laid_out(world, layout)
        batch = microbatches(ROWS[:1], 1, 0, world.device)
        if is_used:
            model.loss(batch)
        for piece in model.pieces:
            piece.value.zero_()
        model.after_update()
        found.append(float(model.loss(batch)))
    return found[0], found[1]


def test_values_that_are_set_between_two_forwards_without_gradients_are_gathered_anew(workers):
    for new, used in workers.run(2, loss_of_new_values, "dp_shard=2,microbatch=1"):
        assert new == used


def dtypes(world: World, plan: str) -> dict[str, torch.dtype]:
    layout = eager(plan)
    model = laid_out(world, layout)
    share = len(ROWS) // layout.dp
    batch = microbatches(ROWS[model.dp_rank * share :][:share], layout.microbatch, 0, world.device)
    model.forward_backward(batch, 1.0 / ROWS.size, StepClock(world.device))
    model.finish_gradients()
    assert all(isinstance(piece.parameter, DTensor) for piece in model.pieces)
    assert {piece.value.dtype for piece in model.pieces} == {torch.float32}
    return {name: gradient.dtype for name, gradient in gradients(model).items()}


@pytest.mark.parametrize("plan", ["dp_shard=2,precision=bf16", "dp_shard=2,precision=bf16,reduce=bf16"])
def test_weights_and_gradients_are_fp32_whatever_the_arithmetic(workers, plan):
    for found in workers.run(2, dtypes, plan):
        assert set(found.values()) == {torch.float32}


@pytest.mark.parametrize(
    ("plan", "sharded"),
    [("", False), ("dp_replicate=4", False), ("dp_shard=2", True), ("cp=2", True), ("dp_shard=2,zero=2", False)],
)
def test_parameters_are_sharded_where_there_is_someone_to_share_with(plan, sharded):
    assert Plan.parse(plan).shards_parameters == sharded


def allocations_of_the_group(world: World, user_buffers: str) -> tuple[float, list[int]]:
    """The loss, and the numbers of each message that the process group was asked to allocate memory for."""
    model = laid_out(world, eager(f"dp_shard={world.size},user_buffers={user_buffers}"))
    backend = type(dist.group.WORLD._get_backend(world.device))
    sizes: list[int] = []

    def allocate(_: Any, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=dtype, device=device)

    rows = np.random.default_rng(world.rank).integers(0, 400, (1, 33)).astype(np.int32)
    with (
        mock.patch.object(backend, "supports_tensor_alloc", lambda *_: True),
        mock.patch.object(backend, "allocate_tensor", allocate),
    ):
        loss = model.forward_backward(microbatches(rows, 1, 0, world.device), 1.0, StepClock(world.device))
        model.finish_gradients()
    return loss.item(), sizes


def test_with_user_buffers_messages_lie_in_memory_of_the_process_group(workers):
    with_it, without = (workers.run(2, allocations_of_the_group, word) for word in ("true", "false"))
    for (loss, sizes), (expected, none) in zip(with_it, without, strict=True):
        assert loss == expected
        assert len(sizes) == 3 + 2 + 2 * 3, "gathered in forward, again in backward, and a sum's two ends"
        assert none == []
