"""The connections of a world of processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from argosy.parallel.connections import Connections
from argosy.parallel.world import World
from workers import next_world

TURNS = 8
"""Where connections are closed when they are broken off, somebody does not wake up in one of three."""


def test_whoever_waits_for_others_wakes_up_when_all_break_off(workers, tmp_path):
    assert workers.run(4, break_off_amid_sums, tmp_path) == [TURNS] * 4


def test_groups_that_wait_on_devices_are_aborted_once_each(workers, tmp_path):
    """As on GPUs, with gloo in their place: all of the world's groups, and whoever waits in one wakes up."""
    assert workers.run(2, break_off_groups, tmp_path) == [None] * 2


def break_off_groups(world: World, folder: Path) -> None:
    connections, aborted = Connections(aborted=["gloo"]), list[str]()
    real = dist.ProcessGroup.abort

    def noted(group: dist.ProcessGroup) -> None:
        aborted.append(group.group_name)
        real(group)

    world = next_world(world, folder / "store")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    groups = [dist.group.WORLD, dist.new_group([0, 1]), *mesh.get_all_groups()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "abort", noted)
        for _ in range(2):
            connections.break_off()
            assert connections._aborting is not None
            connections._aborting.join()
    assert sorted(set(aborted)) == sorted(aborted) and {group.group_name for group in groups} <= set(aborted)
    with pytest.raises(RuntimeError):
        while True:
            world.sum(torch.ones(1))
    next_world(world, folder / "end")
    connections.close()


def test_gloo_s_groups_are_left_to_the_end_of_their_connections(workers, tmp_path):
    assert workers.run(2, groups_that_are_aborted, tmp_path) == [None] * 2


def groups_that_are_aborted(world: World, folder: Path) -> object:
    connections = Connections()
    world = next_world(world, folder / "store")
    connections.break_off()
    next_world(world, folder / "end")
    connections.close()
    return connections._aborting


def break_off_amid_sums(world: World, folder: Path) -> int:
    connections = Connections()
    for turn in range(TURNS):
        world = next_world(world, folder / str(turn))
        connections.close()
        breaking = threading.Timer(0.01, connections.break_off)
        breaking.start()
        with pytest.raises(RuntimeError):
            while True:
                world.sum(torch.ones(1))
        breaking.join()  # the others may have broken off first: the next world's connections are not meant
    next_world(world, folder / "end")  # once all are there, all have left the last world that was broken off
    connections.close()
    return turn + 1
