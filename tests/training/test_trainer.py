"""What is done with a step follows from its outcome alone, and a trainer that fails leaves nothing running behind."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.errors import RunFailed
from argosy.observe.events import read_lines
from argosy.observe.heartbeat import UNREAD
from argosy.parallel.world import World
from argosy.training.bad_steps import Action
from argosy.training.schedule import learning_rate_factor
from argosy.training.state import Survivor
from argosy.training.step import Requests, StepOutcome
from argosy.training.stop import StopSignal
from argosy.training.trainer import MOST_RETRIES, Trainer
from tiny import eager, run_config

GOOD = StepOutcome(loss=3.0, gradient_norm=1.0, replicas_differ=False, requests=Requests(), loads=None)

MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def trainer(corpus: Path, tmp_path: Path) -> MakeTrainer:
    """Make a trainer of a single process, restored or initialized."""

    def make(plan: str = "", survivor: Survivor | None = None, **sections: dict[str, Any]) -> Trainer:
        run = run_config(corpus, **{"evaluate": {"every_steps": 0}, **sections})
        made = Trainer(run, eager(plan), World(), tmp_path, StopSignal(), survivor or Survivor(), UNREAD)
        made.restore_or_initialize()
        return made

    return make


def step(trainer: Trainer) -> StepOutcome:
    """Do the arithmetic of the step at hand."""
    return trainer.exchange(trainer.forward_backward(trainer.batch(trainer.state.step)))


def apply(trainer: Trainer) -> None:
    trainer.optimizer_step(step(trainer))


@pytest.mark.parametrize(
    "outcome",
    [
        replace(GOOD, replicas_differ=True),
        replace(GOOD, requests=Requests(retry=True)),
        replace(GOOD, requests=Requests(quarantine=True)),
    ],
    ids=["replicas differ", "wrong gradient", "unreadable samples"],
)
def test_a_step_that_is_not_to_be_trusted_is_repeated_whatever_its_numbers_are(trainer, outcome):
    made = trainer(resilience={"on_bad_step": "stop"})
    assert made.decide(outcome) is Action.RETRY
    assert made.decide(replace(outcome, loss=math.nan)) is Action.RETRY
    assert made.decide(GOOD) is Action.APPLY, "none of these counts as a bad step"


def test_an_overflow_halves_the_loss_scale_and_is_no_bad_step(trainer, monkeypatch):
    monkeypatch.setattr("argosy.training.records.matmul_peak_flops", lambda *_: 1e9)  # minutes, in fp16 on a CPU
    made = trainer("precision=fp16", resilience={"on_bad_step": "stop"})
    before = made.state.scaler.scale
    for _ in range(2):
        assert made.decide(replace(GOOD, gradient_norm=math.inf)) is Action.RETRY
    assert made.state.scaler.scale == before / 4


def test_a_step_is_applied_at_the_learning_rate_of_its_schedule(trainer):
    made = trainer(schedule={"warmup_steps": 4})
    for done in range(3):
        apply(made)
        expected = made._run.optimizer.lr * learning_rate_factor(done, 8, made._run.schedule)
        assert made.state.last_update.learning_rate == expected > 0
    assert made.state.step == 3


def test_a_step_that_is_dropped_leaves_the_state_as_it_was(trainer):
    made = trainer()
    before = {box: tensor.clone() for box, tensor in made.state.boxes().items()}
    made.drop_step(step(made), Action.RETRY)
    assert all(torch.equal(tensor, before[box]) for box, tensor in made.state.boxes().items())
    assert (made.state.step, made.state.skipped, made.state.pending) == (0, (), False)
    made.drop_step(step(made), Action.SKIP)
    assert (made.state.step, made.state.skipped) == (0, ((0, 8),))


def test_a_step_is_repeated_only_so_often(trainer):
    made = trainer()
    wrong = replace(GOOD, requests=Requests(retry=True))
    for _ in range(MOST_RETRIES):
        made.drop_step(wrong, Action.RETRY)
    with pytest.raises(RunFailed, match=f"step 0 was done {MOST_RETRIES} times"):
        made.drop_step(wrong, Action.RETRY)


def test_a_step_that_is_applied_starts_the_count_of_repeats_again(trainer):
    made = trainer()
    for _ in range(2):
        for _ in range(MOST_RETRIES):
            made.drop_step(replace(GOOD, requests=Requests(retry=True)), Action.RETRY)
        apply(made)


def test_a_process_asks_for_what_it_was_told(trainer):
    made = trainer()
    made._stop.number, made._stop.is_to_hold = signal.SIGTERM, True
    assert step(made).requests == Requests(stop=True, hold=True)


def test_a_run_that_is_asked_to_stop_saves_once_and_at_its_end(trainer, tmp_path):
    made = trainer(checkpoint={"every_steps": 1})
    apply(made)
    made.save_if_due(replace(GOOD, requests=Requests(stop=True)))
    assert not made._checkpointer.committed
    assert not made.finish()
    saves = [event for event in read_lines(tmp_path / "events" / "rank-0.jsonl") if event["event"] == "save"]
    assert [event["step"] for event in saves] == [1]


def test_a_trainer_that_fails_ends_its_writer_and_hands_its_counts_to_the_next(trainer):
    survivor = Survivor()
    with pytest.raises(RuntimeError, match="peer"), trainer(survivor=survivor) as made:
        apply(made)
        made._checkpointer.save(made.state, background=True)
        writer = made._checkpointer._saver.writer_pid
        assert made.decide(replace(GOOD, loss=math.nan)) is Action.RETRY
        raise RuntimeError("Connection closed by peer")
    assert writer is not None and made._checkpointer._saver.writer_pid is None
    assert survivor.state is made.state and survivor.last_save_s is not None
    after = trainer(survivor=survivor)
    assert after.state.step == 1
    assert after.decide(replace(GOOD, loss=math.nan)) is Action.SKIP, "its first try was in the world before"
