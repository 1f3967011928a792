"""In-memory checkpoints by their interval; however a process leaves its world, the next goes on from its state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.memory import MEMORY_VARIABLE, NODE_VARIABLE, memory_checkpoints_in
from argosy.config.schema import RunConfig
from argosy.errors import RunFailed, StorageError
from argosy.observe.events import read_lines
from argosy.observe.heartbeat import UNREAD, Heartbeat, read_heartbeat
from argosy.parallel.world import World, tcp_sockets
from argosy.plan.cost.economy import MEMORY_CHECKPOINTS_MAY_COST, memory_checkpoint_interval_s
from argosy.training.bad_steps import MOST_REWINDS
from argosy.training.checkpointer import Checkpointer
from argosy.training.loop import train
from argosy.training.parts import Parts
from argosy.training.saving import MemoryCheckpointPace
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal, WorldIsOver
from argosy.training.trainer import Trainer
from tiny import EAGER, OverAfter, eager, run_config, train_in
from workers import next_world

HOUR = 3600.0


class Told(list[dict[str, Any]]):
    def __call__(self, kind: str, /, **facts: Any) -> None:
        self.append({"event": kind, **facts})


def saves(pace: MemoryCheckpointPace, steps: int, step_s: float, copy_s: float | None) -> list[int]:
    """After which steps checkpoints are saved."""
    found = []
    for done in range(1, steps + 1):
        if pace.is_due(done, step_s, copy_s if found else None):
            pace.saved(done)
            found.append(done)
    return found


def test_a_number_of_steps_is_taken_as_it_is():
    told = Told()
    assert saves(MemoryCheckpointPace(4, HOUR, 1.0, told), 12, 1.0, 5.0) == [4, 8, 12] and not told


def test_the_first_is_saved_at_once_and_the_others_as_its_measure_says():
    told = Told()
    found = saves(MemoryCheckpointPace("auto", 3 * HOUR, 1.0, told), 1000, 2.0, 0.5)
    every = round(memory_checkpoint_interval_s(0.5, 3 * HOUR) / 2.0)
    assert every == pytest.approx((2 * 0.5 * 3 * HOUR) ** 0.5 / 2.0, abs=1), "Young's"
    assert found == list(range(1, 1001, every))
    (event,) = told
    assert event["event"] == "memory_checkpoint_interval" and event["steps"] == every and event["copy_s"] == 0.5


def test_where_failures_are_rare_they_still_cost_a_thousandth_at_most():
    assert memory_checkpoint_interval_s(0.001, 1e9) == pytest.approx(0.001 / MEMORY_CHECKPOINTS_MAY_COST)
    found = saves(MemoryCheckpointPace("auto", 1e9, 1.0, Told()), 500, 0.02, 0.001)
    assert found == list(range(1, 501, 50))


def test_until_one_is_measured_the_prediction_counts():
    pace = MemoryCheckpointPace("auto", 3 * HOUR, 2.0, Told())
    pace.saved(1)
    every = round(memory_checkpoint_interval_s(2.0, 3 * HOUR))
    assert not pace.is_due(every, 1.0, None) and pace.is_due(1 + every, 1.0, None)


def test_the_interval_is_reported_again_when_it_has_changed_much():
    told = Told()
    pace = MemoryCheckpointPace("auto", HOUR, 1.0, told)
    pace.saved(1)
    for copy_s in (1.0, 1.2, 0.9, 9.0, 9.5):
        pace.is_due(2, 1.0, copy_s)
    assert [event["copy_s"] for event in told] == [1.0, 9.0]


def trained(world: World, run: RunConfig, folder: Path) -> list[int]:
    """Steps of the in-memory checkpoints of this rank's node when the run has ended."""
    memory = folder / f"memory-{world.rank}"
    memory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NODE_VARIABLE, f"node-{world.rank}")
        patch.setenv(MEMORY_VARIABLE, str(memory))
        train(run, eager("dp_shard=2,zero=1"), world, folder / "run", StopSignal())
    return [saved.step for saved in memory_checkpoints_in(memory)]


def test_all_ranks_save_at_the_steps_that_one_of_them_picks_and_records(workers, corpus, tmp_path):
    run = run_config(corpus, evaluate={"every_steps": 0, "tokens": 600}, train={"steps": 20})
    assert run.resilience.memory_checkpoint_every_steps == "auto"
    first, second = workers.run(2, trained, run, tmp_path)
    assert first and sorted(first) == sorted(second)
    told: list[dict[str, Any]] = read_lines(tmp_path / "run" / "events" / "rank-0.jsonl")
    chosen = [e for e in told if e["event"] == "memory_checkpoint_interval"]
    assert chosen and all(e["steps"] >= 1 and e["copy_s"] > 0 and e["mtbf_s"] > 0 for e in chosen)


@pytest.fixture
def trainer(corpus: Path, tmp_path: Path) -> Iterator[Trainer]:
    """A trainer of a single process, at its first step."""
    run = run_config(corpus, evaluate={"every_steps": 0})
    heartbeat = Heartbeat(tmp_path)
    with ExitStack() as stack:
        stack.callback(heartbeat.close)
        made = stack.enter_context(Trainer(Parts(run, EAGER, World(), tmp_path, StopSignal(), Survivor(), heartbeat)))
        stack.callback(made.agreement.saving.close)
        made.restore_or_initialize()
        yield made


def steps(trainer: Trainer, until: int) -> None:
    while trainer.state.step < until:
        trainer.update(trainer.exchange(trainer.forward_backward(trainer.batch(trainer.state.step))))
        trainer.observe()


def save(trainer: Trainer) -> None:
    trainer.parts.checkpointer.save(trainer.state, background=False)


def test_without_a_checkpoint_a_rewind_stays_where_it_is(trainer):
    steps(trainer, 2)
    before = {box: tensor.clone() for box, tensor in trainer.state.boxes().items()}
    trainer.agreement.restorer.rewind()
    assert trainer.state.step == 2
    assert all(torch.equal(tensor, before[box]) for box, tensor in trainer.state.boxes().items())


def test_a_rewind_takes_the_newest_checkpoint_and_keeps_what_is_skipped(trainer, tmp_path):
    steps(trainer, 2)
    save(trainer)
    saved = {box: tensor.clone() for box, tensor in trainer.state.boxes().items()}
    history = trainer.state.history
    steps(trainer, 4)
    trainer.parts.batches.skip(4)
    trainer.agreement.restorer.rewind()
    state = trainer.state
    assert (state.step, state.skipped, state.last_update) == (2, ((32, 40),), None)
    assert all(torch.equal(tensor, saved[box]) for box, tensor in state.boxes().items())
    assert state.history.admits(history.world, 2) and not state.history.admits(history.world, 3)
    assert [line["step"] for line in trainer.parts.records.metrics.read()] == [0, 1]
    (event,) = [e for e in read_lines(tmp_path / "events" / "rank-0.jsonl") if e["event"] == "rewind"]
    assert (event["step"], event["to_step"]) == (4, 2)


def test_a_run_rewinds_to_the_same_step_only_so_often(trainer):
    save(trainer)
    for _ in range(MOST_REWINDS):
        steps(trainer, 1)
        trainer.agreement.restorer.rewind()
    steps(trainer, 1)
    with pytest.raises(RunFailed, match=f"step 1 is bad again after the run went back to step 0 {MOST_REWINDS} times"):
        trainer.agreement.restorer.rewind()


def sockets_after_rewinds(world: World, run: RunConfig, folder: Path) -> list[int]:
    """Open sockets of this rank before two rewinds, and after each of them."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv(MEMORY_VARIABLE, str(folder))
        plan = eager("dp_shard=2,zero=1")
        made = stack.enter_context(Trainer(Parts(run, plan, world, folder, StopSignal(), Survivor(), UNREAD)))
        stack.callback(made.agreement.saving.close)
        made.restore_or_initialize()
        save(made)
        found = [len(list(tcp_sockets()))]
        for _ in range(MOST_REWINDS):
            made.agreement.restorer.rewind()
            found.append(len(list(tcp_sockets())))
    return found


def test_rewinds_leave_no_sockets_of_earlier_in_memory_checkpoints(workers, corpus, tmp_path):
    run = run_config(corpus, evaluate={"every_steps": 0})
    for found in workers.run(2, sockets_after_rewinds, run, tmp_path):
        assert len(set(found)) == 1, found


def test_the_step_that_a_run_would_go_back_to_is_shown(trainer):
    steps(trainer, 2)
    assert read_heartbeat(trainer.parts.heartbeat.path).safe_step == -1
    save(trainer)
    trainer.agreement.restorer.show_safe_step()
    assert read_heartbeat(trainer.parts.heartbeat.path).safe_step == 2


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
        patch.setenv(NODE_VARIABLE, f"node-{world.rank}")
        patch.setenv(MEMORY_VARIABLE, str(memory))
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
