"""Bytes are counted where they are handed to torch, whoever hands them: by hand, autograd, DTensor, our operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from argosy.observe.wire import COLLECTIVES
from argosy.parallel.mesh import lay_out_meshes
from argosy.parallel.tensor import gather_sequence
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.sync.compressor import all_gather_single, reduce_scatter_single
from wire_counter import WireCounter

N = 4
X = 4000
"""Bytes of what each rank starts from."""
SPLITS = [100, 200, 300, 400]


def uneven_all_to_all(x: torch.Tensor) -> None:
    mine = SPLITS[dist.get_rank()]
    dist.all_to_all_single(x.new_empty(N * mine), x, [mine] * N, SPLITS)


def ring(x: torch.Tensor) -> None:
    after, before = (dist.get_rank() + 1) % N, (dist.get_rank() - 1) % N
    received = torch.empty_like(x)
    ways = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(ways):
        work.wait()


def gathered_with_gradient(x: torch.Tensor) -> None:
    gather_sequence(x.view(1, 10, 100).requires_grad_(), dist.group.WORLD).sum().backward()


def gathered_by_dtensor(x: torch.Tensor) -> None:
    DTensor.from_local(x, init_device_mesh("cpu", (N,)), [Shard(0)]).full_tensor()


MESSAGES: dict[str, tuple[Callable[[torch.Tensor], object], dict[str, float]]] = {
    "all-reduce": (dist.all_reduce, {"all_reduce": 2 * 3 / 4 * X}),
    "all-gather": (lambda x: all_gather_single(x.new_empty(N * len(x)), x), {"all_gather": 3 * X}),
    "all-gather, list": (lambda x: dist.all_gather([torch.empty_like(x) for _ in range(N)], x), {"all_gather": 3 * X}),
    "reduce-scatter": (lambda x: reduce_scatter_single(x.new_empty(250), x), {"reduce_scatter": 3 / 4 * X}),
    "reduce-scatter, list": (
        lambda x: dist.reduce_scatter(x.new_empty(250), list(x.split(250))),
        {"reduce_scatter": 3 / 4 * X},
    ),
    "all-to-all": (lambda x: dist.all_to_all_single(torch.empty_like(x), x), {"all_to_all": 3 / 4 * X}),
    "ring": (ring, {"send": X}),
    "broadcast": (lambda x: dist.broadcast(x, 0), {"broadcast": 3 / 4 * X}),
    "barrier": (lambda x: dist.barrier(), {}),
    "functional": (
        lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)),
        {"all_reduce": 2 * 3 / 4 * X},
    ),
    "backward": (gathered_with_gradient, {"all_gather": 3 * X, "reduce_scatter": 3 * X}),
    "DTensor": (gathered_by_dtensor, {"all_gather": 3 * X}),
}


def send(world: World) -> dict[str, dict[tuple[str, str], int]]:
    """What is counted of each of MESSAGES, and of one whose parts are uneven."""
    found = {}
    for name, (message, _) in {**MESSAGES, "uneven": (uneven_all_to_all, {})}.items():
        with WireCounter({}) as counts:
            message(torch.ones(1000))
        found[name] = dict(counts)
    return found


def test_a_message_counts_as_what_a_rank_of_a_ring_sends(workers):
    for rank, found in enumerate(workers.run(N, send)):
        for name, (_, expected) in MESSAGES.items():
            assert found[name] == {("world", kind): size for kind, size in expected.items()}, name
        assert found["uneven"] == {("world", "all_to_all"): X - 4 * SPLITS[rank]}


def send_along(world: World, plan: str, axes: list[str]) -> set[tuple[str, str]]:
    """The axes that are counted when a message is sent along each of `axes`, to all ranks, and to half of them."""
    meshes = lay_out_meshes("cpu", Plan.parse(plan), tied_ends=False, timeout_s=60)
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    with WireCounter(meshes.axis_of_groups()) as counts:
        for group in (*(meshes.group(axis) for axis in axes), dist.group.WORLD, halves[world.rank // 2]):
            dist.all_reduce(torch.ones(8), group=group)
    return set(counts)


@pytest.mark.parametrize(
    ("plan", "axes", "counted"),
    [
        ("dp_shard=2,tp=2", ["tp", "shard"], {"tp", "shard", "world", "other"}),
        ("pp=2,dp_shard=2,zero=0", ["pp", "replicate"], {"pp", "replicate", "world", "other"}),
        ("tp=4", ["tp"], {"tp", "other"}),
        ("cp=4", ["cp", "shard"], {"cp", "other"}),
        ("dp_shard=4,ep=2", ["shard", "ep", "expert_shard"], {"shard", "ep", "expert_shard", "other"}),
    ],
)
def test_messages_are_told_apart_by_axis_unless_an_axis_is_the_world(workers, plan, axes, counted):
    for found in workers.run(N, send_along, plan, axes):
        assert found == {(axis, "all_reduce") for axis in counted}


def test_every_collective_of_torch_is_known():
    operators = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")}
    assert {name.removeprefix("c10d::") for name in operators} <= set(COLLECTIVES)
