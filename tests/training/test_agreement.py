"""What is waited for is shown, and said once if it lasts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from argosy.errors import RunFailed
from argosy.precision import LossScaler
from argosy.training import agreement as module
from argosy.training.agreement import MOST_RETRIES, WaitForOthers
from argosy.training.bad_steps import Action
from argosy.training.step import Requests, StepOutcome
from argosy.training.trainer import Trainer

GOOD = StepOutcome(loss=3.0, gradient_norm=1.0, replicas_differ=False, requests=Requests(), loads=None)


def step(trainer: Trainer) -> StepOutcome:
    """Do the arithmetic of the step at hand."""
    return trainer.exchange(trainer.forward_backward(trainer.batch(trainer.state.step)))


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
    assert made.agreement.policy.decide(outcome) is Action.RETRY
    assert made.agreement.policy.decide(replace(outcome, loss=math.nan)) is Action.RETRY
    assert made.agreement.policy.decide(GOOD) is Action.APPLY, "none of these counts as a bad step"


def test_an_overflow_halves_the_loss_scale_and_is_no_bad_step(trainer, monkeypatch):
    monkeypatch.setattr("argosy.training.records.matmul_peak_flops", lambda *_: 1e9)  # minutes, in fp16 on a CPU
    made = trainer("precision=fp16", resilience={"on_bad_step": "stop"})
    before = made.state.scaler.scale
    for _ in range(2):
        assert made.agreement.policy.decide(replace(GOOD, gradient_norm=math.inf)) is Action.RETRY
    assert made.state.scaler.scale == before / 4


def test_a_step_that_overflows_at_every_loss_scale_is_skipped(trainer, monkeypatch):
    monkeypatch.setattr("argosy.training.records.matmul_peak_flops", lambda *_: 1e9)
    made = trainer("precision=fp16")
    made.state.scaler = LossScaler(2.0 ** (MOST_RETRIES + 4))
    overflow, actions = replace(GOOD, gradient_norm=math.inf), []
    while Action.SKIP not in actions:
        actions.append(made.agreement.policy.decide(overflow))
        made.agreement.policy.drop(overflow, actions[-1])
    assert len(actions) == MOST_RETRIES + 4 + 2, "each halving, once more as any bad step, and then it is skipped"


def test_a_loss_that_is_not_finite_is_a_bad_step_whatever_the_loss_scale(trainer, monkeypatch):
    monkeypatch.setattr("argosy.training.records.matmul_peak_flops", lambda *_: 1e9)
    made = trainer("precision=fp16")
    before = made.state.scaler.scale
    bad = replace(GOOD, loss=math.nan, gradient_norm=math.nan)
    assert [made.agreement.policy.decide(bad) for _ in range(2)] == [Action.RETRY, Action.SKIP]
    assert made.state.scaler.scale == before


def test_a_step_that_is_dropped_leaves_the_state_as_it_was(trainer):
    made = trainer()
    before = {box: tensor.clone() for box, tensor in made.state.boxes().items()}
    made.agreement.policy.drop(step(made), Action.RETRY)
    assert all(torch.equal(tensor, before[box]) for box, tensor in made.state.boxes().items())
    assert (made.state.step, made.state.skipped, made.state.pending) == (0, (), False)
    made.agreement.policy.drop(step(made), Action.SKIP)
    assert (made.state.step, made.state.skipped) == (0, ((0, 8),))


def test_a_step_is_repeated_only_so_often(trainer):
    made = trainer()
    wrong = replace(GOOD, requests=Requests(retry=True))
    for _ in range(MOST_RETRIES):
        made.agreement.policy.drop(wrong, Action.RETRY)
    with pytest.raises(RunFailed, match=f"step 0 was done {MOST_RETRIES} times"):
        made.agreement.policy.drop(wrong, Action.RETRY)


def test_a_step_that_is_applied_starts_the_count_of_repeats_again(trainer):
    made = trainer()
    for _ in range(2):
        for _ in range(MOST_RETRIES):
            made.agreement.policy.drop(replace(GOOD, requests=Requests(retry=True)), Action.RETRY)
        made.update(step(made))


class Told:
    def __init__(self) -> None:
        self.shown: list[str] = []
        self.said: list[str] = []

    def doing(self, what: str) -> None:
        self.shown.append(what)

    def say(self, text: str, style: str = "") -> None:
        self.said.append(text)


def test_a_long_wait_is_shown_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    told = Told()
    waiting = WaitForOthers(told)  # type: ignore[arg-type]
    waiting.is_for("no answer from server-1")
    assert told.shown == []
    for now_s[0] in (102.0, 110.0, 116.0, 130.0):
        waiting.is_for("no answer from server-1")
    waiting.ends()
    assert told.shown == ["no answer from server-1", ""]
    assert told.said == [" waiting: no answer from server-1"]


def test_a_short_wait_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    waiting = WaitForOthers(told)  # type: ignore[arg-type]
    waiting.is_for("no answer from server-1")
    waiting.ends()
    assert told.shown == told.said == []
