"""In-memory checkpoints: on two nodes, whole or refused, the last one kept until all ranks have the next."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.boxes import Box
from argosy.checkpoint.history import History, Position
from argosy.checkpoint.memory import (
    MEMORY_VARIABLE,
    NODE_VARIABLE,
    MemoryCheckpointer,
    Placement,
    memory_checkpoints_in,
    memory_folder,
    node_name,
    place,
)
from argosy.checkpoint.shards import wholes
from argosy.parallel.peers import Peers, together
from argosy.parallel.world import World

ALONE = World()
HISTORY = History().next("abc", 0)


def box(name: str, size: int = 4) -> Box:
    return Box(name, "float32", (size,), (0,), (size,))


def state(step: int, rank: int = 0) -> dict[Box, torch.Tensor]:
    """Something of each rank's own."""
    return wholes({"weight": torch.full((1000,), float(step)), "bias": torch.arange(7.0)}, f"rank{rank}.")


def found(folder: Path) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """(step, rank) -> what its file holds; each must be whole."""
    found = {}
    for saved in memory_checkpoints_in(folder):
        assert saved.is_whole()
        found[saved.step, saved.rank] = {b.name: saved.file.read(b, b).clone() for b in saved.file.boxes}
    return found


def expected(step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    return {b.name: tensor for b, tensor in state(step, rank).items()}


# Placement


def placed(nodes: Sequence[str], held: Sequence[Sequence[Box]], may_hang: bool = False) -> list[Placement]:
    """By rank, what it does."""
    ranks = enumerate(zip(nodes, held, strict=True))
    return together([place(Peers(rank, len(nodes)), node, boxes, may_hang) for rank, (node, boxes) in ranks])


def names(placements: Sequence[Placement]) -> list[list[str]]:
    return [sorted(b.name for b in some.kept) for some in placements]


def test_what_live_replicas_on_two_nodes_hold_is_not_copied():
    everything = [box("a"), box("b")]
    assert placed(["x", "y"], [everything] * 2) == [Placement()] * 2
    assert placed(["x", "x", "y", "y"], [everything[:1], everything[1:]] * 2) == [Placement()] * 4


def test_replicas_that_a_lost_device_may_hold_up_are_copied_all_the_same():
    everything = [box("a"), box("b")]
    found = placed(["x", "y"], [everything] * 2, may_hang=True)
    assert names(found) == [["a"], ["b"]] and all(some.is_needed for some in found)


def test_if_one_box_has_no_replica_on_another_node_all_are_copied_since_going_back_takes_all():
    found = placed(["x", "y"], [[box("both"), box("mine")], [box("both")]])
    assert sorted(chain(*names(found))) == ["both", "mine"] and all(some.is_needed for some in found)


def test_a_random_generator_is_no_reason_to_save_in_memory():
    assert placed(["x", "y"], [[box("a"), box(f"rng.rank{rank}")] for rank in range(2)]) == [Placement()] * 2


def test_replicas_on_one_node_share_the_work_of_saving():
    everything = [box("large", 8), box("a"), box("b")]
    assert names(placed(["x"] * 2, [everything] * 2)) == [["large"], ["a", "b"]]


@pytest.mark.parametrize(
    ("nodes", "mirror"),
    [
        ("x", (None,)),
        ("xx", (None, None)),
        ("xy", (1, 0)),
        ("xxyy", (2, 3, 0, 1)),
        ("xxyyzz", (2, 3, 4, 5, 0, 1)),
        ("xxxy", (3, 3, 3, 0)),
        ("xyxy", (1, 0, 3, 2)),
    ],
)
def test_the_mirror_is_on_the_next_node_in_the_ring(nodes, mirror):
    found = placed(nodes, [[box(f"of{rank}")] for rank in range(len(nodes))])
    assert tuple(some.mirror for some in found) == mirror
    for rank, some in enumerate(found):
        assert some.guests == tuple(other for other, at in enumerate(mirror) if at == rank)


def test_the_environment_names_folder_and_node(monkeypatch):
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    assert memory_folder() is None
    monkeypatch.setenv(MEMORY_VARIABLE, "/dev/shm/somewhere")
    monkeypatch.setenv(NODE_VARIABLE, "n7")
    assert (memory_folder(), node_name()) == (Path("/dev/shm/somewhere"), "n7")


# One rank


def checkpointer(folder: Path, world: World = ALONE, history: History = HISTORY) -> MemoryCheckpointer:
    return MemoryCheckpointer(folder, list(state(0, world.rank)), world, history, refuse)


def refuse(problem: str) -> None:
    raise AssertionError(problem)


def save(saving: MemoryCheckpointer, *steps: int) -> None:
    for step in steps:
        saving.save(Position(step, step * 100, ((3, 5),)), state(step))
    saving.wait()


def test_the_two_newest_are_kept(tmp_path):
    saving = checkpointer(tmp_path)
    save(saving, 10)
    assert found(tmp_path).keys() == {(10, 0)}
    save(saving, 20, 30, 40)
    torch.testing.assert_close(found(tmp_path), {(step, 0): expected(step) for step in (30, 40)})
    assert saving.step == 40


def test_an_in_memory_checkpoint_knows_where_in_which_run_it_stands(tmp_path):
    save(checkpointer(tmp_path), 10)
    (saved,) = memory_checkpoints_in(tmp_path)
    assert saved.state == (Position(10, 1000, ((3, 5),)), HISTORY)


def test_where_there_can_be_no_more_threads_training_waits_for_it(tmp_path, monkeypatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    saving = checkpointer(tmp_path)
    saving.save(Position(3, 0), state(3))
    assert saving.step == 3 and found(tmp_path).keys() == {(3, 0)}
    saving.abandon()


def test_what_training_does_after_the_call_is_not_in_the_checkpoint(tmp_path):
    saving, live = checkpointer(tmp_path), state(10)
    saving.save(Position(10, 0), live)
    for tensor in live.values():
        tensor.zero_()
    saving.wait()
    torch.testing.assert_close(found(tmp_path), {(10, 0): expected(10)})


def test_an_in_memory_checkpoint_with_a_flipped_bit_is_refused(tmp_path):
    save(checkpointer(tmp_path), 10, 20)
    path = memory_checkpoints_in(tmp_path)[1].path
    data = bytearray(path.read_bytes())
    for place_of_bit in (0, 20, len(data) // 2, len(data) - 1):
        data[place_of_bit] ^= 16
        path.write_bytes(data)
        assert [saved.is_whole() for saved in memory_checkpoints_in(tmp_path)] == [True, False]
        data[place_of_bit] ^= 16


def test_other_files_are_not_taken_for_in_memory_checkpoints(tmp_path):
    save(checkpointer(tmp_path), 10)
    (tmp_path / "abc.00000.partial").write_bytes(b"half of somethi")
    (tmp_path / "notes.txt").write_text("of somebody else")
    (tmp_path / "abc.00000020.00000.00000000").write_bytes(b"renamed")
    assert [(saved.step, saved.is_whole(), saved.state is None) for saved in memory_checkpoints_in(tmp_path)] == [
        (10, True, False),
        (20, False, True),
    ]
    assert memory_checkpoints_in(tmp_path / "nowhere") == memory_checkpoints_in(None) == []


def test_a_process_killed_at_any_moment_leaves_a_whole_one_and_nothing_that_only_looks_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        saving = context.Process(target=save_for_ever, args=(folder,))
        saving.start()
        while not memory_checkpoints_in(folder):
            assert saving.is_alive()
        time.sleep(0.0015 * attempt)
        saving.kill()
        saving.join()
        whole = found(folder)
        assert whole
        torch.testing.assert_close(whole, {key: expected(*key) for key in whole})


def save_for_ever(folder: Path) -> None:
    saving = checkpointer(folder)
    for step in range(10_000):
        save(saving, step)


def test_without_room_nothing_more_is_saved_and_the_last_one_stays(tmp_path, monkeypatch):
    problems: list[str] = []
    saving = MemoryCheckpointer(tmp_path, list(state(0)), ALONE, HISTORY, problems.append)
    save(saving, 10)
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    save(saving, 20)
    assert problems == ["[Errno 28] no room; no more in-memory checkpoints are saved in this world"]
    assert not saving.is_on
    save(saving, 30)
    torch.testing.assert_close(found(tmp_path), {(10, 0): expected(10)})


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "no room")


def no_room_after(files: int) -> Callable[..., None]:
    """In place of os.posix_fallocate: there is room for so many files."""
    left = [None] * files
    return lambda *_: left.pop() if left else no_room()


def test_those_of_the_world_before_go_once_there_is_a_newer_one(tmp_path):
    save(checkpointer(tmp_path), 10, 20)
    saving = checkpointer(tmp_path, history=HISTORY.next("def", 20))
    assert found(tmp_path).keys() == {(10, 0), (20, 0)}
    save(saving, 30)
    assert found(tmp_path).keys() == {(30, 0)}


# Several ranks


def save_together(world: World, folder: Path, nodes: list[str], full: str = "") -> tuple[Any, ...]:
    """Save three times on these nodes, each with a folder of its own.

    The last node has no room for the third file, its own or its guest's, as `full` says ("own", "guest").
    """
    problems: list[str] = []
    node = folder / nodes[world.rank]
    node.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NODE_VARIABLE, nodes[world.rank])
        saving = MemoryCheckpointer(node, list(state(0, world.rank)), world, HISTORY, problems.append)
        for step in (10, 20, 30):
            if full and world.rank == world.size - 1 and step == 30:
                patch.setattr(os, "posix_fallocate", no_room_after(files=0 if full == "own" else 1))
            saving.save(Position(step, 0), state(step, world.rank))
            saving.wait()
    return saving.step, saving.is_on, problems


def test_each_node_mirrors_the_one_before_it(workers, tmp_path):
    answers = workers.run(3, save_together, tmp_path, ["x", "y", "z"])
    assert answers == [(30, True, [])] * 3
    for node, ranks in {"x": (0, 2), "y": (1, 0), "z": (2, 1)}.items():
        torch.testing.assert_close(
            found(tmp_path / node), {(step, rank): expected(step, rank) for step in (20, 30) for rank in ranks}
        )


@pytest.mark.parametrize("full", ["own", "guest"])
def test_if_one_node_has_no_room_all_ranks_stop_at_the_same_step(workers, tmp_path, full):
    answers = workers.run(2, save_together, tmp_path, ["x", "y"], full)
    assert answers == [(20, False, ["[Errno 28] no room; no more in-memory checkpoints are saved in this world"])] * 2
    for node in "xy":
        assert {(20, 0), (20, 1)} <= found(tmp_path / node).keys() <= {(10, 0), (10, 1), (20, 0), (20, 1)}
