"""The processes of a run."""

from __future__ import annotations

import datetime
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from argosy.config.launch import LaunchConfig
from argosy.errors import StorageError
from argosy.parallel.encoding import FailedElsewhere, WrongMessage
from argosy.parallel.peers import PeerExchange, Talk, over
from argosy.parallel.world import (
    LAZY,
    Connections,
    World,
    group_in_host_memory,
    leave_world,
    tcp_sockets,
    threads_per_process,
)
from argosy.plan.hardware.local_machine import cores_here
from workers import next_world

TURNS = 8
"""Where connections are closed when they are broken off, somebody does not wake up in one of three."""


def test_whoever_waits_for_others_wakes_up_when_all_break_off(workers, tmp_path):
    assert workers.run(4, break_off_amid_sums, tmp_path) == [TURNS] * 4


def test_groups_that_wait_on_devices_are_aborted_once_each(workers, tmp_path):
    """As on GPUs, with gloo in their place: all of the world's groups, and whoever waits in one wakes up."""
    assert workers.run(2, break_off_groups, tmp_path) == [None] * 2


def aborting() -> list[threading.Thread]:
    """The threads that abort groups now."""
    return [thread for thread in threading.enumerate() if thread.name == "argosy-abort"]


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
            for thread in aborting():
                thread.join()
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
    return aborting() or None


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


def test_a_world_of_one_needs_no_process_group_and_its_collectives_do_nothing():
    alone = World()
    alone.barrier()
    assert alone.sum(torch.tensor([2.0, 3.0])).tolist() == [2.0, 3.0]
    assert alone.is_first


def test_a_sum_is_over_all_processes(workers):
    assert workers.run(3, sum_of_ranks) == [3.0] * 3


def sum_of_ranks(world: World) -> float:
    return world.sum(torch.tensor(float(world.rank))).item()


def test_one_process_speaks_for_the_run(workers):
    assert workers.run(4, is_first) == [True, False, False, False]


def is_first(world: World) -> bool:
    return world.is_first


def test_a_process_may_join_one_world_after_another(workers):
    """DTensor remembers meshes, by shape: it must not use the groups of a world that is gone."""
    for _ in range(3):
        for whole in workers.run(2, gather_in_a_mesh):
            assert whole == [0.0, 0.0, 1.0, 1.0]


def gather_in_a_mesh(world: World) -> list[float]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    part = DTensor.from_local(torch.full((2,), float(world.rank)), mesh, [Replicate(), Shard(0)])
    return part.redistribute(placements=[Replicate(), Replicate()]).to_local().tolist()


def test_caches_that_were_there_before_a_fork_are_emptied_too(workers):
    """A forked process has them from its fork server, where no search of its garbage collector finds them."""
    assert workers.run(1, leave_with_full_caches) == [(1, 0)]


def leave_with_full_caches(world: World) -> tuple[int, int]:
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    gc.freeze()
    MeshTopoInfo.build_from_mesh(init_device_mesh("cpu", (1,)))
    before = MeshTopoInfo.build_from_mesh.cache_info().currsize
    leave_world()
    return before, MeshTopoInfo.build_from_mesh.cache_info().currsize


def test_leaving_a_world_that_was_never_joined_does_nothing():
    leave_world()
    leave_world()


def test_memory_that_ranks_shared_is_not_taken_for_that_of_a_group_of_the_next_world(monkeypatch):
    import torch.distributed._symmetric_memory as symmetric_memory

    monkeypatch.setitem(symmetric_memory._group_name_to_workspace_tensor, "1", torch.zeros(1))
    leave_world()
    assert not symmetric_memory._group_name_to_workspace_tensor


def test_a_world_that_could_not_be_joined_leaves_no_trace_in_the_next():
    """The others would wait in a group of another name."""
    brief = datetime.timedelta(seconds=0.2)
    with pytest.raises(dist.DistError):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=brief)
    leave_world()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.group_name == "0"
    leave_world()


def looked(world: World) -> tuple[int, str]:
    def fail() -> int:
        raise LookupError(f"seen by rank {world.rank}")

    with pytest.raises((LookupError, FailedElsewhere)) as caught:
        world.share_first(fail, int)
    return world.share_first(lambda: 7 + world.rank, int), str(caught.value)


def test_what_the_first_process_finds_or_raises_is_for_all(workers):
    assert workers.run(2, looked) == [(7, "seen by rank 0"), (7, "LookupError: seen by rank 0")]
    assert looked(World()) == (7, "seen by rank 0")


def refused_by_the_first(world: World) -> tuple[str, int]:
    def refuse() -> int:
        raise StorageError(f"rank {world.rank}: full")

    with pytest.raises(StorageError) as caught:
        world.share_first(refuse, int)
    return str(caught.value), caught.value.exit_code


def test_an_error_of_argosy_is_the_same_on_all_processes(workers):
    assert workers.run(2, refused_by_the_first) == [("rank 0: full", 74)] * 2


def gathered(world: World) -> list[list[str]]:
    return world.gather(["x" * 1000 * world.rank], list[str])


def test_what_processes_give_may_be_of_any_length(workers):
    assert workers.run(3, gathered) == [[[""], ["x" * 1000], ["x" * 2000]]] * 3


def gather_unlike(world: World) -> str:
    with pytest.raises(WrongMessage) as caught:
        world.gather(world.rank, int) if world.is_first else world.gather("a", str)
    return str(caught.value)


def test_processes_that_are_at_different_places_find_it_out(workers):
    for problem in workers.run(2, gather_unlike):
        assert "the two ranks are not at the same place" in problem


def test_threads_are_what_the_user_says_or_an_equal_share_of_the_cores():
    cores = cores_here()
    assert threads_per_process(LaunchConfig(threads=3), 100) == 3
    assert threads_per_process(LaunchConfig(), 1) == cores
    assert threads_per_process(LaunchConfig(), 10 * cores) == 1


@pytest.mark.parametrize("size", [2, 4])
def test_a_barrier_holds_all_until_the_last(workers, tmp_path, size):
    assert workers.run(size, files_after_a_barrier, tmp_path) == [size] * size


def files_after_a_barrier(world: World, folder) -> int:
    (folder / str(world.rank)).touch()
    world.barrier()
    return len(list(folder.iterdir()))


def test_beside_gpus_ranks_connect_only_to_those_they_speak_to(workers):
    for lazy, eager in workers.run(8, sockets_of_groups):
        assert lazy < eager


def sockets_of_groups(world: World) -> tuple[int, int]:
    """How many sockets a group of all ranks opens, beside GPUs and beside CPUs, when neighbours have spoken."""
    counts = []
    for device in ("cuda", "cpu"):
        before = len(list(tcp_sockets()))
        group = group_in_host_memory(torch.device(device), 60.0)
        over(group, neighbours(world))
        counts.append(len(list(tcp_sockets())) - before)
        world.barrier()
    assert LAZY not in os.environ
    return counts[0], counts[1]


def neighbours(world: World) -> Talk[None]:
    came = yield PeerExchange((world.rank + 1) % world.size, bytes([world.rank]), (world.rank - 1) % world.size)
    assert came == bytes([(world.rank - 1) % world.size])
