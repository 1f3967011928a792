"""A run that goes back takes its newest checkpoint, keeps what it has learned since, and does not go back for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from argosy.errors import RunFailed
from argosy.observe.events import read_lines
from argosy.observe.heartbeat import Heartbeat, read_heartbeat
from argosy.parallel.world import World
from argosy.training.bad_steps import MOST_REWINDS
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal
from argosy.training.trainer import Trainer
from tiny import EAGER, run_config


@pytest.fixture
def trainer(corpus: Path, tmp_path: Path) -> Iterator[Trainer]:
    """A trainer of a single process, at its first step."""
    run = run_config(corpus, evaluate={"every_steps": 0})
    heartbeat = Heartbeat(tmp_path)
    with ExitStack() as stack:
        stack.callback(heartbeat.close)
        made = Trainer(run, EAGER, World(), tmp_path, StopSignal(), Survivor(), heartbeat)
        stack.callback(made.agreement.saving.close)
        made.restore_or_initialize()
        yield made


def steps(trainer: Trainer, until: int) -> None:
    while trainer.state.step < until:
        trainer.update(trainer.exchange(trainer.forward_backward(trainer.batch(trainer.state.step))))
        trainer.observe()


def save(trainer: Trainer) -> None:
    trainer._parts.checkpointer.save(trainer.state, background=False)


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
    trainer._parts.batches.skip(4)
    trainer.agreement.restorer.rewind()
    state = trainer.state
    assert (state.step, state.skipped, state.last_update) == (2, ((32, 40),), None)
    assert all(torch.equal(tensor, saved[box]) for box, tensor in state.boxes().items())
    assert state.history.admits(history.world, 2) and not state.history.admits(history.world, 3)
    assert [line["step"] for line in trainer._parts.records.metrics.read()] == [0, 1]
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


def test_the_step_that_a_run_would_go_back_to_is_shown(trainer):
    steps(trainer, 2)
    assert read_heartbeat(trainer._parts.heartbeat.path).safe_step == -1
    save(trainer)
    trainer.agreement.restorer.show_safe_step()
    assert read_heartbeat(trainer._parts.heartbeat.path).safe_step == 2
