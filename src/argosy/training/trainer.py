"""The trainer: everything that a run needs, laid out and ready, and the parts of a step that the loop calls by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor

from argosy.faults import fault
from argosy.models.microbatch import Microbatch
from argosy.plan.sync import LOCAL, WITH_SERVERS
from argosy.training.agreement import Agreement
from argosy.training.parts import Parts
from argosy.training.rounds import Rounds
from argosy.training.schedule import Pace, learning_rate
from argosy.training.servers import Servers
from argosy.training.step import StepOutcome
from argosy.training.stop import StoppedEarly

AGREEMENTS: dict[str, type[Agreement]] = {**dict.fromkeys(LOCAL, Rounds), **dict.fromkeys(WITH_SERVERS, Servers)}
"""plan.sync -> how replicas agree, if not within the step."""


class Trainer:
    """One process's part of a run. Each method is one line of the loop; all processes call it together."""

    def __init__(self, parts: Parts):
        self.parts, self.state, self._evaluator = parts, parts.state, parts.evaluator
        self._pace = Pace(parts.run, parts.evaluator.held_out.tokens, parts.plan.compile)
        self.agreement = AGREEMENTS.get(parts.plan.sync, Agreement)(parts, self._pace)
        self._services = [kind.of(parts) for kind in self.agreement.services]
        self._time_to_first_step_s: float | None = None
        self.is_stopped_early = False
        """True once a signal has interrupted something that need not be finished."""
        parts.records.measure_peak()

    def __enter__(self) -> Self:
        self.parts.meter.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for service in self._services:
            service.abandon()
        self.parts.meter.close()
        self.agreement.close()
        self.parts.show("")
        if kind is not None:
            self.agreement.saving.abandon()

    def restore_or_initialize(self) -> None:
        """Go on from the newest state there is: of survivors, in memory, on disk; or from the initial weights."""
        self.parts.show("setting up the model and its state")
        if not self.agreement.begin():
            self.is_stopped_early = True
            return
        if self._pace.steps is None:
            self._pace.go_on(self.parts.records.steps_s())
        self.parts.score_references()
        self.parts.show("compiling" if self.parts.plan.compile else "the first step")
        self.parts.clock.lap()
        if (done := self.state.step) and not self.parts.records.has_evaluated(done - 1):
            self.evaluate_if_due()  # it was interrupted
        self.agreement.saving.repeat_save()
        for service in self._services:
            service.start(self.state.step)

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps still to do, 0-based; a run given in minutes learns their number on the way."""
        parts, pace = self.parts, self._pace
        parts.stop.between_steps()
        if self.is_stopped_early or (self.state.step and parts.has_signal()):
            return  # this world was formed for what survivors have to be saved
        for step in self.agreement.steps():
            parts.heartbeat.begin(step)
            for service in self._services:
                service.before_step(step, pace.steps)
            yield step
            parts.stop.between_steps()
            if steps := pace.decide_length(self.state.step, parts.world):
                parts.records.length(steps)

    def batch(self, step: int) -> list[Microbatch]:
        """Return this process's share of the step's samples."""
        fault("batch", step=step, rank=self.parts.world.rank)
        with self.parts.clock.time("data"):
            return self.parts.batches.read(self.agreement.sample_step(step), self.parts.advance)

    def forward_backward(self, batch: list[Microbatch]) -> Tensor:
        """Leave the global batch's gradient in the pieces; returns this rank's share of the loss."""
        for service in self._services:
            service.before_forward(self.state.step, batch)
        loss = self.agreement.step.forward_backward(batch)
        for service in self._services:
            service.after_backward()
        return loss

    def exchange(self, loss: Tensor) -> StepOutcome:
        """Return the step's outcome over all ranks, with what any of them asks for."""
        step, requests = self.agreement.step, self.agreement.requests
        named = {type(service).__name__: service for service in self._services}
        outcome = step.exchange(loss, requests, lambda: {name: service.measure() for name, service in named.items()})
        for name, service in named.items():
            service.after_exchange(outcome, outcome.sums[name])
        return outcome

    def accepts(self, outcome: StepOutcome) -> bool:
        """Decide whether the step counts, the same on all ranks; drop its gradient, and mend what is wrong, if not."""
        return self.agreement.accepts(outcome)

    def update(self, outcome: StepOutcome) -> bool:
        """Apply the gradients and agree with others; the step counts from then on.

        Returns False if the gradient was dropped instead: the step is done again, unless a signal came meanwhile.
        """
        agreement, clock = self.agreement, self.parts.clock
        with clock.time("communication"):
            agreed = agreement.sum_gradients(outcome)
            if agreed is None:
                self.state.drop_gradient()
                self.is_stopped_early = self.parts.has_signal() or not agreement.after_drop()
                return False
        step = self.state.step
        fault("commit", step=step, rank=self.parts.world.rank)
        rate = learning_rate(self.parts.run, step, self._pace.steps)
        observers = (service.observer(step) for service in self._services)
        agreement.apply(agreed, rate, next(filter(None, observers), None))
        for service in self._services:
            service.after_step(step, rate)
        with clock.time("communication"):
            self.is_stopped_early = not agreement.after_step(outcome)
        return True

    def evaluate_if_due(self) -> None:
        """Score the model on held-out text every evaluate.every_steps, and after the last step."""
        done, records = self.state.step, self.parts.records
        if not self.agreement.is_score_due(done):
            return
        with self.parts.clock.time("evaluate"), records.progress.during("evaluating"):
            self.agreement.restorer.make_replicas_agree()
            if self.state.step != done:
                return  # it went back
            self._evaluate()
        score = self._evaluator.score
        if score is not None and not self.is_stopped_early:
            records.evaluated(done - 1, score, self._evaluator.task_scores)
            for service in self._services:
                service.evaluated(score)

    def observe(self) -> None:
        """Write the lines of metrics that the step leads to, and show the last."""
        parts, step = self.parts, self.state.step - 1
        seconds = parts.clock.lap()
        more: dict[str, Any] = {key: value for service in self._services for key, value in service.line(step).items()}
        if "profiled" not in more:
            self._pace.took(seconds["step"], step)
        self.agreement.saving.poll()
        if parts.world.is_first and self.agreement.write_lines(seconds, more):
            self._time_to_first_step_s = self._time_to_first_step_s or time.monotonic() - parts.began_s
        for service in self._services:
            service.end_step(step, seconds)

    def save_if_due(self, outcome: StepOutcome) -> None:
        """Save by steps, by minutes or for a world that is to end; its time counts in the next step."""
        if self.agreement.save_if_due(outcome.requests):
            for service in self._services:
                service.saved()
        if outcome.requests.hold and not outcome.requests.stop:
            self.agreement.saving.hold()

    def finish(self) -> bool:
        """Save the last state, wait for the disk, write the report.

        Returns True if nothing is left to do. Raises: StorageError if the state cannot be saved.
        """
        parts, records, agreement, pace = self.parts, self.parts.records, self.agreement, self._pace
        parts.show("saving the last state")
        if agreement.save_last_state():
            for service in self._services:
                service.saved()
        done, is_scored = self.state.step, self._evaluator.score is not None
        if done == pace.steps and agreement.is_score_due(done) and not (is_scored or self.is_stopped_early):
            self._evaluate()
        finished = done == pace.steps and not (agreement.is_due or self.is_stopped_early)
        facts = {key: value for service in self._services for key, value in service.finish().items()}
        parts.show("writing the report")
        if agreement.has_report:
            records.report(parts.data, self._evaluator, finished, self._time_to_first_step_s)
        with records.progress.during("verifying what was saved"):
            agreement.saving.close()
        paused = {"paused_at": done} if pace.is_paused(done) and not finished else {}
        records.events.write("end", step=done, finished=finished, **paused, **facts)
        return finished or bool(paused)

    def _evaluate(self) -> None:
        """Score the model, unless a signal comes: the next process that goes on with the run does it then."""

        def end_on_signal() -> None:
            fault("evaluate", step=self.state.step)
            if self.parts.has_signal():
                raise StoppedEarly

        try:
            self._evaluator.evaluate(end_on_signal)
        except StoppedEarly:
            self.is_stopped_early = True
