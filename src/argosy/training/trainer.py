"""The trainer: everything that a run needs, laid out and ready, and the parts of a step that the loop calls by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from argosy.config.schema import RunConfig
from argosy.faults import fault
from argosy.models.decoder import Microbatch
from argosy.observe.heartbeat import Heartbeat
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.agreement import Agreement
from argosy.training.bad_steps import Action, BadStepPolicy
from argosy.training.integrity import Integrity
from argosy.training.memory_checkpoints import MemoryCheckpointing
from argosy.training.pace import Pace
from argosy.training.parts import Parts
from argosy.training.restore import Restorer
from argosy.training.rounds import Rounds
from argosy.training.saving import Saving
from argosy.training.schedule import learning_rate
from argosy.training.services import SERVICES
from argosy.training.state import Survivor
from argosy.training.step import Requests, Step, StepOutcome
from argosy.training.step_policy import StepPolicy
from argosy.training.stop import StoppedEarly, StopSignal


class Trainer:
    """One process's part of a run. Each method is one line of the loop; all processes call it together."""

    def __init__(
        self,
        run: RunConfig,
        plan: Plan,
        world: World,
        run_dir: Path,
        stop: StopSignal,
        survivor: Survivor,
        heartbeat: Heartbeat,
    ):
        self._began_s = time.monotonic()
        self._parts = parts = Parts.make(run, plan, world, run_dir, stop, survivor, heartbeat)
        self.state = parts.state
        self._evaluator = parts.evaluator
        self._pace = Pace(run, self._evaluator.held_out.tokens, plan.compile)
        self._memory = memory = MemoryCheckpointing(parts)
        integrity = Integrity(parts)
        self._step = Step(run, parts.state, world, parts.clock, integrity, stop.check)
        bad_steps = BadStepPolicy(run.resilience, parts.batches.stage, survivor.bad_steps)
        self._restorer = restorer = Restorer(parts, memory, integrity, bad_steps)
        self._saving = Saving(parts, memory, restorer, bad_steps)
        self.policy = StepPolicy(parts, restorer, bad_steps)
        self._agreement = Agreement() if parts.state.outer is None else Rounds(parts, self._step)
        self._services = [kind.of(parts) for kind in SERVICES]
        self._time_to_first_step_s: float | None = None
        self.is_stopped_early = False
        """True once a signal has interrupted something that need not be finished."""
        parts.records.measure_peak()

    def __enter__(self) -> Self:
        self._parts.meter.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for service in self._services:
            service.abandon()
        self._parts.meter.close()
        if kind is not None:
            self._saving.abandon()

    def restore_or_initialize(self) -> None:
        """Go on from the newest state there is: of survivors, in memory, on disk; or from the initial weights."""
        self._parts.show("setting up the model and its state")
        is_survivors = self._restorer.restore_or_initialize()
        if not self._agreement.begin(self._restorer.is_new):
            self.is_stopped_early = True
            return
        self._parts.show("compiling" if self._parts.plan.compile else "the first step")
        self._parts.clock.lap()
        done = self.state.step
        if done and not self._parts.records.has_evaluated(done - 1):
            self.evaluate_if_due()  # it was interrupted
        if is_survivors:
            self._saving.repeat_save()
        for service in self._services:
            service.start(self.state.step)

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps still to do, 0-based; a run given in minutes learns their number on the way."""
        parts, state, pace = self._parts, self.state, self._pace
        parts.stop.between_steps()
        if self.is_stopped_early or (state.step and parts.has_signal()):
            return  # this world was formed for what survivors have to be saved
        while not self._is_paused and (pace.steps is None or state.step < pace.steps):
            parts.heartbeat.begin(state.step)
            for service in self._services:
                service.before_step(state.step, pace.steps)
            yield state.step
            parts.stop.between_steps()
            if steps := pace.decide_length(state.step, parts.world):
                parts.records.length(steps)

    def batch(self, step: int) -> list[Microbatch]:
        """Return this process's share of the step's samples."""
        fault("batch", step=step, rank=self._parts.world.rank)
        with self._parts.clock.time("data"):
            return self._parts.batches.read(step, self._parts.advance)

    def forward_backward(self, batch: list[Microbatch]) -> Tensor:
        """Leave the global batch's gradient in the pieces; returns this rank's share of the loss."""
        for service in self._services:
            service.before_forward(self.state.step, batch)
        loss = self._step.forward_backward(batch)
        for service in self._services:
            service.after_backward()
        return loss

    def exchange(self, loss: Tensor) -> StepOutcome:
        """Return the step's outcome over all ranks, with what any of them asks for."""
        named = {type(service).__name__: service for service in self._services}
        outcome = self._step.exchange(
            loss, self._requests, lambda: {name: service.measure() for name, service in named.items()}
        )
        for name, service in named.items():
            service.after_exchange(outcome, outcome.sums[name])
        return outcome

    def accepts(self, outcome: StepOutcome) -> bool:
        """Decide whether the step counts, the same on all ranks; drop its gradient, and mend what is wrong, if not.

        Raises: RunFailed, Retryable if the run cannot go on.
        """
        action = self.policy.decide(outcome)
        if action is not Action.APPLY:
            self.policy.drop(outcome, action)
        return action is Action.APPLY

    def update(self, outcome: StepOutcome) -> bool:
        """Apply the gradients and agree with other sites; the step counts from then on.

        Returns False if the gradient was dropped instead: the step is done again, unless a signal came meanwhile.
        """
        agreement, clock = self._agreement, self._parts.clock
        with clock.time("communication"):
            agreed = agreement.sum_gradients(outcome)
            if agreed is None:
                self.state.drop_gradient()
                self.is_stopped_early = self._parts.has_signal() or not agreement.after_drop()
                return False
        step = self.state.step
        fault("commit", step=step, rank=self._parts.world.rank)
        rate = learning_rate(self._parts.run, step, self._pace.steps)
        observers = (service.observer(step) for service in self._services)
        self._step.apply(self._step.update(agreed, rate), next(filter(None, observers), None))
        self.policy.applied()
        for service in self._services:
            service.after_step(step, rate)
        with clock.time("communication"):
            self.is_stopped_early = not agreement.after_step(outcome)
        return True

    def evaluate_if_due(self) -> None:
        """Score the model on held-out text every evaluate.every_steps, and after the last step."""
        done, records = self.state.step, self._parts.records
        if not (self._evaluator.is_due(done) or done == self._pace.steps):
            return
        with self._parts.clock.time("evaluate"), records.progress.during("evaluating"):
            self._restorer.make_replicas_agree()
            if self.state.step != done:
                return  # it went back
            self._evaluate()
        score = self._evaluator.score
        if score is not None and not self.is_stopped_early:
            records.evaluated(done - 1, score)
            for service in self._services:
                service.evaluated(score)

    def observe(self) -> None:
        """Write the line of the step that was applied, and show it."""
        parts, step = self._parts, self.state.step - 1
        seconds = parts.clock.lap()
        more: dict[str, Any] = {key: value for service in self._services for key, value in service.line(step).items()}
        if "profiled" not in more:
            self._pace.took(seconds["step"], step)
        if self._time_to_first_step_s is None:
            self._time_to_first_step_s = time.monotonic() - self._began_s
        parts.checkpointer.poll()
        parts.heartbeat.has_written(parts.checkpointer.written_bytes)
        self._restorer.show_safe_step()
        more |= {**parts.batches.cache_line(), **self._agreement.line()}
        if parts.world.is_first and (update := self.state.last_update) is not None:
            samples = parts.batches.line(update.step)
            record = parts.records.step(update, self.state.tokens, samples, seconds, parts.clock.communication, more)
            left_s, score = self._pace.left_s(self.state.step), self._evaluator.score
            parts.records.progress.step(record, self._pace.steps, score.loss if score else None, left_s)
            if left_s is None and parts.plan.compile:
                parts.show("compiling")
        for service in self._services:
            service.end_step(step, seconds)

    def save_if_due(self, outcome: StepOutcome) -> None:
        """Save by steps, by minutes or for a world that is to end; its time counts in the next step."""
        if self._saving.save_if_due(outcome.requests):
            for service in self._services:
                service.saved()
        if outcome.requests.hold and not outcome.requests.stop:
            self._saving.hold()

    def finish(self) -> bool:
        """Save the last state, wait for the disk, write the report.

        Returns True if nothing is left to do. Raises: StorageError if the state cannot be saved.
        """
        parts, records = self._parts, self._parts.records
        parts.show("saving the last state")
        self._saving.save_last_state()
        done = self.state.step
        if done == self._pace.steps and self._evaluator.score is None and not self.is_stopped_early:
            self._evaluate()
        parts.heartbeat.has_written(parts.checkpointer.written_bytes)
        finished = done == self._pace.steps and not (self.is_stopped_early or self._agreement.is_due)
        facts = {key: value for service in self._services for key, value in service.finish().items()}
        parts.show("writing the report")
        records.report(parts.data, self._evaluator, finished, self._time_to_first_step_s)
        with records.progress.during("verifying what was saved"):
            self._saving.close()
        paused = {"paused_at": done} if self._is_paused and not finished else {}
        records.events.write("end", step=done, finished=finished, **paused, **facts)
        return finished or self._is_paused

    def _evaluate(self) -> None:
        """Score the model, unless a signal comes: the next process that goes on with the run does it then."""
        try:
            self._evaluator.evaluate(self._end_on_signal)
        except StoppedEarly:
            self.is_stopped_early = True

    def _end_on_signal(self) -> None:
        """Raises: StoppedEarly once a signal came to any process."""
        fault("evaluate", step=self.state.step)
        if self._parts.has_signal():
            raise StoppedEarly

    def _requests(self) -> Requests:
        stop, checkpointer = self._parts.stop, self._parts.checkpointer
        return Requests(
            stop=stop.is_requested(),
            save=checkpointer.is_due_by_time or (stop.is_to_hold and stop.is_to_save),
            quarantine=self._parts.batches.are_unreadable,
            memory_checkpoint=self._memory.is_due(self.state.step + 1, self._pace.step_s),
            hold=stop.is_to_hold,
            left_behind=self._agreement.is_left_behind,
        )

    @property
    def _is_paused(self) -> bool:
        """True if the run is to stop here, for now (train.pause_at)."""
        return 0 < self._parts.run.train.pause_at <= self.state.step
