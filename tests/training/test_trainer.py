"""A trainer applies steps as its run file says, and leaves nothing running behind when it fails."""

from __future__ import annotations

import math
import os
import signal
import threading
from dataclasses import replace

import pytest

from argosy.chaos.campaign import descendants
from argosy.observe.events import read_lines
from argosy.training.bad_steps import Action
from argosy.training.schedule import learning_rate_factor
from argosy.training.state import Survivor
from argosy.training.step import Requests, StepOutcome
from argosy.training.trainer import Trainer
from waiting import wait_until

GOOD = StepOutcome(loss=3.0, gradient_norm=1.0, replicas_differ=False, requests=Requests(), loads=None)


def step(trainer: Trainer) -> StepOutcome:
    """Do the arithmetic of the step at hand."""
    return trainer.exchange(trainer.forward_backward(trainer.batch(trainer.state.step)))


def apply(trainer: Trainer) -> None:
    trainer.update(step(trainer))


def test_a_step_is_applied_at_the_learning_rate_of_its_schedule(trainer):
    made = trainer(schedule={"warmup_steps": 4})
    for done in range(3):
        apply(made)
        expected = made.parts.run.optimizer.lr * learning_rate_factor(done, 8, made.parts.run.schedule)
        assert made.state.last_update.learning_rate == expected > 0
    assert made.state.step == 3


def test_a_process_asks_for_what_it_was_told(trainer):
    made = trainer()
    made.parts.stop.number, made.parts.stop.is_to_hold = signal.SIGTERM, True
    assert step(made).requests == Requests(stop=True, hold=True)
    made.parts.stop.is_to_save = True
    assert step(made).requests == Requests(stop=True, hold=True, save=True)


def test_a_world_that_is_to_end_holds_once_what_it_saves_is_on_disk(trainer, monkeypatch):
    made = trainer()
    apply(made)
    held = []
    monkeypatch.setattr(made.agreement.saving, "hold", lambda: held.append(made.parts.checkpointer.committed.copy()))
    made.save_if_due(replace(GOOD, requests=Requests(hold=True, save=True)))
    assert held == [{1}]


def test_a_run_that_is_asked_to_stop_saves_once_and_at_its_end(trainer, tmp_path):
    made = trainer(checkpoint={"every_steps": 1})
    apply(made)
    made.save_if_due(replace(GOOD, requests=Requests(stop=True)))
    assert not made.parts.checkpointer.committed
    assert not made.finish()
    saves = [event for event in read_lines(tmp_path / "events" / "rank-0.jsonl") if event["event"] == "save"]
    assert [event["step"] for event in saves] == [1]


def test_a_trainer_that_fails_says_no_longer_what_it_does(trainer):
    with pytest.raises(RuntimeError, match="peer"), trainer():
        assert any(thread.name == "argosy-progress" for thread in threading.enumerate())
        raise RuntimeError("Connection closed by peer")
    wait_until(lambda: all(thread.name != "argosy-progress" for thread in threading.enumerate()))


def test_a_trainer_that_fails_ends_its_writer_and_hands_its_counts_to_the_next(trainer):
    survivor = Survivor()
    with pytest.raises(RuntimeError, match="peer"), trainer(survivor=survivor) as made:
        apply(made)
        made.parts.checkpointer.save(made.state, background=True)
        writer = made.parts.checkpointer._saver.writer_pid
        assert writer in descendants(os.getpid())
        assert made.agreement.policy.decide(replace(GOOD, loss=math.nan)) is Action.RETRY
        raise RuntimeError("Connection closed by peer")
    wait_until(lambda: writer not in descendants(os.getpid()))
    assert survivor.state is made.state and survivor.last_save_s is not None
    after = trainer(survivor=survivor)
    assert after.state.step == 1
    assert after.agreement.policy.decide(replace(GOOD, loss=math.nan)) is Action.SKIP, (
        "its first try was in the world before"
    )
