"""However a process leaves its world, the next one goes on from its state."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from argosy.checkpoint.memory import FOLDER, NODE
from argosy.config.schema import RunConfig
from argosy.errors import StorageError
from argosy.observe.events import read_lines
from argosy.observe.heartbeat import Heartbeat, read_heartbeat
from argosy.parallel.world import World
from argosy.training.checkpointer import Checkpointer
from argosy.training.loop import train
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal, WorldIsOver
from tiny import OverAfter, eager, run_config, train_in
from workers import next_world


class HoldsAt(StopSignal):
    """The order to hold comes before the given step; once all ranks hold, the world is over."""

    def __init__(self, step: int):
        super().__init__()
        self._left = step

    def between_steps(self) -> None:
        self.is_to_hold |= self._left == 0
        self._left -= 1  # called before the first step, and after each

    def hold(self, seconds: float) -> None:
        raise WorldIsOver


def held(world: World, run: RunConfig, plan: str, folder: Path) -> tuple[int, str]:
    """One rank is told that all are to hold; in the next world the other rank's process is a new one.

    Returns the step that the first world showed as safe, and its last phase.
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


def test_a_state_that_cannot_be_saved_at_the_end_ends_the_run_with_what_to_do(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpointer, "finish", lambda self, state: "[Errno 28] No space left on device")
    with pytest.raises(StorageError, match=r"after step 8 could not be saved \(.*No space left.*\)\. Mend that"):
        train_in(World(), run_config(corpus, evaluate={"every_steps": 0}), eager(""), tmp_path)
    assert not (tmp_path / "report.json").exists()


def test_a_world_that_breaks_off_leaves_its_state_and_no_thread_behind(corpus, tmp_path):
    run = run_config(corpus, evaluate={"every_steps": 0})
    before, survivor = set(threading.enumerate()), Survivor()
    with pytest.raises(WorldIsOver):
        train(run, eager(""), World(), tmp_path, OverAfter(3), survivor)
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)  # it was told to end, and may be at its last line
        assert not thread.is_alive(), thread.name
    assert survivor.state is not None and survivor.state.step == 3 and survivor.bad_steps is not None
