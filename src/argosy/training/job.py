"""Everything a run needs, laid out and ready: the parts that the loop calls by name."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.checkpoint.exchange import travels
from argosy.checkpoint.history import Position
from argosy.checkpoint.memory import MemoryCopies, memory_folder
from argosy.checkpoint.recover import recover
from argosy.config.dump import save_run
from argosy.config.identity import config_sha256
from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.errors import Retryable, RunFailed, StorageError
from argosy.faults import fault
from argosy.models.batch import Microbatch
from argosy.observe.clock import StepClock
from argosy.observe.events import Events
from argosy.observe.metrics import Metrics, peak_memory_bytes
from argosy.observe.peak import device_name, matmul_peak_flops, software
from argosy.observe.progress import Progress
from argosy.observe.vitals import Vitals
from argosy.optim.optimizer import Optimizer
from argosy.parallel.apply import apply
from argosy.parallel.expert import loads_by_layer, loads_of
from argosy.parallel.gradients import square_share, unscale
from argosy.parallel.model import DTYPES
from argosy.parallel.world import World, processes_here
from argosy.plan.flops import train_flops_per_token
from argosy.plan.machine import Hardware, machine_at_hand
from argosy.plan.plan import Plan
from argosy.plan.predict import Prediction, predict
from argosy.precision.scaler import LossScaler
from argosy.training.batches import Batches
from argosy.training.evaluation import HeldOut, Score, evaluate
from argosy.training.fingerprint import Fingerprints
from argosy.training.judge import MOST_REWINDS, REMEDY, Judge, Ruling, Verdict
from argosy.training.keeper import Keeper
from argosy.training.pace import Pace
from argosy.training.recompute import Result, check_can_recompute, compare
from argosy.training.schedule import learning_rate_factor
from argosy.training.state import Decision, Survivor, TrainState
from argosy.training.step import Share, StepOutcome, Wishes, exchange, forward_backward
from argosy.training.stop import StopSignal
from argosy.training.summary import headline, write_report

FROM = {
    "live": "which survivors have",
    "memory": "of copies in memory",
    "disk": "of the newest checkpoint",
}
"""Where a state was taken from -> in words."""
MOST_RETRIES = 20
"""How often a step is done again with the same samples: a loss scale is found in fewer."""


class Job:
    """One process's part of a run. Each method is one line of the loop."""

    def __init__(
        self,
        run: RunConfig,
        plan: Plan,
        world: World,
        run_dir: Path,
        stop: StopSignal,
        survivor: Survivor,
        vitals: Vitals | None = None,
    ):
        self._began = time.monotonic()
        self._memory_before_bytes = peak_memory_bytes(world.device)
        self._run, self._plan, self._world, self._run_dir, self._stop = run, plan, world, run_dir, stop
        self._survivor, self._vitals = survivor, vitals
        torch.use_deterministic_algorithms(run.train.deterministic)
        torch.manual_seed(run.seed * 1_000_003 + world.rank)
        self.progress = Progress(enabled=world.is_first)
        self.events = Events(run_dir, f"rank-{world.rank}")
        self.metrics = Metrics(run_dir)

        check_can_recompute(run, plan, world.device)
        model = apply(plan, run, world)
        self._data = open_data(run.data, run.seed, run.train.global_batch)
        held_out = [source.held_out() for source in self._data.sources]
        self._held_out = HeldOut.read(held_out, run.data.seq_len, run.evaluate.tokens)

        scaler = LossScaler() if plan.precision == "fp16" else LossScaler(scale=1.0, growth_steps=0)
        self.state = TrainState(model, Optimizer(model.masters, run.optimizer, run.seed), scaler)

        self._batches = Batches(run, plan, self._data, self.state, world, self.events)

        identity, lasting = self._data.identity, config_sha256(run)
        self._keeper = Keeper(run_dir, run.checkpoint, plan, identity, world, self.events, self.progress, lasting)
        self._judge, self._pace = Judge(run.resilience, self._batches.stage), Pace(run, self._held_out.tokens)
        self._fingerprints = Fingerprints(model, self.state.optimizer, world)
        self._clock = StepClock(world.device, vitals)
        self._outcome = StepOutcome(0.0, 0.0, False, Wishes(), None)
        self._retries = 0
        self._copies: MemoryCopies | None = None
        self._score: Score | None = None
        self._flops_per_token = train_flops_per_token(run.model, run.data.seq_len)
        self._peak_flops = self._measure_peak()
        self._prediction: Prediction | None = None
        self._time_to_first_step_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What goes wrong here, or in another process of this world, leaves no thread or process of this one behind."""
        if kind is not None:
            self._keeper.abandon()
            if self._copies is not None:
                self._copies.abandon()
            self._batches.close()

    def restore_or_initialize(self) -> None:
        """Go on from the newest state there is: of survivors, in memory, on disk; or from the initial weights."""
        found = recover(self.state, self._survivor.state, self._keeper, memory_folder(), self._world)
        if found.tier == "none" and self._run.model.weights is not None:
            self._keeper.read_weights(self.state, self._run.model.weights)
        self._batches.follow()
        self._begin_copies()
        if self._world.is_first:
            self._prediction = self._predict()
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._plan.save(self._run_dir / "plan.toml", self._prediction.toml() if self._prediction else "")
        self.progress.say(headline(self._run, self._plan, self._peak_flops, self._prediction))
        if found.tier != "none":
            lost = f", {found.steps_lost} steps lost" if found.steps_lost else ""
            self.progress.say(f" from step {found.step}, {FROM[found.tier]}{lost}")
            facts = {key: getattr(found, key) for key in ("step", "steps_lost", "sent_bytes", "own_bytes")}
            took_s, refused = round(found.seconds, 3), list(found.refused)
            self._tell("recovered", source=found.tier, **facts, seconds=took_s, refused=refused)
        if self._plan.compile:
            self.progress.say(" compiling: the first steps take a minute or two")
        if self._world.is_first:
            self.metrics.forget_from(self.state.step)
            self._write_missing_line(found.decided)
        self._judge.remember(self._recalled())
        self._survivor.state = self.state
        self.events.write(
            "start",
            step=self.state.step,
            plan=str(self._plan),
            world_size=self._world.size,
            peak_flops=self._peak_flops,
            hardware=vars(self._hardware()),
            torch=torch.__version__,
        )
        self._clock.lap()

    def remaining_steps(self) -> Iterator[int]:
        """The steps still to do, 0-based; a run given in minutes learns their number on the way."""
        self._stop.check()
        while not self._is_paused and (self._pace.steps is None or self.state.step < self._pace.steps):
            if self._vitals is not None:
                self._vitals.begin(self.state.step)
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
        self.state.model.watch(self._is_recomputed)
        loss = forward_backward(self.state.model, batch, self.state.scaler.scale, self._clock)
        pieces, at = self.state.model.pieces, {"step": self.state.step, "rank": self._world.rank}
        fault("gradient", **at, tensors=lambda: {p.name: p.value.grad for p in pieces if p.value.grad is not None})
        fault("loss", **at, tensors=lambda: {"loss": loss})
        return loss

    def judge(self, step: int, loss: Tensor) -> Verdict:
        """Meet all ranks, and decide what becomes of the step. Raises: RunFailed if the run ends with it."""
        self._outcome = outcome = self._exchange(step, loss)
        if outcome.copies_differ or outcome.wishes.quarantine or outcome.wishes.retry:
            return Verdict.RETRY
        if not math.isfinite(outcome.gradient_norm) and not self.state.scaler.is_at_floor:
            self.state.scaler.update(outcome.gradient_norm)
            self._tell("loss_scale", step=step, scale=self.state.scaler.scale)
            return Verdict.RETRY
        ruling = self._judge.rule(step, outcome.loss, outcome.gradient_norm)
        if ruling.reason is not None:
            self._tell_of_bad_step(step, outcome, ruling)
        return ruling.verdict

    def apply(self, step: int) -> None:
        """Apply the gradients at the step's learning rate; the step counts from then on."""
        fault("commit", step=step, rank=self._world.rank)
        with self._clock.time("optimizer"):
            self.state.apply(
                Decision(
                    step=step,
                    loss=self._outcome.loss,
                    gradient_norm=self._outcome.gradient_norm,
                    max_norm=self._run.optimizer.grad_clip,
                    learning_rate=self._learning_rate(step),
                    tokens=self._tokens_per_step,
                    loads=self._outcome.loads,
                )
            )
        with self._clock.time("communication"):
            self.state.model.after_update()
        self.state.model.zero_gradients()
        self._retries = 0
        rank, pieces = self._world.rank, self.state.model.pieces
        fault("weights", step=step, rank=rank, tensors=lambda: {p.name: p.value for p in pieces})
        fault("moments", step=step, rank=rank, tensors=self._moments)

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
            if self._outcome.copies_differ:
                self._mend_copies()
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
            self._score = self._evaluate()
        if self._score and self._world.is_first:
            score = {"validation_loss": self._score.loss, "bits_per_byte": self._score.bits_per_byte}
            self.metrics.write({"step": done - 1, **score})

    def observe(self) -> None:
        """Write the line of the step that was applied, and show it."""
        seconds = self._clock.lap()
        self._pace.took(seconds["step"])
        if self._time_to_first_step_s is None:
            self._time_to_first_step_s = time.monotonic() - self._began
        self._keeper.poll()
        if self._world.is_first and self.state.decided is not None:
            record = self._record(self.state.decided, seconds)
            self.metrics.write(record)
            validation_loss = self._score.loss if self._score else None
            self.progress.step(record, self._pace.steps, validation_loss, self._pace.left_s(self.state.step))

    def save_if_due(self) -> None:
        """Save by steps, by minutes, or because the run is asked to stop (its time counts in the next step)."""
        if self.is_asked_to_stop:
            return  # `finish` saves, and waits for it
        with self._clock.time("checkpoint"):
            saves = self._outcome.wishes.save or self._keeper.is_due_by_steps(self.state.step)
            copies = self._copies is not None and self.state.step % self._run.resilience.memory_every_steps == 0
            if saves or copies:
                self._make_copies_agree()
            if saves:
                self._keeper.save(self.state, self._run.checkpoint.background)
            if copies and self._copies is not None:
                position = Position(self.state.step, self.state.tokens, self.state.skipped)
                self._copies.save(position, self.state.boxes())

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether any process was, before the step that was judged last."""
        return self._outcome.wishes.stop

    def finish(self) -> bool:
        """Save the last state, wait for the disk, write the report.

        Returns whether nothing is left to do. Raises: StorageError if the state cannot be saved.
        """
        if self._vitals is not None:
            self._vitals.enter("finishing")
        self.progress.close()
        self._batches.close()
        self._make_copies_agree()
        if error := self._keeper.finish(self.state):
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
        if self._copies is not None:
            self._copies.wait()
        self._keeper.close()
        self.events.write("end", step=self.state.step, finished=finished)
        return finished or self._is_paused

    def _exchange(self, step: int, loss: Tensor) -> StepOutcome:
        """From here on the gradient is whole, and other ranks may rely on it (`TrainState.pending`)."""
        state, every = self.state, self._run.resilience.fingerprint_every_steps
        with self._clock.time("optimizer"):
            unscale(state.model.pieces, state.scaler.scale)
            squares = square_share(state.model.pieces)
            fingerprint = self._fingerprints.share() if every and step % every == 0 else None
        state.pending = True
        fault("judge", step=step, rank=self._world.rank)
        with self._clock.time("communication"):
            loads = loads_of(state.model.moes, self._run.model, self._world.device)
            stop, save = self._stop.number is not None, self._keeper.is_due_by_time
            wishes = Wishes(stop, save, self._batches.are_unreadable, self._is_wrong(step, loss))
            return exchange(Share(loss, squares, loads, fingerprint, wishes), self._world)

    def _is_wrong(self, step: int, loss: Tensor) -> bool:
        """Whether this rank knows that the step's gradient was summed or computed wrongly."""
        is_sound = self.state.model.sums_are_sound()
        if not is_sound:
            self.events.write("collective_corrupt", step=step, rank=self._world.rank)
        if not self._is_recomputed:
            return not is_sound
        turn = step // self._run.resilience.recompute_every_steps
        mine = loss.item(), self.state.model.bits()
        found = compare(turn, mine, partial(self._recompute, step), self._world)
        if found is not None:
            self._tell("gradient_corrupt", step=step, rank=found.rank, suspects=list(found.suspects))
            self.progress.say(
                f" step {step}: the gradient of rank {found.rank} is in doubt; suspects: {found.suspects}"
            )
        return found is not None or not is_sound

    def _recompute(self, step: int, rank: int) -> Result:
        """The loss and gradient of another replica's samples."""
        batch = self._batches.of_rank(rank, step)
        return self.state.model.recompute(batch, self.state.scaler.scale, self._tokens_per_step)

    @property
    def _is_recomputed(self) -> bool:
        """Whether replicas compute each other's gradients in the step at hand."""
        every = self._run.resilience.recompute_every_steps
        return bool(every) and self.state.step % every == 0

    def _moments(self) -> dict[str, Tensor]:
        pieces, optimizer = self.state.model.masters, self.state.optimizer
        return {f"{p.name}.{name}": tensor for p in pieces for name, tensor in optimizer.kept_of(p).items()}

    def _mend_copies(self) -> None:
        """Copies of the state differ: heal those of a minority, or go back to a checkpoint.

        Raises: Retryable if there is no majority and no checkpoint.
        """
        found = self._fingerprints.find()
        heals = all(corrupt.healthy is not None for corrupt in found)
        outcome = "healed" if heals else "rolled_back"
        for corrupt in found:
            facts = {"tensor": corrupt.name, "ranks": list(corrupt.ranks), "healthy_rank": corrupt.healthy}
            self._tell("corruption", step=self.state.step, **facts, outcome=outcome)
            who = f"{corrupt.name} of rank {', '.join(map(str, corrupt.ranks))}"
            self.progress.say(f" step {self.state.step}: {who} is corrupt: {outcome.replace('_', ' ')}")
        if not found:  # they are equal by now: what differed was a sum, or mended itself
            self._tell("corruption", step=self.state.step, outcome="gone")
        elif heals:
            self.state.in_update = True
            self._fingerprints.heal(found)
            self.state.in_update = False
        elif self._go_back():
            self._judge.remember(self._recalled())
        else:
            self._survivor.state = None  # it is not to be trusted
            raise Retryable(
                f"{found[0].name} differs between ranks {found[0].ranks}, there is no telling which is right, and no "
                "checkpoint was saved yet. The same command starts from the beginning."
            )

    def _go_back(self) -> bool:
        """Take the state back from the newest checkpoint, which was clean when it was saved; False if there is none.

        Samples that were skipped stay so.
        """
        skipped, history, left = self.state.skipped, self.state.history, self.state.step
        self.state.in_update = True
        checkpoint = self._keeper.restore(self.state, at_most=left)
        self.state.in_update = False
        if checkpoint is None:
            return False
        self.state.skipped, self.state.decided = skipped, None
        self.state.history = history.turned_back(self.state.step)
        self._begin_copies()
        self._batches.follow()
        if self._world.is_first:
            self.metrics.forget_from(self.state.step)
        self._tell("rewind", step=left, to_step=self.state.step)
        self.progress.say(f" back from step {left} to {self.state.step}: {checkpoint.folder}")
        return True

    def _begin_copies(self) -> None:
        """From now on copies in host memory are of the present history."""
        if self._copies is not None:
            self._copies.wait()
        self._copies, folder = None, memory_folder()
        if folder is not None and self._run.resilience.memory_every_steps:
            boxes = [box for box in self.state.boxes() if travels(box)]

            def failed(why: str) -> None:
                self.events.write("memory_copy_failed", why=why)

            at, replicas_do = self.state.history, self.state.can_follow
            self._copies = MemoryCopies(folder, boxes, self._world, at, failed, replicas_do)

    def _write_missing_line(self, decided: Decision | None) -> None:
        """The process that was to write the line of the last step may have died before it could."""
        if decided is not None and all(record["step"] < decided.step for record in self.metrics.last(1)):
            self.metrics.write(self._record(decided, {"step": 0.0}))

    def _make_copies_agree(self) -> None:
        """Before a save: what is saved is clean, as far as it can be known."""
        if self._run.resilience.fingerprint_every_steps and self._fingerprints.differ():
            self._mend_copies()

    def _recalled(self) -> list[tuple[int, float, float]]:
        """Step, loss and gradient norm of the last steps, as the first process has them in its metrics."""
        steps: list[Any] = [None]
        if self._world.is_first:
            last = self.metrics.last(self._run.resilience.spike_window)
            steps = [[(record["step"], record["loss"], record["grad_norm"]) for record in last]]
        if self._world.size > 1:
            dist.broadcast_object_list(steps, device=self._world.device)
        return list(steps[0])

    def _record(self, decision: Decision, seconds: dict[str, float]) -> dict[str, Any]:
        """The line of a step in metrics.jsonl; `seconds` as the clock gives them."""
        step_s = seconds["step"] - seconds.get("evaluate", 0.0) - seconds.get("checkpoint", 0.0)
        tokens_per_s = decision.tokens / step_s if step_s else 0.0
        record = {
            "step": decision.step,
            "tokens": self.state.tokens,
            "loss": decision.loss,
            "grad_norm": decision.gradient_norm,
            "lr": decision.learning_rate,
            **self._batches.line(decision.step),
            "step_time_s": round(step_s, 6),
            "tokens_per_s": round(tokens_per_s, 1),
            "mfu": round(tokens_per_s * self._flops_per_token / self._peak_flops, 4),
            "memory_bytes": peak_memory_bytes(self._world.device),
            "seconds": {category: round(value, 6) for category, value in seconds.items()},
        }
        if decision.loads is not None:
            loads = loads_by_layer(decision.loads, self._run.model)
            record["experts"] = {str(layer): load.record() for layer, load in loads.items()}
        return record

    def _tell_of_bad_step(self, step: int, outcome: StepOutcome, ruling: Ruling) -> None:
        """Raises: RunFailed if the run ends with it."""
        assert ruling.reason is not None
        samples = self._batches.samples(step)
        self._tell(
            "bad_step",
            step=step,
            reason=ruling.reason.name.lower(),
            loss=_number(outcome.loss),
            grad_norm=_number(outcome.gradient_norm),
            largest_loss=_number(ruling.limits.loss),
            largest_grad_norm=_number(ruling.limits.gradient_norm),
            samples=[list(some) for some in samples],
            policy=self._run.resilience.on_bad_step,
            outcome=ruling.verdict.value,
        )
        what = f"loss {outcome.loss}, gradient norm {outcome.gradient_norm}"
        self.progress.say(f" step {step} is {ruling.reason.value}: {what}; samples {samples}: {ruling.verdict.value}")
        if ruling.verdict is Verdict.STOP:
            row = f"the last {ruling.in_a_row} steps were" if ruling.in_a_row > 1 else "the step is"
            raise RunFailed(f"{what} at step {step}: {row} {ruling.reason.value}, and changed nothing. {REMEDY}")

    def _tell(self, kind: str, **facts: Any) -> None:
        """Record an event that is the same on all ranks, once."""
        if self._world.is_first:
            self.events.write(kind, **facts)

    @property
    def _is_paused(self) -> bool:
        """Whether the run is to stop here, for now."""
        return 0 < self._run.train.pause_at <= self.state.step

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
        machine = machine_at_hand(self._run, self._hardware())
        return None if machine is None else predict(self._plan, self._run, machine)

    def _hardware(self) -> Hardware:
        world, number_format = self._world, "bf16" if self._plan.precision == "fp8" else self._plan.precision
        return Hardware(
            device=device_name(world.device),
            processes=world.size,
            per_node=processes_here(world.size),
            peak_flops_per_s={number_format: self._peak_flops / world.size},
        )

    def _measure_peak(self) -> float:
        """The matmul peak of all processes, measured on all at once, since they share the machine."""
        self._world.barrier()
        mine = matmul_peak_flops(self._world.device, DTYPES[self._plan.precision])
        return self._world.sum(torch.tensor(mine, dtype=torch.float64, device=self._world.device)).item()


def _number(value: float) -> float | str:
    """JSON has no word for a number that is not finite."""
    return value if math.isfinite(value) else str(value)
