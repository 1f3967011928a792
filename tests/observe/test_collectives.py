"""Collectives are counted whoever asks for them, and torch is as it was afterwards. (Bytes of whole steps, on every
axis, are compared with `wire` in tests/parallel/test_accounting.py.)
"""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from argosy.observe.collectives import FUNCTIONAL, METHODS, CommunicationMeter, sequence_numbers
from argosy.parallel.tensor import gather_sequence
from argosy.parallel.world import World
from wire_counter import WireCounter
from workers import WorkerPool

LATE_S = 0.3


def meter(node_of_rank=lambda rank: 0) -> CommunicationMeter:
    return CommunicationMeter({}, node_of_rank, torch.device("cpu"))


def gathered(x: torch.Tensor) -> None:
    gather_sequence(x.view(1, 10, 100).requires_grad_(), dist.group.WORLD).sum().backward()


MESSAGES = {
    "gather": lambda x: dist.gather(x, [torch.empty_like(x) for _ in range(2)] if dist.get_rank() == 0 else None),
    "scatter": lambda x: dist.scatter(torch.empty_like(x), [x, x] if dist.get_rank() == 0 else None),
    "reduce": lambda x: dist.reduce(x, 0),
    "broadcast": lambda x: dist.broadcast(x, 1),
    "uneven": lambda x: dist.all_to_all_single(
        x.new_empty((400, 600)[dist.get_rank()] * 2), x, [(400, 600)[dist.get_rank()]] * 2, [400, 600]
    ),
    "lists": lambda x: dist.all_gather([torch.empty_like(x) for _ in range(2)], x),
    "backward": gathered,
    "functional": lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)),
    "functional, uneven": lambda x: functional.wait_tensor(
        functional.all_to_all_single(x, [(400, 600)[dist.get_rank()]] * 2, [400, 600], dist.group.WORLD)
    ),
}


def count_both(world: World) -> dict[str, tuple[float, float]]:
    """What the meter and `wire` count of each of MESSAGES."""
    found = {}
    for name, message in MESSAGES.items():
        with meter() as metered, WireCounter({}) as wire:
            message(torch.ones(1000))
        found[name] = sum(sent for _, sent in metered.lap()["world"].values()), sum(wire.values())
    return found


def test_bytes_are_those_that_wire_counts(workers):
    for rank, found in enumerate(workers.run(2, count_both)):
        for name, (metered, wire) in found.items():
            assert metered == wire, (rank, name)


def count_compiled(world: World) -> list[dict[str, dict[str, list[float]]]]:
    def twice_gathered(x: torch.Tensor) -> torch.Tensor:
        return gather_sequence(2 * x, dist.group.WORLD).sum()

    compiled = torch.compile(twice_gathered, backend="aot_eager")
    x = torch.ones(1, 10, 100, requires_grad=True)
    laps = []
    with meter() as metered:
        compiled(x).backward()
        for function in (twice_gathered, compiled):
            metered.lap()
            function(x).backward()
            laps.append(metered.lap())
    return laps


def test_compiled_code_counts_as_eager_code_does(workers):
    for eager, compiled in workers.run(2, count_compiled):
        assert eager["world"]["node"][1] == compiled["world"]["node"][1] == 8000
        assert compiled["world"]["node"][0] > 0


def wait_for_the_late_one(world: World) -> dict[str, tuple[float, float]]:
    def late(message) -> float:
        world.barrier()
        metered.lap()
        if world.rank == 1:
            time.sleep(LATE_S)
        message()
        return metered.lap()["world"]["network"][0]

    def asynchronous() -> None:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        time.sleep(2 * LATE_S)  # it arrives meanwhile: a flight is no wait
        work.wait()

    with meter(lambda rank: rank) as metered:
        return {
            "at once": late(lambda: dist.all_reduce(torch.ones(10))),
            "later": late(asynchronous),
            "barrier": late(dist.barrier),
        }


def test_seconds_are_those_of_the_wait_not_of_the_flight(workers):
    waits, does_not = workers.run(2, wait_for_the_late_one)
    assert min(waits["at once"], waits["barrier"]) > 0.8 * LATE_S
    assert waits["later"] < 0.5 * LATE_S
    assert max(does_not["at once"], does_not["barrier"]) < 0.5 * LATE_S


def lap_of_two_groups(world: World) -> dict[str, dict[str, list[float]]]:
    pair = [rank for rank in range(4) if rank // 2 == world.rank // 2]
    group = next(
        g for g in [dist.new_group([0, 1]), dist.new_group([2, 3])] if g is not dist.GroupMember.NON_GROUP_MEMBER
    )
    axes = {group.group_name: "tp"}
    with CommunicationMeter(axes, lambda rank: rank // 2, world.device) as metered:
        dist.all_reduce(torch.ones(100), group=group)
        dist.all_reduce(torch.ones(100))
        assert dist.get_process_group_ranks(group) == pair
        return metered.lap()


def test_a_group_within_a_machine_is_told_from_one_that_crosses_machines(workers):
    for found in workers.run(4, lap_of_two_groups):
        assert {axis: {tier: sent for tier, (_, sent) in tiers.items()} for axis, tiers in found.items()} == {
            "tp": {"node": 400},
            "world": {"network": 600},
        }


def test_torch_is_as_it_was_afterwards():
    before = [vars(dist.ProcessGroup).get(name) for name in METHODS]
    operators = [getattr(torch.ops._c10d_functional, name).default._op for name in FUNCTIONAL]
    outer, inner = meter(), meter()
    with outer:
        assert [vars(dist.ProcessGroup).get(name) for name in METHODS] != before
        with inner:
            pass
        outer.close()
    assert [vars(dist.ProcessGroup).get(name) for name in METHODS] == before
    assert [getattr(torch.ops._c10d_functional, name).default._op for name in FUNCTIONAL] == operators


def _counts(world: World) -> list[dict[str, int]]:
    """Before, and while rank 0 waits for rank 1 in one more all-reduce of a second group."""
    pair = dist.new_group([0, 1], group_desc="pair")
    dist.all_reduce(torch.ones(2))
    before = sequence_numbers()
    seen: list[dict[str, int]] = []

    if world.rank == 0:
        thread = threading.Thread(target=lambda: (time.sleep(0.3), seen.append(sequence_numbers())))
        thread.start()
        dist.all_reduce(torch.ones(2), group=pair)
        thread.join()
    else:
        seen.append(sequence_numbers())
        time.sleep(0.6)
        dist.all_reduce(torch.ones(2), group=pair)
    return [before, *seen]


def test_a_rank_that_others_wait_for_has_begun_fewer_collectives(workers: WorkerPool) -> None:
    (before, waiting), (_, late) = workers.run(2, _counts)
    names = sorted(before)
    assert len(names) == 2 and names[0].startswith("default_pg#") and names[1].startswith("pair#")
    world, pair = names
    assert waiting[world] == late[world] >= 1
    assert waiting[pair] == late[pair] + 1
