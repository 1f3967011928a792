"""The connections of a world of processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from argosy.parallel.connections import Connections
from argosy.parallel.world import World
from workers import next_world

TURNS = 8
"""Where connections are closed when they are broken off, somebody does not wake up in one of three."""


def test_whoever_waits_for_others_wakes_up_when_all_break_off(workers, tmp_path):
    assert workers.run(4, break_off_amid_sums, tmp_path) == [TURNS] * 4


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
