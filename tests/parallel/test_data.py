"""Gradients are summed over replicas, once a step, in the same order everywhere, while backward still runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.parallel import data
from argosy.parallel.data import GradientReducer
from argosy.parallel.world import World

WIDTHS = (3, 5, 7, 2)
ONE_BUCKET = 2**20
A_BUCKET_EACH = 1


@contextmanager
def sent() -> Iterator[list[int]]:
    """The number of values in each all-reduce, in the order in which they leave."""
    sizes: list[int] = []
    real = dist.all_reduce

    def counted(tensor: Tensor, *arguments: object, **keys: object) -> object:
        sizes.append(tensor.numel())
        return real(tensor, *arguments, **keys)

    dist.all_reduce = counted
    try:
        yield sizes
    finally:
        dist.all_reduce = real


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(WIDTHS)))


def reducer_of(model: nn.Module, bucket_bytes: int) -> GradientReducer:
    whole, data.BUCKET_BYTES = data.BUCKET_BYTES, bucket_bytes
    try:
        return GradientReducer(model.parameters(), dist.group.WORLD)
    finally:
        data.BUCKET_BYTES = whole


def inputs(rank: int, microbatch: int) -> Tensor:
    return torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(10 * rank + microbatch))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def train_steps(world: World, bucket_bytes: int) -> list[tuple[list[list[float]], list[int]]]:
    """Gradients and sizes sent, of two steps of two microbatches each."""
    model = layers()
    reducer = reducer_of(model, bucket_bytes)
    steps = []
    for step in range(2):
        model.zero_grad(set_to_none=True)
        with sent() as sizes:
            model(inputs(world.rank, 2 * step)).square().sum().backward()
            assert sizes == [], "before the last microbatch nothing travels"
            reducer.arm()
            model(inputs(world.rank, 2 * step + 1)).square().sum().backward()
            reducer.finish()
        steps.append(([gradient.flatten().tolist() for gradient in gradients(model)], sizes))
    return steps


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [ONE_BUCKET, 100, A_BUCKET_EACH])
def test_every_rank_holds_the_sum_over_ranks_and_microbatches(workers, size, bucket_bytes):
    for found in workers.run(size, train_steps, bucket_bytes):
        for step, (summed, _) in enumerate(found):
            model = layers()
            for rank in range(size):
                for microbatch in (2 * step, 2 * step + 1):
                    model(inputs(rank, microbatch)).square().sum().backward()
            for ours, expected in zip(summed, gradients(model), strict=True):
                assert ours == pytest.approx(expected.flatten().tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(ONE_BUCKET, 1), (A_BUCKET_EACH, 2 * (len(WIDTHS) - 1))])
def test_each_gradient_travels_once_a_step(workers, bucket_bytes, messages):
    values = sum(parameter.numel() for parameter in layers().parameters())
    for found in workers.run(2, train_steps, bucket_bytes):
        for _, sizes in found:
            assert sum(sizes) == values and len(sizes) == messages


def test_bytes_per_step_are_the_bytes_that_are_sent(workers):
    for said, found in workers.run(2, bytes_said_and_sent):
        assert said == found == 4 * (3 * 5 + 5 + 5 * 7 + 7 + 7 * 2 + 2)


def bytes_said_and_sent(world: World) -> tuple[int, int]:
    model = layers()
    reducer = reducer_of(model, 100)
    with sent() as sizes:
        reducer.arm()
        model(inputs(world.rank, 0)).sum().backward()
        reducer.finish()
    return reducer.bytes_per_step, 4 * sum(sizes)


def test_the_first_bucket_leaves_before_backward_has_reached_the_first_layer(workers):
    assert workers.run(2, sent_when_backward_reaches_the_first_layer) == [[2, 14]] * 2


def sent_when_backward_reaches_the_first_layer(world: World) -> list[int]:
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2))
    reducer = reducer_of(model, A_BUCKET_EACH)
    so_far: list[int] = []
    with sent() as sizes:
        # Backward computes this gradient on its way to the first layer, whose own come after it.
        model[0].register_full_backward_pre_hook(lambda *_: so_far.extend(sizes))
        reducer.arm()
        model(inputs(world.rank, 0)).sum().backward()
        reducer.finish()
    return so_far


class Branches(nn.Module):
    """Two layers side by side; which of them backward reaches first differs between even and odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4, bias=False), nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        parts = [self.left, self.right] if rank % 2 else [self.right, self.left]
        return sum((part(x).sum() for part in parts), start=torch.zeros(()))


def test_the_order_of_the_messages_is_the_same_on_all_ranks_whichever_gradient_is_ready_first(workers):
    orders, ready = zip(*workers.run(2, order_of_messages), strict=True)
    assert ready[0] != ready[1]
    assert orders[0] == orders[1] == [15, 12]


def order_of_messages(world: World) -> tuple[list[int], list[int]]:
    model, ready = Branches(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: ready.append(p.numel()))
    reducer = reducer_of(model, A_BUCKET_EACH)
    with sent() as sizes:
        reducer.arm()
        model(inputs(world.rank, 0), world.rank).backward()
        reducer.finish()
    return sizes, ready


def test_one_replica_sends_nothing(workers):
    assert workers.run(1, train_steps_of_one) == [0]
    assert GradientReducer(layers().parameters(), None).bytes_per_step == 0


def train_steps_of_one(world: World) -> int:
    return sum(len(sizes) for _, sizes in train_steps(world, A_BUCKET_EACH))
