"""The trainer: everything that a run needs, laid out and ready, and the parts of a step that the loop calls by name."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from argosy.config.identity import config_sha256
from argosy.config.schema import RunConfig
from argosy.faults import fault
from argosy.models.batch import Microbatch
from argosy.observe.clock import StepClock
from argosy.observe.collectives import CommunicationMeter
from argosy.observe.heartbeat import Heartbeat
from argosy.parallel.apply import apply
from argosy.parallel.world import World, node_of_each_rank
from argosy.plan.plan import Plan
from argosy.sync.sites.ledger import Ledger
from argosy.training.bad_steps import Action, BadStepPolicy
from argosy.training.batches import Batches
from argosy.training.checkpointer import Checkpointer
from argosy.training.evaluation import Evaluator
from argosy.training.integrity import Integrity
from argosy.training.memory_checkpoints import MemoryCheckpointing
from argosy.training.noise_scale import NoiseScale, Smoothed
from argosy.training.norms import LayerNorms
from argosy.training.outer import OuterSteps
from argosy.training.own_checks import check_own_code
from argosy.training.own_site import open_own_data, outer_state, sites_of
from argosy.training.pace import Pace
from argosy.training.profiling import Profiling
from argosy.training.rebalance import Rebalance, plan_in_force
from argosy.training.records import Records
from argosy.training.replay_check import check_can_replay
from argosy.training.restore import Restorer
from argosy.training.schedule import learning_rate
from argosy.training.shutdown import Shutdown
from argosy.training.state import Survivor, TrainState
from argosy.training.step import Requests, Step, StepOutcome
from argosy.training.step_policy import StepPolicy
from argosy.training.stop import StoppedEarly, StopSignal
from argosy.training.user_code import UserCode

NOISE_LINES = 1000
"""The averages of the noise scale go on from those of one of so many last lines."""


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
        self._began = time.monotonic()
        memory_before_bytes = survivor.enter(world, run)
        plan = plan_in_force(run, plan, world, run_dir)
        self._run, self._plan, self._world, self._stop = run, plan, world, stop
        self._heartbeat = heartbeat
        self._records = records = Records(run, plan, world, run_dir)
        records.memory_before_bytes = memory_before_bytes

        check_can_replay(run, plan, world.device)
        check_own_code(run, plan)
        model = apply(plan, run, world)
        sites, ledger = sites_of(run, run_dir), Ledger(run_dir)
        self._data = open_own_data(run, ledger, sites)
        self._evaluator = Evaluator(run, plan, self._data.sources, model, world)
        self.state = state = TrainState.begin(model, plan, run)
        state.outer = outer_state(plan, state, sites, ledger)
        self._batches = batches = Batches(run, plan, self._data, state, world, records.events)
        bad_steps = BadStepPolicy(run.resilience, batches.stage, survivor.bad_steps)

        identity, lasting = self._data.identity, config_sha256(run)
        self._checkpointer = checkpointer = Checkpointer(
            run_dir, run.checkpoint, plan, identity, world, records.events, records.progress, lasting, stop.check
        )
        self._memory = memory = MemoryCheckpointing(run, state, world, records)
        self._pace = Pace(run, self._evaluator.held_out.tokens, plan.compile)
        nodes = node_of_each_rank(world)
        self._meter = CommunicationMeter(model.meshes.axis_of_groups(), nodes.__getitem__, world.device)
        self._clock = StepClock(world.device, heartbeat, self._meter)
        integrity = Integrity(run, state, batches, world, records, self._clock, heartbeat)
        self._step = Step(run, state, world, self._clock, integrity, stop.check)
        axes = model.meshes.axis_of_groups()
        self._profiling = Profiling(run, plan, world, run_dir, records, self._clock, heartbeat, axes)
        self._norms = LayerNorms(run, model, world)
        self._noise = NoiseScale(run, plan, model)
        self._rebalance = Rebalance(run, plan, world, model.dp_rank)
        self._restorer = restorer = Restorer(
            run, state, survivor, world, checkpointer, memory, batches, integrity, bad_steps, records, heartbeat
        )
        self._shutdown = Shutdown(
            run_dir, state, survivor, stop, checkpointer, memory, restorer, batches, bad_steps, heartbeat
        )
        self._policy = StepPolicy(state, batches, restorer, bad_steps, records)
        self._outer = None
        if state.outer is not None:
            self._outer = OuterSteps(state, world, checkpointer, batches, records, heartbeat, self._has_signal)
        self._user = UserCode(run, state, world, self._clock, records, run_dir)
        self._speeds: Sequence[float] = ()
        self._time_to_first_step_s: float | None = None
        self.is_stopped_early = False
        """True once a signal has interrupted something that need not be finished."""
        records.measure_peak()

    def __enter__(self) -> Self:
        self._meter.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._profiling.abandon()
        self._meter.close()
        if kind is not None:
            self._shutdown.abandon()

    def restore_or_initialize(self) -> None:
        """Go on from the newest state there is: of survivors, in memory, on disk; or from the initial weights."""
        self._show("setting up the model and its state")
        is_survivors = self._restorer.restore_or_initialize()
        if self._world.is_first:
            self._noise.smoothed = Smoothed.newest(self._records.metrics.last(NOISE_LINES), self.state.step)
        if self._outer is not None and not self._outer.begin_again(self._restorer.is_new):
            self.is_stopped_early = True
            return
        self._show("compiling" if self._plan.compile else "the first step")
        self._clock.lap()
        self._repeat_evaluation()
        if is_survivors:
            self._repeat_save()
        self._user.now.step = self.state.step
        self._user.at("start")

    def remaining_steps(self) -> Iterator[int]:
        """Yield the steps still to do, 0-based; a run given in minutes learns their number on the way."""
        self._stop.between_steps()
        if self.is_stopped_early or (self.state.step and self._has_signal()):
            return  # this world was formed for what survivors have to be saved
        while not self._is_paused and (self._pace.steps is None or self.state.step < self._pace.steps):
            self._heartbeat.begin(self.state.step)
            self._profiling.begin(self.state.step)
            self._user.now.begin(self.state.step)
            self._user.at("before_step")
            yield self.state.step
            self._stop.between_steps()
            if steps := self._pace.decide_length(self.state.step, self._world):
                self._records.length(steps)
                self._user.now.steps = steps

    def batch(self, step: int) -> list[Microbatch]:
        """Return this process's share of the step's samples."""
        fault("batch", step=step, rank=self._world.rank)
        with self._clock.time("data"):
            return self._batches.read(step, self._while_waiting)

    def _while_waiting(self) -> None:
        """Show that a wait for a store is no hang, and let a world that is over end meanwhile."""
        self._heartbeat.advance()
        self._stop.check()

    def forward_backward(self, batch: list[Microbatch]) -> Tensor:
        """Leave the global batch's gradient in the pieces; returns this rank's share of the loss."""
        self._noise.begin(self.state.step, batch, self.state.scaler.scale)
        loss = self._step.forward_backward(batch)
        self._user.at("after_backward")
        return loss

    def exchange(self, loss: Tensor) -> StepOutcome:
        """Return the step's outcome over all ranks, with what any of them asks for."""
        scale = self.state.scaler.scale
        outcome = self._step.exchange(
            loss,
            self._requests,
            lambda: (*self._rebalance.measure(), *self._noise.measure(scale), *self._user.measure()),
        )
        speeds, rest = outcome.measured[: self._rebalance.many], outcome.measured[self._rebalance.many :]
        self._speeds = speeds
        users = rest[self._noise.many :]
        self._noise.measured(self.state.step, rest[: self._noise.many])
        self._user.exchanged(replace(outcome, measured=users))
        return outcome

    def decide(self, outcome: StepOutcome) -> Action:
        """Decide what is done with the step, the same on all ranks. Raises: RunFailed if the run ends with it."""
        return self._policy.decide(outcome)

    def sum_over_sites(self, outcome: StepOutcome) -> StepOutcome | None:
        """Return the step's outcome over all sites, if they sum gradients (sync.from_step); else as it is.

        None: the gradient is dropped. The step is done again, unless a signal came meanwhile.
        """
        if self._outer is None:
            return outcome
        with self._clock.time("communication"):
            summed = self._outer.sum_gradients(outcome)
            if summed is None:
                self.state.drop_gradient()
                self.is_stopped_early = self._has_signal() or not self._outer.settle()
        return summed

    def optimizer_step(self, outcome: StepOutcome) -> None:
        """Apply the gradients at the step's learning rate; the step counts from then on."""
        step = self.state.step
        fault("commit", step=step, rank=self._world.rank)
        self._user.now.lr = learning_rate(self._run, step, self._pace.steps)
        norms = self._norms if self._norms.is_due(step) else None
        self._step.apply(self._step.update(outcome, self._user.now.lr), norms)
        self._policy.applied()
        self._user.at("after_step")

    def outer_step(self, outcome: StepOutcome) -> None:
        """Agree with the other sites on the weights, after the last step of a round; nothing without sites."""
        if self._outer is None or outcome.requests.stop or not (self._outer.is_due or outcome.requests.outer):
            return
        with self._clock.time("communication"):
            if not self._outer.settle():
                self.is_stopped_early = True

    def rebalance_if_due(self) -> None:
        """Deal microbatches out by measured speed from the next step on, if that pays."""
        step = self.state.step
        found = self._rebalance.measured(self._speeds, self._run.train.batches.at(step - 1))
        if found is None:
            return
        self._plan = found.plan
        for holder in (self._batches, self._checkpointer, self._noise):
            holder.replan(found.plan)
        self._records.rebalanced(found, step)

    def drop_step(self, outcome: StepOutcome, action: Action) -> None:
        """Drop the step's gradient, and mend what is wrong, so that the step can be done (again).

        Raises: RunFailed, Retryable if that cannot be.
        """
        self._policy.drop(outcome, action)

    def evaluate_if_due(self) -> None:
        """Score the model on held-out text every evaluate.every_steps, and after the last step."""
        done = self.state.step
        if not (self._evaluator.is_due(done) or done == self._pace.steps):
            return
        with self._clock.time("evaluate"), self._records.progress.during("evaluating"):
            self._restorer.make_replicas_agree()
            if self.state.step != done:
                return  # it went back
            self._evaluate()
        if self._evaluator.score is not None and not self.is_stopped_early:
            self._records.evaluated(done - 1, self._evaluator.score)
            self._user.now.validation_loss = self._evaluator.score.loss
            self._user.at("evaluate")

    def observe(self) -> None:
        """Write the line of the step that was applied, and show it."""
        seconds = self._clock.lap()
        batch = self._run.train.batches.at(self.state.step - 1)
        self._rebalance.took(self._clock.own_s, seconds["step"], batch)
        is_profiled = self._profiling.is_on
        if not is_profiled:
            self._pace.took(seconds["step"], self.state.step - 1)
        if self._time_to_first_step_s is None:
            self._time_to_first_step_s = time.monotonic() - self._began
        self._checkpointer.poll()
        self._heartbeat.has_written(self._checkpointer.written_bytes)
        self._restorer.show_safe_step()
        logged = self._user.take_logged()
        if self._world.is_first and self.state.last_update is not None:
            update, score = self.state.last_update, self._evaluator.score
            norms, samples = self._norms.of(update.step), self._batches.line(update.step) | self._noise.line()
            samples |= self._batches.cache_line()
            record = self._records.step(
                update,
                self.state.tokens,
                samples,
                seconds,
                self._clock.communication,
                logged,
                norms,
                is_profiled,
                self._outer.take_line() if self._outer is not None else None,
            )
            left_s = self._pace.left_s(self.state.step)
            self._records.progress.step(record, self._pace.steps, score.loss if score else None, left_s)
            if left_s is None and self._plan.compile:
                self._show("compiling")
        self._profiling.end(self.state.step, seconds)

    def save_if_due(self, outcome: StepOutcome) -> None:
        """Save by steps, by minutes or for a world that is to end; its time counts in the next step."""
        requests = outcome.requests
        if requests.stop:
            return  # `finish` saves, and waits for it
        with self._clock.time("checkpoint"):
            on_disk = requests.save or self._checkpointer.is_due_by_steps(self.state.step)
            in_memory = requests.memory_checkpoint or requests.hold
            if on_disk or in_memory:
                self._show("saving")
                self._restorer.make_replicas_agree()
            if on_disk:
                self._checkpointer.save(self.state, self._run.checkpoint.background and not requests.hold)
            if in_memory:
                self._memory.save()
            if on_disk or in_memory:
                self._show("")
        if on_disk:
            self._user.at("save")
        if requests.hold:
            self._show("waiting for processes to join")
            self._shutdown.hold()

    def finish(self) -> bool:
        """Save the last state, wait for the disk, write the report.

        Returns True if nothing is left to do. Raises: StorageError if the state cannot be saved.
        """
        self._profiling.finish()
        self._show("saving the last state")
        self._shutdown.save_last_state()
        if self.state.step == self._pace.steps and self._evaluator.score is None and not self.is_stopped_early:
            self._evaluate()
        self._heartbeat.has_written(self._checkpointer.written_bytes)
        finished = self.state.step == self._pace.steps and not self.is_stopped_early
        finished = finished and (self._outer is None or not self._outer.is_due)
        self._user.at("end")
        self._show("writing the report")
        self._records.report(self._data, self._evaluator, finished, self._time_to_first_step_s)
        with self._records.progress.during("verifying what was saved"):
            self._shutdown.close()
        logged = self._user.take_logged()
        more = ({"paused_at": self.state.step} if self._is_paused and not finished else {}) | (
            {"user": logged} if logged else {}
        )
        self._records.events.write("end", step=self.state.step, finished=finished, **more)
        return finished or self._is_paused

    def _evaluate(self) -> None:
        """Score the model, unless a signal comes: whoever goes on with the run does it then."""
        batches = itertools.count(1)
        try:
            self._evaluator.evaluate(lambda: self._go_on(next(batches)))
        except StoppedEarly:
            self.is_stopped_early = True

    def _show(self, what: str) -> None:
        """Show the user what is done now beside training; "" if nothing is."""
        self._records.progress.doing(what)

    def _go_on(self, batch: int) -> None:
        """Show that this process gets on with a batch. Raises: StoppedEarly once a signal came to any process."""
        self._heartbeat.advance()
        self._show(f"evaluating, batch {batch} of {self._evaluator.batches}")
        fault("evaluate", step=self.state.step)
        if self._has_signal():
            raise StoppedEarly

    def _has_signal(self) -> bool:
        """Return True once a signal came to any process. All call it together."""
        has_signal = torch.tensor(float(self._stop.number is not None), device=self._world.device)
        return self._world.sum(has_signal).item() > 0

    def _requests(self) -> Requests:
        return Requests(
            stop=self._stop.is_requested(),
            save=self._checkpointer.is_due_by_time or (self._stop.is_to_hold and self._stop.is_to_save),
            quarantine=self._batches.are_unreadable,
            memory_checkpoint=self._memory.is_due(self.state.step + 1, self._pace.step_s),
            hold=self._stop.is_to_hold,
            outer=self._outer is not None and self._outer.is_left_behind,
        )

    def _repeat_evaluation(self) -> None:
        """Run the evaluation again that was due after the step before, if it was interrupted."""
        done = self.state.step
        if done and not self._world.share_first(lambda: self._records.metrics.has(done - 1, "validation_loss"), bool):
            self.evaluate_if_due()

    def _repeat_save(self) -> None:
        """Save again what was to be saved before the last world ended, and was interrupted."""
        done = self.state.step
        if self._checkpointer.has_missed(done):
            with self._clock.time("checkpoint"):
                self._restorer.make_replicas_agree()
                self._checkpointer.save(self.state, self._run.checkpoint.background)

    @property
    def _is_paused(self) -> bool:
        """True if the run is to stop here, for now (train.pause_at)."""
        return 0 < self._run.train.pause_at <= self.state.step
