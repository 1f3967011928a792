"""The agreement of replicas on weights: which steps they make, what makes one count, who keeps the state.

The trainer calls each method at its place in the step, and knows no more of it. `StepPolicy` decides what is done with
a step, given its outcome, and mends what has to be mended before it is done again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from argosy.errors import RunFailed
from argosy.observe.screen import Progress
from argosy.training.bad_steps import Action, BadStepPolicy
from argosy.training.integrity import Integrity
from argosy.training.parts import Parts
from argosy.training.saving import MemoryCheckpointing, Restorer, Saving
from argosy.training.schedule import Pace
from argosy.training.services import SERVICES
from argosy.training.services.service import Service
from argosy.training.step import Requests, Step, StepOutcome, UpdateObserver

MOST_RETRIES = 20
"""Most repetitions of a step with the same samples and at the same loss scale."""


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


SHOWN_S, SAID_S = 1.0, 15.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
"""Seconds between two looks whether a wait is over: at first, and after a while."""


class Agreement:
    """Replicas agree within the step: its gradients are sums over all of them, and each rank keeps its part of the
    state. Other ways override what differs.

    All ranks call each method together, unless it says otherwise.
    """

    services: Sequence[type[Service]] = SERVICES
    """The services that take part in its steps."""

    def __init__(self, parts: Parts, pace: Pace):
        """Raises: UserError if the run asks for what its plan does not allow."""
        self._parts, self._pace = parts, pace
        self._state, self._world, self._records = parts.state, parts.world, parts.records
        self._memory, integrity = MemoryCheckpointing(parts), Integrity(parts)
        self.step = Step(parts.run, parts.state, parts.world, parts.clock, integrity, parts.stop.check)
        bad_steps = BadStepPolicy(parts.run.resilience, parts.batches.stage, parts.survivor.bad_steps)
        self.restorer = Restorer(parts, self._memory, integrity, bad_steps)
        self.saving = Saving(parts, self._memory, self.restorer, bad_steps)
        self.policy = StepPolicy(parts, self.restorer, bad_steps)

    def begin(self) -> bool:
        """Go on from the newest state there is, and meet the others. Returns False if a signal came before."""
        self.restorer.restore_or_initialize()
        return True

    # ---- a step, in the order of the calls ----------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yield the step at hand, 0-based, until there is none; again, if it did not count."""
        while not self._pace.is_over(self._state.step):
            yield self._state.step

    def sample_step(self, step: int) -> int:
        """Return the number that says which samples `step` reads."""
        return step

    def requests(self) -> Requests:
        """Return what this rank asks for after the step at hand. Any rank may ask."""
        stop, checkpointer = self._parts.stop, self._parts.checkpointer
        return Requests(
            stop=stop.is_requested(),
            save=checkpointer.is_due_by_time or (stop.is_to_hold and stop.is_to_save),
            quarantine=self._parts.batches.are_unreadable,
            memory_checkpoint=self._memory.is_due(self._state.step + 1, self._pace.step_s),
            hold=stop.is_to_hold,
        )

    def accepts(self, outcome: StepOutcome) -> bool:
        """Decide whether the step counts, the same on all ranks; drop its gradient, and mend what is wrong, if not.

        Raises: RunFailed, Retryable if the run cannot go on.
        """
        action = self.policy.decide(outcome)
        if action is not Action.APPLY:
            self.policy.drop(outcome, action)
        return action is Action.APPLY

    def sum_gradients(self, outcome: StepOutcome) -> StepOutcome | None:
        """Return the outcome of the step over all that sum gradients with it; None: its gradient is to be dropped."""
        return outcome

    def after_drop(self) -> bool:
        """Go to where the others are, as the gradient was dropped. Returns False if a signal came before."""
        return True

    def apply(self, outcome: StepOutcome, learning_rate: float, observer: UpdateObserver | None = None) -> None:
        """Make the step count."""
        self.step.apply(self.step.update(outcome, learning_rate), observer)
        self.policy.applied()

    def after_step(self, outcome: StepOutcome) -> bool:
        """Agree on the weights, if it is time. Returns False if a signal came before."""
        return True

    def is_score_due(self, done: int) -> bool:
        """True if the model is to be scored after `done` steps. Any rank may ask."""
        return self._parts.evaluator.is_due(done) or done == self._pace.steps

    def line(self) -> Mapping[str, Any]:
        """Return what the step's line of metrics says of it, once. Only rank 0 has something to say."""
        return {}

    def write_lines(self, seconds: Mapping[str, float], more: Mapping[str, Any]) -> bool:
        """Write the lines of metrics that the step leads to, and show the last. Only rank 0 calls it.

        seconds: where the step's time went. more: what services say of it. Returns False if there are none (yet).
        """
        parts, update, done = self._parts, self._state.last_update, self._state.step
        if update is None or not update.has_loss:
            return False
        samples, more = parts.batches.line(update.step), {**more, **parts.batches.cache_line(), **self.line()}
        record = self._records.step(update, self._state.tokens, samples, seconds, parts.clock.communication, more)
        score, left_s = parts.evaluator.score, self._pace.left_s(done)
        self._records.progress.step(record, self._pace.steps, score.loss if score else None, left_s)
        if left_s is None and parts.plan.compile:
            parts.show("compiling")
        return True

    def save_if_due(self, requests: Requests) -> bool:
        """Save by steps, by minutes or for a world that is to end. Returns True if it was on disk."""
        return self.saving.save_if_due(requests)

    # ---- the end ------------------------------------------------------------------------------------------------

    def save_last_state(self) -> bool:
        """Read no more, and leave nothing unsaved. Returns False if that took no checkpoint.

        Raises: StorageError if the state cannot be saved.
        """
        return self.saving.save_last_state()

    @property
    def is_due(self) -> bool:
        """True if weights are to be agreed on before the state counts as finished."""
        return False

    @property
    def has_report(self) -> bool:
        """True if this job has something to report at its end, finished or not."""
        return True

    def close(self) -> None:
        """Leave the others, after an error too. Ranks do not call it together."""


class WaitForOthers:
    """One wait for others: shown in the live line, and in a line that stays if it lasts, as most runs have no
    terminal."""

    def __init__(self, progress: Progress):
        self._progress, self._began_s, self._shown, self._is_said = progress, time.monotonic(), "", False
        self._pause_s = FIRST_PAUSE_S

    def is_for(self, words: str) -> None:
        """Show what is waited for, once it takes longer than SHOWN_S, and say it once, after SAID_S."""
        waited_s = time.monotonic() - self._began_s
        if waited_s > SHOWN_S and words != self._shown:
            self._shown = words
            self._progress.doing(words)
        if waited_s > SAID_S and words and not self._is_said:
            self._is_said = True
            self._progress.say(f" waiting: {words}", "yellow")

    def pause(self) -> None:
        """Sleep until the next look, a little longer each time."""
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)

    def ends(self) -> None:
        """Show it no more."""
        if self._shown:
            self._progress.doing("")
