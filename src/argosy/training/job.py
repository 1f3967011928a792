"""Everything a run needs, laid out and ready: the parts that the loop calls by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.errors import RunFailed
from argosy.models.batch import Microbatch, microbatches
from argosy.models.experts import Load
from argosy.observe.clock import StepClock
from argosy.observe.events import Events
from argosy.observe.metrics import Metrics, peak_memory_bytes
from argosy.observe.peak import device_name, matmul_peak_flops, software
from argosy.observe.progress import Progress
from argosy.optim.optimizer import Optimizer
from argosy.parallel.apply import apply
from argosy.parallel.expert import balance_experts
from argosy.parallel.model import DTYPES
from argosy.parallel.pieces import clip_gradients
from argosy.parallel.world import World, processes_here
from argosy.plan.flops import train_flops_per_token
from argosy.plan.machine import Hardware, machine_at_hand
from argosy.plan.plan import Plan
from argosy.plan.predict import Prediction, predict
from argosy.precision.scaler import LossScaler
from argosy.training.evaluation import HeldOut, Score, evaluate
from argosy.training.judge import Judge, Verdict
from argosy.training.keeper import Keeper
from argosy.training.pace import Pace
from argosy.training.schedule import learning_rate_factor
from argosy.training.state import TrainState
from argosy.training.step import StepOutcome, Wishes, forward_backward
from argosy.training.stop import StopSignal
from argosy.training.summary import headline, write_report


class Job:
    """One process's part of a run. Each method is one line of the loop."""

    def __init__(self, run: RunConfig, plan: Plan, world: World, run_dir: Path, stop: StopSignal):
        self._began = time.monotonic()
        self._memory_before_bytes = peak_memory_bytes(world.device)
        self._run, self._plan, self._world, self._run_dir, self._stop = run, plan, world, run_dir, stop
        torch.use_deterministic_algorithms(run.train.deterministic)
        torch.manual_seed(run.seed * 1_000_003 + world.rank)
        self.progress = Progress(enabled=world.is_first)
        self.events = Events(run_dir, f"rank-{world.rank}")
        self.metrics = Metrics(run_dir)

        model = apply(plan, run, world)
        rows = run.train.global_batch // plan.dp
        self._data = open_data(run.data, run.seed, run.train.global_batch)
        self._loader = self._data.loader(slice(model.dp_rank * rows, (model.dp_rank + 1) * rows))
        held_out = [source.held_out() for source in self._data.sources]
        self._held_out = HeldOut.read(held_out, run.data.seq_len, run.evaluate.tokens)

        scaler = LossScaler() if plan.precision == "fp16" else LossScaler(scale=1.0, growth_steps=0)
        self.state = TrainState(model, Optimizer(model.masters, run.optimizer, run.seed), scaler)

        self._keeper = Keeper(run_dir, run.checkpoint, plan, self._data.identity, world, self.events, self.progress)
        self._judge, self._pace = Judge(), Pace(run, self._held_out.tokens)
        self._clock = StepClock(world.device)
        self._score: Score | None = None
        self._gradient_norm = 0.0
        self._loads: dict[int, Load] = {}
        self._flops_per_token = train_flops_per_token(run.model, run.data.seq_len)
        self._peak_flops = self._measure_peak()
        self._prediction: Prediction | None = None
        self._time_to_first_step_s: float | None = None

    def restore_or_initialize(self) -> None:
        """Go on from the newest whole checkpoint; without one, from model.weights or the initial weights."""
        checkpoint = self._keeper.restore(self.state)
        if checkpoint is None and self._run.model.weights is not None:
            checkpoint = self._keeper.read_weights(self.state, self._run.model.weights)
        if self._world.is_first:
            self._prediction = self._predict()
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._plan.save(self._run_dir / "plan.toml", self._prediction.toml() if self._prediction else "")
        self.progress.say(headline(self._run, self._plan, self._peak_flops, self._prediction))
        if checkpoint is not None:
            self.progress.say(f" from {checkpoint.folder}")
        if self._plan.compile:
            self.progress.say(" compiling: the first steps take a minute or two")
        if self._world.is_first:
            self.metrics.forget_from(self.state.step)
        self.events.write(
            "start",
            step=self.state.step,
            plan=str(self._plan),
            world_size=self._world.size,
            peak_flops=self._peak_flops,
            torch=torch.__version__,
        )
        self._clock.lap()

    def remaining_steps(self) -> Iterator[int]:
        """The steps still to do, 0-based; a run given in minutes learns their number on the way."""
        while self._pace.steps is None or self.state.step < self._pace.steps:
            yield self.state.step
            self._decide_length()

    def batch(self, step: int) -> list[Microbatch]:
        """This process's share of the step's samples."""
        with self._clock.time("data"):
            rows = self._loader.batch(step)
            return microbatches(rows, self._plan.microbatch, self._data.eod_id, self._world.device)

    def forward_backward(self, batch: list[Microbatch]) -> StepOutcome:
        """Leave the global batch's gradient in the parameters."""
        wishes = Wishes(stop=self._stop.number is not None, save=self._keeper.is_due_by_time)
        model, scale = self.state.model, self.state.scaler.scale
        outcome = forward_backward(model, batch, scale, self._world, self._clock, wishes)
        if self._run.model.moe.experts:
            with self._clock.time("communication"):
                self._loads = balance_experts(model.moes, self._run.model, self._world)
        return outcome

    def judge(self, step: int, outcome: StepOutcome) -> Verdict:
        """Clip the gradients and decide whether they may be applied; the step counts either way."""
        with self._clock.time("optimizer"):
            pieces, scaler = self.state.model.pieces, self.state.scaler
            self._gradient_norm = clip_gradients(pieces, self._run.optimizer.grad_clip, scaler.scale).item()
        if not scaler.update(self._gradient_norm) and not scaler.is_at_floor:
            self.events.write("loss_scale", step=step, scale=scaler.scale)
            return Verdict.SKIP
        verdict = self._judge.rule(step, outcome.loss, self._gradient_norm)
        if verdict is Verdict.SKIP:
            self.events.write("bad_step", step=step, loss=str(outcome.loss), grad_norm=str(self._gradient_norm))
            self.progress.say(f" step {step} skipped: loss {outcome.loss}, gradient norm {self._gradient_norm}")
        return verdict

    def optimizer_step(self, step: int) -> None:
        """Apply the gradients at the step's learning rate."""
        with self._clock.time("optimizer"):
            self.state.optimizer.set_learning_rate(self._learning_rate(step))
            self.state.model.before_update()
            self.state.optimizer.step()
        with self._clock.time("communication"):
            self.state.model.after_update()

    def evaluate_if_due(self, step: int) -> None:
        """Score the model on held-out text every evaluate.every_steps, and after the last step."""
        self.state.model.zero_gradients()
        self.state.step = step + 1
        self.state.tokens += self._tokens_per_step
        every = self._run.evaluate.every_steps
        if not ((every and self.state.step % every == 0) or self.state.step == self._pace.steps):
            return
        with self._clock.time("evaluate"):
            self._score = self._evaluate()
        if self._score and self._world.is_first:
            score = {"validation_loss": self._score.loss, "bits_per_byte": self._score.bits_per_byte}
            self.metrics.write({"step": step, **score})

    def observe(self, step: int, outcome: StepOutcome) -> None:
        """Write the step's line and show it."""
        seconds = self._clock.lap()
        self._pace.took(seconds["step"])
        if self._time_to_first_step_s is None:
            self._time_to_first_step_s = time.monotonic() - self._began
        self._keeper.poll()
        if not self._world.is_first:
            return
        step_s = seconds["step"] - seconds.get("evaluate", 0.0) - seconds.get("checkpoint", 0.0)
        tokens_per_s = self._tokens_per_step / step_s
        record = {
            "step": step,
            "tokens": self.state.tokens,
            "loss": outcome.loss,
            "grad_norm": self._gradient_norm,
            "lr": self._learning_rate(step),
            "step_time_s": round(step_s, 6),
            "tokens_per_s": round(tokens_per_s, 1),
            "mfu": round(tokens_per_s * self._flops_per_token / self._peak_flops, 4),
            "memory_bytes": peak_memory_bytes(self._world.device),
            "seconds": {category: round(value, 6) for category, value in seconds.items()},
        }
        if self._loads:
            record["experts"] = {str(layer): load.record() for layer, load in self._loads.items()}
        self.metrics.write(record)
        validation_loss = self._score.loss if self._score else None
        self.progress.step(record, self._pace.steps, validation_loss, self._pace.left_s(self.state.step))

    def save_if_due(self, outcome: StepOutcome) -> None:
        """Save by steps, by minutes, or because the run is asked to stop (its time counts in the next step)."""
        if outcome.wishes.stop:
            return  # `finish` saves, and waits for it
        with self._clock.time("checkpoint"):
            if outcome.wishes.save or self._keeper.is_due_by_steps(self.state.step):
                self._keeper.save(self.state, self._run.checkpoint.background)

    def finish(self) -> None:
        """Save the last state, wait for the disk, write the report. Raises: RunFailed if it cannot be saved."""
        self.progress.close()
        self._loader.close()
        self._keeper.save(self.state, background=False)
        self._keeper.wait()
        if self._keeper.last_error:
            raise RunFailed(
                f"{self._run_dir}: the state after step {self.state.step} could not be saved "
                f"({self._keeper.last_error}). Mend that, and run the same command again to go on from the newest "
                "checkpoint."
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
                self.progress,
                self._plan,
                self._prediction,
                {
                    "status": "finished" if finished else "stopped",
                    "peak_flops": self._peak_flops,
                    "time_to_first_step_s": self._time_to_first_step_s,
                    "memory_before_bytes": self._memory_before_bytes,
                    "device": device_name(self._world.device),
                    "software": software(self._world.device),
                },
            )
        self.events.write("end", step=self.state.step, finished=finished)

    @property
    def _tokens_per_step(self) -> int:
        return self._run.train.global_batch * self._run.data.seq_len

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
        self.events.write("length", steps=self._pace.steps, minutes=train.minutes)
        if self._world.is_first:
            save_run(self._run, self._run_dir / "run.toml")

    def _predict(self) -> Prediction | None:
        """What the plan will take, if anybody knows this machine's devices."""
        world, number_format = self._world, "bf16" if self._plan.precision == "fp8" else self._plan.precision
        hardware = Hardware(
            device=device_name(world.device),
            processes=world.size,
            per_node=processes_here(world.size),
            peak_flops_per_s={number_format: self._peak_flops / world.size},
        )
        machine = machine_at_hand(self._run, hardware)
        return None if machine is None else predict(self._plan, self._run, machine)

    def _measure_peak(self) -> float:
        """The matmul peak of all processes, measured on all at once, since they share the machine."""
        self._world.barrier()
        mine = matmul_peak_flops(self._world.device, DTYPES[self._plan.precision])
        return self._world.sum(torch.tensor(mine, dtype=torch.float64, device=self._world.device)).item()
