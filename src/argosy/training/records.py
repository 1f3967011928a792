"""The records of a run: events, the lines of metrics, what agreeing costs, progress, its prediction, its report."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from argosy.accelerator import device_name, peak_memory_bytes, software
from argosy.checkpoint import fence
from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.data.loader import OpenData
from argosy.data.order import Range
from argosy.errors import ArgosyWarning, RunFailed, counted
from argosy.observe.clock import matmul_peak_flops
from argosy.observe.counters import Communication
from argosy.observe.energy import machine_started_on, price_of
from argosy.observe.events import Events, Metrics
from argosy.observe.heartbeat import BESIDE, NO_FACTS
from argosy.observe.report import task_in_words
from argosy.observe.screen import Progress
from argosy.parallel.expert import loads_by_layer
from argosy.parallel.model import COMPUTE_DTYPES
from argosy.parallel.world import World, processes_here
from argosy.plan.cost.economy import mtbf_s
from argosy.plan.cost.exact_state import DTYPE_BYTES, state_bytes
from argosy.plan.cost.prediction import Prediction, predict
from argosy.plan.cost.traffic import traffic
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.local_machine import DetectedHardware, cluster_of, machine_at_hand
from argosy.plan.parameters import trained_shapes
from argosy.plan.plan import Plan, measured_format
from argosy.plan.search.auto import UNKNOWN_GPU
from argosy.plan.sync import OF_SITES
from argosy.plan.workload import Workload
from argosy.training.bad_steps import BAD_STEPS_REMEDY, Action, BadStep, Reason
from argosy.training.evaluation import Evaluator, Score
from argosy.training.recovery import Recovery
from argosy.training.rows import TaskScores
from argosy.training.state import StepUpdate
from argosy.training.step import StepOutcome
from argosy.training.summary import headline, write_report

OVER_REPLICAS = ("replicate", "expert_replicate")
"""Axes between replicas."""
FROM_SITES = {"staleness_steps": "staleness", "distance": "distance"}
"""Key of `sites` in a line -> the same in `sync`."""


class SyncAccount:
    """The account of one run under one plan."""

    def __init__(self, run: RunConfig, plan: Plan):
        self._sites = len(run.sites) if plan.sync in OF_SITES else 0
        self._is_kept = plan.is_compressed or bool(self._sites)
        self.exact_bytes = self._exact_bytes(run, plan)
        """Bytes that the first rank, or a site, would send in a step if gradients were summed exactly, in fp32."""

    def _exact_bytes(self, run: RunConfig, plan: Plan) -> float:
        if not self._is_kept:
            return 0.0
        if self._sites:  # a ring all-reduce over sites (Thakur et al. 2005)
            trained = sum(map(math.prod, trained_shapes(run).values()))
            return 2 * (self._sites - 1) / self._sites * DTYPE_BYTES["fp32"] * trained
        exact = traffic(plan.model_copy(update={"sync": "exact", "reduce": "fp32"}), run)
        return float(sum(sent for (axis, _), sent in exact.items() if axis in OVER_REPLICAS))

    def line(self, communication: Communication, sites: Mapping[str, Any] | None) -> dict[str, float] | None:
        """Return the table of a step's line; None if nothing was exchanged, or all of it exactly.

        communication: the step's, as the clock gives it. sites: what the line says of the outer step after it.
        """
        if not self._is_kept:
            return None
        if self._sites:
            return None if sites is None else self._of_sites(sites)
        channels = [both for axis in OVER_REPLICAS for both in communication.get(axis, {}).values()]
        waited_s, sent = sum(both[0] for both in channels), sum(both[1] for both in channels)
        return self._table(sent, waited_s, steps=1) if channels else None

    def _of_sites(self, sites: Mapping[str, Any]) -> dict[str, float]:
        steps = max(1, int(sites.get("steps", sites.get("staleness_steps", 1))))  # with fragments, these differ
        found = self._table(float(sites.get("sent_bytes", 0)), float(sites.get("seconds", 0.0)), steps)
        return found | {name: sites[key] for key, name in FROM_SITES.items() if key in sites}

    def _table(self, sent: float, waited_s: float, steps: int) -> dict[str, float]:
        ratio = {"ratio": round(sent / (steps * self.exact_bytes), 6)} if self.exact_bytes else {}
        return {"bytes": round(sent), "seconds": round(waited_s, 6), **ratio}


FROM = {
    "live": "which survivors have",
    "memory": "from in-memory checkpoints",
    "disk": "from the newest checkpoint",
}
"""Source of a restored state -> in words."""
NO_MORE: Mapping[str, Any] = {}
WRONG: dict[Reason, str] = {
    "not_finite": "not finite",
    "norm_outlier": "bad, with a gradient norm far above those of the steps before",
    "loss_spike": "bad, with a loss far above those of the steps before",
}
"""Fault of a bad step -> in words."""


class Records:
    """The records of one process of a run. Only rank 0 writes, unless a method says otherwise."""

    def __init__(self, run: RunConfig, plan: Plan, world: World, run_dir: Path):
        self._run, self._plan, self._world, self._run_dir = run, plan, world, run_dir
        self.progress = Progress(enabled=world.is_first)
        self.events = Events(run_dir, f"rank-{world.rank}")
        self.metrics = Metrics(run_dir, partial(fence.is_in_force, run_dir, fence.own_generation()))
        self.prediction: Prediction | None = None
        """Known on rank 0 once the run is introduced, if its devices are known."""
        self.peak_flops = 0.0
        """FLOP/s of matmuls, all processes together."""
        self._flops_per_token = float(Workload.of(run).train_flops_per_token)
        self._state = state_bytes(plan, run, world.rank)
        self._sync = SyncAccount(run, plan)
        self.memory_before_bytes = 0
        """Memory of the process before it trained in any world: Python, torch and its libraries; 0 on a GPU."""

    def measure_peak(self) -> None:
        """Measure `peak_flops` on all processes at once, since they share the machine; all call it together."""
        self._world.barrier()
        mine = matmul_peak_flops(self._world.device, COMPUTE_DTYPES[self._plan.precision])
        total = self._world.sum(torch.tensor(mine, dtype=torch.float64, device=self._world.device))
        self.peak_flops = total.item()

    def introduce(self) -> None:
        """Predict the plan's step and memory, write that down, and print what is trained on what."""
        if self._world.is_first:
            self.prediction = self._predict()
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._save_plan()
        self.progress.say(headline(self._run, self._plan, self.peak_flops, self.prediction))

    def recovered(self, found: Recovery) -> None:
        """Record where the state was restored from, while the lines of lost steps are still in the metrics."""
        if not self._world.is_first:
            return
        made = max((record["step"] + 1 for record in self.metrics.last(1)), default=0)
        steps_lost = max(found.steps_lost, made - found.step)  # if no process lived to know of them, their lines tell
        lost = f", {counted(steps_lost, 'step')} lost" if steps_lost else ""
        self.progress.say(f" from step {found.step}, {FROM[found.tier]}{lost}", "green")
        facts = {key: getattr(found, key) for key in ("step", "sent_bytes", "own_bytes")}
        took_s, refused = round(found.seconds, 3), list(found.refused)
        self.tell("recovered", source=found.tier, steps_lost=steps_lost, **facts, seconds=took_s, refused=refused)

    def started(self, step: int) -> None:
        """Record that training is about to begin at `step`; each process does so."""
        hardware = vars(self._hardware())
        machine = machine_started_on(self._run, hardware)
        price, currency = price_of(machine, self._run.observe.energy) or (None, None)
        self.events.write(
            "start",
            step=step,
            plan=str(self._plan),
            world_size=self._world.size,
            peak_flops=self.peak_flops,
            hardware=hardware,
            torch=torch.__version__,
            price_per_device_h=price,
            currency=currency,
        )
        if self._plan.compile:
            self.progress.say(" compiling: the first steps take a minute or two")

    def write_missing_line(self, last: StepUpdate, tokens: int, samples_of: Callable[[int], Mapping[str, Any]]) -> None:
        """Write the line of the last step, if the process that was to write it died before it could."""
        if all(record["step"] < last.step for record in self.metrics.last(1)):
            self.step(last, tokens, samples_of(last.step), {"step": 0.0})

    def step(
        self,
        update: StepUpdate,
        tokens: int,
        samples: Mapping[str, Any],
        seconds: Mapping[str, float],
        communication: Communication = NO_FACTS,
        more: Mapping[str, Any] = NO_MORE,
    ) -> dict[str, Any]:
        """Write the line of a step that was applied, and return it. Only rank 0 calls it.

        tokens: trained on so far. samples: what `Batches.line` says of the step. seconds, communication: as the clock
        gives them. more: what services and the agreement of replicas say of the step.
        """
        step_s = seconds["step"] - sum(seconds.get(category, 0.0) for category in BESIDE)
        tokens_per_s = update.tokens / step_s if step_s else 0.0
        memory_bytes = peak_memory_bytes(self._world.device)
        record = {
            "step": update.step,
            "time_s": round(time.time(), 3),
            "tokens": tokens,
            "loss": update.loss,
            "grad_norm": update.gradient_norm,
            "lr": update.learning_rate,
            **samples,
            "step_time_s": round(step_s, 6),
            "tokens_per_s": round(tokens_per_s, 1),
            "mfu": round(tokens_per_s * self._flops_per_token / self.peak_flops, 4),
            "memory_bytes": memory_bytes,
            "memory": self._memory(memory_bytes),
            "seconds": {category: round(value, 6) for category, value in seconds.items()},
        }
        if communication:
            record["communication"] = {
                axis: {tier: [round(waited_s, 6), round(sent)] for tier, (waited_s, sent) in tiers.items()}
                for axis, tiers in communication.items()
            }
        if update.loads is not None:
            loads = loads_by_layer(update.loads, self._run.model)
            record["experts"] = {str(layer): load.record() for layer, load in loads.items()}
        record |= more
        if (account := self._sync.line(communication, more.get("sites"))) is not None:
            record["sync"] = account
        self.metrics.write(record)
        return record

    def _memory(self, used_bytes: int) -> dict[str, int]:
        """Return the bytes of each part of the state on the rank's device, of what was there before and of the rest."""
        state = self._state
        is_elsewhere = self._plan.offload in ("optimizer", "all") and self._world.device.type != "cpu"
        parts = {
            "weights": state.parameters,
            "gradients": state.gradients,
            "optimizer": 0 if is_elsewhere else state.optimizer,
            **({"before": self.memory_before_bytes} if self.memory_before_bytes else {}),
        }
        return {**parts, "other": max(0, used_bytes - sum(parts.values()))}

    def last_steps(self) -> list[tuple[int, float, float]]:
        """Return step, loss and gradient norm of the last steps, as rank 0 has them. All processes call it together."""
        last = self._world.share_first(
            lambda: self.metrics.last(self._run.resilience.spike_window), list[dict[str, Any]]
        )
        return [(record["step"], record["loss"], record["grad_norm"]) for record in last]

    def steps_s(self) -> float:
        """Return the seconds that all steps so far have taken, on rank 0."""
        lines = self.metrics.each() if self._world.is_first else ()
        return float(sum(line["seconds"]["step"] for line in lines if "seconds" in line))

    def has_evaluated(self, step: int) -> bool:
        """Return True if there is a line of an evaluation after `step`. All processes call it together."""
        return self._world.share_first(lambda: self.metrics.has(step, "validation_loss"), bool)

    def evaluated(self, step: int, score: Score, tasks: TaskScores) -> None:
        """Write the line of an evaluation after `step`."""
        if self._world.is_first:
            in_words = [task_in_words(name, metrics) for name, metrics in tasks.items()]
            self.metrics.write_evaluation(step, score.line(), tasks)
            self.progress.evaluated(step, score.in_words(), in_words)

    def length(self, steps: int) -> None:
        """Record the number of steps that a budget of minutes was turned into, in run.toml too; each process does."""
        self.events.write("length", steps=steps, minutes=self._run.train.minutes)
        if self._world.is_first:
            save_run(self._run.with_keys(train={"steps": steps}), self._run_dir / "run.toml")

    def replan(self, plan: Plan, step: int) -> None:
        """Put `plan` in force from `step` on; the one before is kept beside it."""
        self._plan = plan
        if not self._world.is_first:
            return
        path, kept = self._run_dir / "plan.toml", self._run_dir / f"plan-{step:08d}.toml"
        if path.exists():
            path.replace(kept)
        if not self._save_plan() and kept.exists():
            kept.replace(path)

    def _save_plan(self) -> bool:
        """Write the plan in force. Return False, with a warning, if the disk is full: a record does not end a run."""
        path = self._run_dir / "plan.toml"
        try:
            self._plan.save(path, self.prediction.toml() if self.prediction else "")
        except OSError as problem:
            warnings.warn(f"{path} is that of the plan before ({problem}). Free some space.", ArgosyWarning, 2)
            return False
        return True

    def transient(self, first_try: BadStep, outcome: StepOutcome) -> None:
        """Record a step that looked bad, and was good when it was done again with the same samples."""
        self.tell(
            "transient",
            step=first_try.step,
            reason=first_try.reason,
            first_loss=_number(first_try.loss),
            first_grad_norm=_number(first_try.gradient_norm),
            loss=outcome.loss,
            grad_norm=outcome.gradient_norm,
        )
        was = f"{WRONG[first_try.reason]} (loss {first_try.loss}, gradient norm {first_try.gradient_norm})"
        self.progress.say(f" step {first_try.step} was {was}, and fine when it was done again", "yellow")

    def bad_step(self, bad: BadStep, action: Action, samples: Sequence[Range]) -> None:
        """Record a bad step, and what is done with it. Raises: RunFailed if the run ends with it."""
        self.tell(
            "bad_step",
            step=bad.step,
            reason=bad.reason,
            loss=_number(bad.loss),
            grad_norm=_number(bad.gradient_norm),
            largest_loss=_number(bad.largest_loss),
            largest_grad_norm=_number(bad.largest_gradient_norm),
            samples=[list(some) for some in samples],
            policy=self._run.resilience.on_bad_step,
            outcome=action.value,
        )
        what = f"loss {bad.loss}, gradient norm {bad.gradient_norm}"
        self.progress.say(
            f" step {bad.step} is {WRONG[bad.reason]}: {what}; samples {samples}: {action.value}", "yellow"
        )
        if action is Action.STOP:
            row = f"the last {bad.in_a_row} steps were" if bad.in_a_row > 1 else "the step is"
            raise RunFailed(
                f"{what} at step {bad.step}: {row} {WRONG[bad.reason]}, and changed nothing. {BAD_STEPS_REMEDY}"
            )

    def switched_off(self, what: str, place: str, why: str, step: int) -> None:
        """Record that an extension of the user's raised an error and is switched off; each process does so."""
        self.events.write("user_code_off", what=what, place=place, why=why, step=step)
        self._say_of_user_code(f"{place}: the {what} raised {why}, at step {step}; it is switched off")

    def user_code(self, what: str, place: str, did: str, step: int) -> None:
        """Record that an extension of the user's did what it should not; each process does so."""
        self.events.write("user_code", what=what, place=place, did=did, step=step)
        self._say_of_user_code(f"{place}: the {what} {did} (step {step})")

    def _say_of_user_code(self, text: str) -> None:
        self.progress.say(f" {text}", "yellow")
        if not self._world.is_first:
            print(f"rank {self._world.rank}: {text}", flush=True)  # into its log

    def report(
        self,
        data: OpenData,
        evaluator: Evaluator,
        finished: bool,
        time_to_first_step_s: float | None,
    ) -> None:
        """Write report.json and print the run's result, as it ends here."""
        if not self._world.is_first:
            return
        facts = {
            "status": "finished" if finished else "stopped",
            "peak_flops": self.peak_flops,
            "time_to_first_step_s": time_to_first_step_s,
            "memory_before_bytes": self.memory_before_bytes,
            "device": device_name(self._world.device),
            "software": software(self._world.device),
            "tasks": evaluator.task_scores if finished and evaluator.task_scores else None,
        }
        held_out, score = evaluator.held_out, evaluator.score
        machine = machine_at_hand(self._run, self._hardware())
        write_report(
            self._run,
            self._run_dir,
            data,
            held_out,
            score,
            self.progress,
            self._plan,
            self.prediction,
            machine,
            self._world.device,
            facts,
        )

    def tell(self, kind: str, **facts: Any) -> None:
        """Record an event that is the same on all ranks."""
        if self._world.is_first:
            self.events.write(kind, **facts)

    def mtbf_s(self) -> float:
        """Return the mean seconds between failures of any of the devices. Any process may call it."""
        machine = machine_at_hand(self._run, self._hardware())
        if machine is None:
            machine = Cluster.parse(f"1x{UNKNOWN_GPU}")
        return float(mtbf_s(machine, self._world.size).mid)

    def _predict(self) -> Prediction | None:
        """Return the prediction for the plan, if this machine's devices are known."""
        machine = machine_at_hand(self._run, self._hardware())
        return None if machine is None else predict(self._plan, self._run, machine, cluster_of(self._run))

    def _hardware(self) -> DetectedHardware:
        world, number_format = self._world, measured_format(self._plan.precision)
        return DetectedHardware(
            device=device_name(world.device),
            processes=world.size,
            per_node=processes_here(world.size),
            peak_flops_per_s={number_format: self.peak_flops / world.size},
        )


def _number(value: float) -> float | str:
    """JSON has no word for a number that is not finite."""
    return value if math.isfinite(value) else str(value)
