"""A world that is to end, in order, leaves a state behind that costs no step; copies in memory pick their interval."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint.memory import FOLDER, NODE, memory_checkpoints_in
from argosy.config.schema import RunConfig
from argosy.observe.events import read_lines
from argosy.observe.heartbeat import Heartbeat, read_heartbeat
from argosy.parallel.world import World
from argosy.training.loop import train
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal, WorldIsOver
from tiny import eager, run_config
from workers import next_world


class HoldsAt(StopSignal):
    """It is heard before the given step that the world is to end; when all stand, it does."""

    def __init__(self, step: int):
        super().__init__()
        self._left = step

    def check(self) -> None:
        self.is_to_hold |= self._left == 0
        self._left -= 1  # it is asked before the first step, and after each

    def hold(self, seconds: float) -> None:
        raise WorldIsOver


def held(world: World, run: RunConfig, plan: str, folder: Path) -> tuple[int, str]:
    """One rank hears that all are to hold; in the next world the other rank's process is a new one.

    Returns what the first world showed that it could go back to, and the last phase.
    """
    memory = folder / f"memory-{world.rank}"
    memory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NODE, f"node-{world.rank}")
        patch.setenv(FOLDER, str(memory))
        survivor, heartbeat = Survivor(), Heartbeat(folder)
        heartbeat.join(1, world.rank, dict)
        with suppress(WorldIsOver):
            train(run, eager(plan), world, folder / "run", HoldsAt(4 if world.rank == 1 else -1), survivor, heartbeat)
        shown = read_heartbeat(heartbeat.path)
        heartbeat.close()
        world = next_world(world, folder / "store")
        train(run, eager(plan), world, folder / "run", StopSignal(), Survivor() if world.rank == 1 else survivor)
    assert shown is not None
    return shown.safe_step, shown.phase


@pytest.mark.parametrize(
    ("plan", "source", "safe"), [("dp_replicate=2", "live", -1), ("dp_shard=2,zero=1", "memory", 5)]
)
def test_no_step_is_lost_by_a_world_that_ends_in_order(workers, corpus, tmp_path, plan, source, safe):
    keys = {"memory_checkpoint_every_steps": 100}
    run = run_config(corpus, evaluate={"every_steps": 0, "tokens": 600}, resilience=keys)
    assert workers.run(2, held, run, plan, tmp_path) == [(safe, "waiting")] * 2
    events = read_lines(tmp_path / "run" / "events" / "rank-0.jsonl")
    recovered = [(e["source"], e["step"], e["steps_lost"]) for e in events if e["event"] == "recovered"]
    assert recovered == [(source, 5, 0)]


def copying(world: World, run: RunConfig, folder: Path) -> list[int]:
    """Steps of the copies that are in this rank's memory when the run has ended."""
    memory = folder / f"memory-{world.rank}"
    memory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NODE, f"node-{world.rank}")
        patch.setenv(FOLDER, str(memory))
        train(run, eager("dp_shard=2,zero=1"), world, folder / "run", StopSignal())
    return [copy.step for copy in memory_checkpoints_in(memory)]


def test_all_ranks_copy_at_the_steps_that_one_of_them_picks_and_says_why(workers, corpus, tmp_path):
    run = run_config(corpus, evaluate={"every_steps": 0, "tokens": 600}, train={"steps": 20})
    assert run.resilience.memory_checkpoint_every_steps == "auto"
    first, second = workers.run(2, copying, run, tmp_path)
    assert first and sorted(first) == sorted(second)
    told: list[dict[str, Any]] = read_lines(tmp_path / "run" / "events" / "rank-0.jsonl")
    chosen = [e for e in told if e["event"] == "memory_checkpoint_interval"]
    assert chosen and all(e["steps"] >= 1 and e["copy_s"] > 0 and e["mtbf_s"] > 0 for e in chosen)


def test_who_holds_goes_on_when_a_signal_comes_or_nobody_ends_the_world():
    stop, began = StopSignal(), time.monotonic()
    stop.is_to_hold = True
    stop.hold(0.05)
    assert time.monotonic() - began >= 0.05 and not stop.is_to_hold
    threading.Timer(0.05, lambda: setattr(stop, "number", 15)).start()
    stop.hold(60.0)
    stop.number, stop.world_is_over = None, True
    with pytest.raises(WorldIsOver):
        stop.hold(60.0)
