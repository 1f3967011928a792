"""The step policy: what is done with a step, given its outcome, and what has to be mended before it is done again."""

from __future__ import annotations

import math

from argosy.errors import RunFailed
from argosy.training.bad_steps import Action, BadStepPolicy
from argosy.training.parts import Parts
from argosy.training.restore import Restorer
from argosy.training.step import StepOutcome

MOST_RETRIES = 20
"""How often a step is done again with the same samples and at the same loss scale."""


class StepPolicy:
    """Decides on the steps of one process. All processes call each method together, and decide alike."""

    def __init__(self, parts: Parts, restorer: Restorer, bad_steps: BadStepPolicy):
        self._state, self._batches, self._records = parts.state, parts.batches, parts.records
        self._restorer, self._bad_steps = restorer, bad_steps
        self._retries = 0

    def decide(self, outcome: StepOutcome) -> Action:
        """Decide what is done with the step at hand. Raises: RunFailed if the run ends with it."""
        step, scaler = self._state.step, self._state.scaler
        if outcome.replicas_differ or outcome.requests.quarantine or outcome.requests.retry:
            return Action.RETRY
        overflows = math.isfinite(outcome.loss) and not math.isfinite(outcome.gradient_norm)  # no scale is in the loss
        if overflows and not scaler.is_at_floor:
            scaler.update(outcome.gradient_norm)
            self._retries = 0
            self._records.tell("loss_scale", step=step, scale=scaler.scale)
            return Action.RETRY
        action, bad = self._bad_steps.decide(step, outcome.loss, outcome.gradient_norm)
        if bad is not None and action is Action.APPLY:
            self._records.transient(bad, outcome)
        elif bad is not None and action is not Action.RETRY:
            self._records.bad_step(bad, action, self._batches.samples(step))
        return action

    def applied(self) -> None:
        """Note that a step was applied: the next may be repeated as often."""
        self._retries = 0

    def drop(self, outcome: StepOutcome, action: Action) -> None:
        """Drop the gradient, mend what is wrong, and leave the state such that the step can be done (again).

        Raises: RunFailed, Retryable if that cannot be.
        """
        self._state.drop_gradient()
        if action is Action.RETRY:
            self._prepare_retry(outcome)
            return
        self._batches.skip(self._state.step)
        if action is Action.REWIND:
            self._restorer.rewind()

    def _prepare_retry(self, outcome: StepOutcome) -> None:
        self._retries = 0 if outcome.requests.quarantine else self._retries + 1
        if self._retries > MOST_RETRIES:
            raise RunFailed(
                f"step {self._state.step} was done {MOST_RETRIES} times, and each time something else was wrong."
            )
        if outcome.requests.quarantine:
            self._batches.quarantine()
        if outcome.replicas_differ:
            self._restorer.heal_replicas()
