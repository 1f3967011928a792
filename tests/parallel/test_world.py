"""The processes of a run, and their places in the mesh."""

from __future__ import annotations

import os

import pytest
import torch

from argosy.config.schema import LaunchConfig
from argosy.parallel.world import World, lay_out, threads_per_process
from argosy.plan.plan import Plan


def test_a_world_of_one_needs_no_process_group_and_its_collectives_do_nothing():
    alone = lay_out(World(), Plan())
    alone.barrier()
    assert alone.sum(torch.tensor([2.0, 3.0])).tolist() == [2.0, 3.0]
    assert (alone.is_first, alone.dp_rank, alone.group("dp_replicate")) == (True, 0, None)


def place(world: World, plan: Plan) -> tuple[bool, int, list[int]]:
    world = lay_out(world, plan)
    sizes = [world.group(axis).size() for axis in ("pp", "dp_replicate", "dp_shard", "tp")]
    return world.is_first, world.dp_rank, sizes


@pytest.mark.parametrize(
    ("plan", "dp_ranks"),
    [
        (Plan(dp_replicate=4), [0, 1, 2, 3]),
        (Plan(dp_replicate=2, dp_shard=2), [0, 1, 2, 3]),
        (Plan(dp_replicate=2, tp=2), [0, 0, 1, 1]),
        (Plan(pp=2, dp_shard=2), [0, 1, 0, 1]),
    ],
    ids=str,
)
def test_ranks_read_other_samples_only_along_the_data_axes(workers, plan, dp_ranks):
    firsts, found, sizes = zip(*workers.run(4, place, plan), strict=True)
    assert list(found) == dp_ranks
    assert firsts == (True, False, False, False)
    assert set(map(tuple, sizes)) == {(plan.pp, plan.dp_replicate, plan.dp_shard, plan.tp)}


def test_a_sum_is_over_all_processes(workers):
    assert workers.run(3, sum_of_ranks) == [3.0] * 3


def sum_of_ranks(world: World) -> float:
    return world.sum(torch.tensor(float(world.rank))).item()


def test_threads_are_what_the_user_says_or_an_equal_share_of_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(LaunchConfig(threads=3), 100) == 3
    assert threads_per_process(LaunchConfig(), 1) == cores
    assert threads_per_process(LaunchConfig(), 10 * cores) == 1
