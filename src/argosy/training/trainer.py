"""Everything a run needs, laid out and ready: the parts that the loop calls by name."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from argosy.checkpoint.memory import memory_folder
from argosy.config.dump import save_run
from argosy.config.identity import config_sha256
from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.errors import Retryable, RunFailed, StorageError
from argosy.faults import fault
from argosy.models.batch import Microbatch
from argosy.observe.clock import StepClock
from argosy.observe.heartbeat import Heartbeat
from argosy.observe.metrics import forget_peak_memory, peak_memory_bytes
from argosy.observe.peak import device_name, software
from argosy.parallel.apply import apply
from argosy.parallel.world import World, give_back_freed_memory
from argosy.plan.plan import Plan
from argosy.training.bad_steps import MOST_REWINDS, REMEDY, BadStepPolicy, Verdict
from argosy.training.batches import Batches
from argosy.training.checkpointer import Checkpointer
from argosy.training.evaluation import HeldOut, Score, evaluate
from argosy.training.integrity import Integrity
from argosy.training.memory_checkpoints import MemoryCheckpointing
from argosy.training.pace import Pace
from argosy.training.records import Records
from argosy.training.recovery import recover
from argosy.training.replay_check import check_can_replay
from argosy.training.schedule import learning_rate_factor
from argosy.training.state import Survivor, TrainState
from argosy.training.step import Step, StepOutcome, Wishes
from argosy.training.stop import StopSignal
from argosy.training.summary import write_report

HOLD_S = 20.0
"""So long a rank stands still for a world that is to end; then it goes on, as nobody has ended it."""
MOST_RETRIES = 20
"""How often a step is done again with the same samples: a loss scale is found in fewer."""


class Trainer:
    """One process's part of a run. Each method is one line of the loop."""

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
        if survivor.memory_before_bytes is None:
            survivor.memory_before_bytes = peak_memory_bytes(world.device)
        self._run, self._plan, self._world, self._run_dir, self._stop = run, plan, world, run_dir, stop
        self._survivor, self._heartbeat = survivor, heartbeat
        torch.use_deterministic_algorithms(run.train.deterministic)
        torch.manual_seed(run.seed * 1_000_003 + world.rank)
        self._records = records = Records(run, plan, world, run_dir)

        check_can_replay(run, plan, world.device)
        model = apply(plan, run, world)
        self._data = open_data(run.data, run.seed, run.train.global_batch)
        held_out = [source.held_out() for source in self._data.sources]
        self._held_out = HeldOut.read(held_out, run.data.seq_len, run.evaluate.tokens)

        self.state = TrainState.begin(model, plan, run)
        self._batches = Batches(run, plan, self._data, self.state, world, records.events)

        identity, lasting = self._data.identity, config_sha256(run)
        self._checkpointer = Checkpointer(
            run_dir, run.checkpoint, plan, identity, world, records.events, records.progress, lasting, stop.check
        )
        self._judge = BadStepPolicy(run.resilience, self._batches.stage, survivor.counts)
        self._pace = Pace(run, self._held_out.tokens)
        self._clock = StepClock(world.device, heartbeat)
        self._integrity = Integrity(run, self.state, self._batches, world, records, self._clock, heartbeat)
        self._step = Step(run, self.state, world, self._clock, self._integrity)
        self._outcome = StepOutcome(0.0, 0.0, False, Wishes(), None)
        self._retries = 0
        self._memory_checkpoints = MemoryCheckpointing()
        self._score: Score | None = None
        records.measure_peak()
        self._time_to_first_step_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What goes wrong here, or in another process of this world, leaves no thread or process of this one behind."""
        if kind is not None:
            self._checkpointer.abandon()
            self._survivor.last_save_s = self._checkpointer.last_save_s
            self._memory_checkpoints.abandon()
            self._batches.close()

    def restore_or_initialize(self) -> None:
        """Go on from the newest state there is: of survivors, in memory, on disk; or from the initial weights."""
        found = recover(self.state, self._survivor.state, self._checkpointer, memory_folder(), self._world)
        if found.tier == "none" and self._run.model.weights is not None:
            self._checkpointer.read_weights(self.state, self._run.model.weights)
        self._batches.follow()
        self._begin_memory_checkpoints()
        self._records.introduce()
        if found.tier != "none":
            self._records.recovered(found)
        if self._plan.compile:
            self._records.progress.say(" compiling: the first steps take a minute or two")
        if self._world.is_first:
            self._records.metrics.forget_from(self.state.step)
            if found.decided is not None:
                self._records.write_missing_line(found.decided, self.state.tokens, self._batches.line)
        self._judge.go_on_from(self._world.gather(self._survivor.counts))
        remember = self._judge.remember if found.tier == "live" else self._judge.went_back
        remember(self._recalled())
        self._take_over()
        self._records.started(self.state.step)
        self._clock.lap()
        if found.tier == "live":
            self._make_up()

    def remaining_steps(self) -> Iterator[int]:
        """The steps still to do, 0-based; a run given in minutes learns their number on the way."""
        self._stop.check()
        while not self._is_paused and (self._pace.steps is None or self.state.step < self._pace.steps):
            self._heartbeat.begin(self.state.step)
            yield self.state.step
            self._stop.check()
            self._decide_length()

    def batch(self, step: int) -> list[Microbatch]:
        """This process's share of the step's samples."""
        fault("batch", step=step, rank=self._world.rank)
        with self._clock.time("data"):
            return self._batches.read(step)

    def forward_backward(self, batch: list[Microbatch]) -> Tensor:
        """Leave the global batch's gradient in the pieces; returns this rank's share of the loss."""
        return self._step.forward_backward(batch)

    def judge(self, step: int, loss: Tensor) -> Verdict:
        """Meet all ranks, and decide what becomes of the step. Raises: RunFailed if the run ends with it."""
        self._outcome = outcome = self._step.exchange(loss, self._wishes)
        if outcome.replicas_differ or outcome.wishes.quarantine or outcome.wishes.retry:
            return Verdict.RETRY
        if not math.isfinite(outcome.gradient_norm) and not self.state.scaler.is_at_floor:
            self.state.scaler.update(outcome.gradient_norm)
            self._records.tell("loss_scale", step=step, scale=self.state.scaler.scale)
            return Verdict.RETRY
        ruling = self._judge.rule(step, outcome.loss, outcome.gradient_norm)
        if ruling.reason is None and ruling.doubt is not None:
            self._records.transient(outcome, ruling.doubt)
        elif ruling.reason is not None and ruling.verdict is not Verdict.RETRY:
            self._records.bad_step(step, outcome, ruling, self._batches.samples(step))
        return ruling.verdict

    def apply(self, step: int) -> None:
        """Apply the gradients at the step's learning rate; the step counts from then on."""
        fault("commit", step=step, rank=self._world.rank)
        self._step.update(self._step.decide(self._outcome, self._learning_rate(step)))
        self._retries = 0

    def set_aside(self, step: int, verdict: Verdict) -> None:
        """Drop the gradient, mend what is wrong, and leave the state such that the step can be done (again).

        Raises: RunFailed, Retryable if that cannot be.
        """
        self.state.drop_gradient()
        if verdict is Verdict.RETRY:
            self._retries = 0 if self._outcome.wishes.quarantine else self._retries + 1
            if self._retries > MOST_RETRIES:
                raise RunFailed(f"step {step} was done {MOST_RETRIES} times, and every time something else was wrong.")
            if self._outcome.wishes.quarantine:
                self._batches.quarantine()
            if self._outcome.replicas_differ:
                self._heal_replicas()
            return
        self._batches.skip(step)
        if verdict is Verdict.REWIND and self._go_back() and not self._judge.rewound(self.state.step, self._recalled()):
            raise RunFailed(
                f"step {step} is bad again after the run went back to step {self.state.step} {MOST_REWINDS} times and "
                f"skipped other samples. {REMEDY}"
            )

    def evaluate_if_due(self) -> None:
        """Score the model on held-out text every evaluate.every_steps, and after the last step."""
        every, done = self._run.evaluate.every_steps, self.state.step
        if not ((every and done % every == 0) or done == self._pace.steps):
            return
        with self._clock.time("evaluate"):
            fault("evaluate", step=done)
            self._make_replicas_agree()
            if self.state.step != done:
                return  # it went back
            self._score = self._evaluate()
        if self._score and self._world.is_first:
            score = {"validation_loss": self._score.loss, "bits_per_byte": self._score.bits_per_byte}
            self._records.metrics.write({"step": done - 1, **score})

    def observe(self) -> None:
        """Write the line of the step that was applied, and show it."""
        seconds = self._clock.lap()
        self._pace.took(seconds["step"])
        if self._time_to_first_step_s is None:
            self._time_to_first_step_s = time.monotonic() - self._began
        self._checkpointer.poll()
        self._show_safe_step()
        if self._world.is_first and self.state.decided is not None:
            decided = self.state.decided
            record = self._records.step(decided, self.state.tokens, self._batches.line(decided.step), seconds)
            validation_loss = self._score.loss if self._score else None
            self._records.progress.step(record, self._pace.steps, validation_loss, self._pace.left_s(self.state.step))

    def save_if_due(self) -> None:
        """Save by steps, by minutes, or because the run is asked to stop (its time counts in the next step)."""
        if self.is_asked_to_stop:
            return  # `finish` saves, and waits for it
        with self._clock.time("checkpoint"):
            saves = self._outcome.wishes.save or self._checkpointer.is_due_by_steps(self.state.step)
            copies = self._outcome.wishes.copy or self._outcome.wishes.hold
            if saves or copies:
                self._make_replicas_agree()
            if saves:
                self._checkpointer.save(self.state, self._run.checkpoint.background)
            if copies:
                self._memory_checkpoints.make(self.state)
        if self._outcome.wishes.hold:
            self._hold()

    def _hold(self) -> None:
        """Stand still, with the state where others can take it over, until this world is over. Raises: WorldIsOver."""
        self._memory_checkpoints.wait()
        self._show_safe_step()
        self._heartbeat.enter("waiting")
        self._stop.hold(HOLD_S)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether any process was, before the step that was judged last."""
        return self._outcome.wishes.stop

    def finish(self) -> bool:
        """Save the last state, wait for the disk, write the report.

        Returns whether nothing is left to do. Raises: StorageError if the state cannot be saved.
        """
        self._heartbeat.enter("finishing")
        self._records.progress.close()
        self._batches.close()
        self._make_replicas_agree()
        if error := self._checkpointer.finish(self.state):
            raise StorageError(
                f"{self._run_dir}: the state after step {self.state.step} could not be saved ({error}). Mend that, and "
                "run the same command again to go on from the newest checkpoint."
            )
        finished = self.state.step == self._pace.steps
        if finished and self._score is None:
            self._score = self._evaluate()
        if self._world.is_first:
            write_report(
                self._run,
                self._run_dir,
                self._data,
                self._held_out,
                self._score,
                self._records.progress,
                self._plan,
                self._records.prediction,
                {
                    "status": "finished" if finished else "stopped",
                    "peak_flops": self._records.peak_flops,
                    "time_to_first_step_s": self._time_to_first_step_s,
                    "memory_before_bytes": self._survivor.memory_before_bytes,
                    "device": device_name(self._world.device),
                    "software": software(self._world.device),
                },
            )
        self._memory_checkpoints.wait()
        self._checkpointer.close()
        self._records.events.write("end", step=self.state.step, finished=finished)
        return finished or self._is_paused

    def _wishes(self) -> Wishes:
        return Wishes(
            stop=self._stop.number is not None,
            save=self._checkpointer.is_due_by_time,
            quarantine=self._batches.are_unreadable,
            copy=self._memory_checkpoints.is_due(self.state.step + 1, self._pace.step_s),
            hold=self._stop.is_to_hold,
        )

    def _show_safe_step(self) -> None:
        """Show what the run would go back to if everything were lost now."""
        copied = self._memory_checkpoints.step
        steps = [*self._checkpointer.committed, *([] if copied is None else [copied])]
        if steps:
            self._heartbeat.can_go_back_to(max(steps))

    def _heal_replicas(self) -> None:
        """Copies of the state differ: heal those of a minority, or go back to a checkpoint.

        Raises: Retryable if there is no majority and no checkpoint.
        """
        found, is_well = self._integrity.mend()
        if not is_well:
            if not self._go_back():
                self._survivor.state = None  # it is not to be trusted
                raise Retryable(
                    f"{found[0].name} differs between ranks {found[0].ranks}, there is no telling which is right, and "
                    "no checkpoint was saved yet. The same command starts from the beginning."
                )
            self._judge.went_back(self._recalled())
        self._integrity.show_doubt({rank for corrupt in found for rank in corrupt.ranks})

    def _go_back(self) -> bool:
        """Take the state back from the newest checkpoint, which was clean when it was saved; False if there is none.

        Samples that were skipped stay so.
        """
        skipped, history, left = self.state.skipped, self.state.history, self.state.step
        self.state.in_update = True
        checkpoint = self._checkpointer.restore(self.state, at_most=left)
        self.state.in_update = False
        if checkpoint is None:
            return False
        self.state.skipped, self.state.decided = skipped, None
        self.state.history = history.turned_back(self.state.step)
        self._begin_memory_checkpoints()
        self._batches.follow()
        if self._world.is_first:
            self._records.metrics.forget_from(self.state.step)
        self._records.tell("rewind", step=left, to_step=self.state.step)
        self._records.progress.say(f" back from step {left} to {self.state.step}: {checkpoint.folder}")
        return True

    def _begin_memory_checkpoints(self) -> None:
        self._memory_checkpoints.wait()
        self._memory_checkpoints = MemoryCheckpointing.begin(self._run, self.state, self._world, self._records)

    def _take_over(self) -> None:
        """Be what survives of this process; what survived of the last world has served."""
        before, self._survivor.state = self._survivor.state, self.state
        saved_s = self._survivor.last_save_s
        unsaved_s = max(self._world.gather(0.0 if saved_s is None else time.monotonic() - saved_s))
        self._checkpointer.last_save_s -= unsaved_s
        if before is not None:  # two states were in memory, which no step needs
            del before
            give_back_freed_memory()
            forget_peak_memory(self._world.device)

    def _make_up(self) -> None:
        """Do what was due after the last step, and was cut off when the world ended; a save also if due before."""
        done = self.state.step
        if done and not self._world.share_first(lambda: self._records.metrics.has(done - 1, "validation_loss")):
            self.evaluate_if_due()
        if self._checkpointer.has_missed(done):
            with self._clock.time("checkpoint"):
                self._make_replicas_agree()
                self._checkpointer.save(self.state, self._run.checkpoint.background)

    def _make_replicas_agree(self) -> None:
        """Before a save or an evaluation: what is saved or scored is clean, as far as it can be known."""
        if self._integrity.replicas_differ():
            self._heal_replicas()

    def _recalled(self) -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm of the last steps, as the first process has them in its metrics."""
        last = self._world.share_first(lambda: self._records.metrics.last(self._run.resilience.spike_window))
        return [(record["step"], record["loss"], record["grad_norm"]) for record in last]

    @property
    def _is_paused(self) -> bool:
        """Whether the run is to stop here, for now."""
        return 0 < self._run.train.pause_at <= self.state.step

    def _learning_rate(self, step: int) -> float:
        factor = learning_rate_factor(step, self._pace.steps, self._run.schedule)
        return self._run.optimizer.lr * factor

    def _evaluate(self) -> Score | None:
        if not self._held_out.tokens:
            return None
        return evaluate(self.state.model, self._held_out, self._plan.microbatch, self._world)

    def _decide_length(self) -> None:
        """Turn a budget of minutes into a number of steps, once, the same on every process and in run.toml."""
        steps = self._pace.steps_if_due(self.state.step)
        if steps is None:
            return
        mine = torch.tensor(steps if self._world.is_first else 0, device=self._world.device)
        self._pace.steps = int(self._world.sum(mine))
        train = self._run.train.model_copy(update={"steps": self._pace.steps})
        self._run = self._run.model_copy(update={"train": train})
        self._records.events.write("length", steps=self._pace.steps, minutes=train.minutes)
        if self._world.is_first:
            save_run(self._run, self._run_dir / "run.toml")
