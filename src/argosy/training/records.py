"""What a run says of itself while it goes: events, the lines of metrics, progress, what it is predicted to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint import store
from argosy.config.schema import RunConfig
from argosy.data.order import Range
from argosy.errors import RunFailed
from argosy.observe.events import Events
from argosy.observe.heartbeat import BESIDE
from argosy.observe.metrics import Metrics, peak_memory_bytes
from argosy.observe.peak import device_name, matmul_peak_flops
from argosy.observe.progress import Progress
from argosy.parallel.expert import loads_by_layer
from argosy.parallel.model import DTYPES
from argosy.parallel.world import World, processes_here
from argosy.plan.cost.goodput import mtbf_s
from argosy.plan.cost.prediction import Prediction, predict
from argosy.plan.flops import train_flops_per_token
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.local_machine import DetectedHardware, machine_at_hand
from argosy.plan.plan import Plan
from argosy.plan.search.auto import UNKNOWN_GPU
from argosy.training.bad_steps import REMEDY, Doubt, Ruling, Verdict
from argosy.training.recovery import Recovery
from argosy.training.state import Decision
from argosy.training.step import StepOutcome
from argosy.training.summary import headline

FROM = {
    "live": "which survivors have",
    "memory": "of copies in memory",
    "disk": "of the newest checkpoint",
}
"""Where a state was taken from -> in words."""


class Records:
    """Of one process of a run. Who but the first process has anything to say is said with each method."""

    def __init__(self, run: RunConfig, plan: Plan, world: World, run_dir: Path):
        self._run, self._plan, self._world, self._run_dir = run, plan, world, run_dir
        self.progress = Progress(enabled=world.is_first)
        self.events = Events(run_dir, f"rank-{world.rank}")
        self.metrics = Metrics(run_dir, partial(store.is_in_force, run_dir, store.own_generation()))
        self.prediction: Prediction | None = None
        """On the first process, once the run is introduced, if its devices are known."""
        self.peak_flops = 0.0
        """Of matmuls, all processes together, FLOP/s."""
        self._flops_per_token = train_flops_per_token(run.model, run.data.seq_len)

    def measure_peak(self) -> None:
        """Measure `peak_flops` on all processes at once, since they share the machine; all call it together."""
        self._world.barrier()
        mine = matmul_peak_flops(self._world.device, DTYPES[self._plan.precision])
        total = self._world.sum(torch.tensor(mine, dtype=torch.float64, device=self._world.device))
        self.peak_flops = total.item()

    def introduce(self) -> None:
        """Predict what the plan will take, write it down, and say what is trained on what."""
        if self._world.is_first:
            self.prediction = self._predict()
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._plan.save(self._run_dir / "plan.toml", self.prediction.toml() if self.prediction else "")
        self.progress.say(headline(self._run, self._plan, self.peak_flops, self.prediction))

    def recovered(self, found: Recovery) -> None:
        """State was taken back from somewhere; the lines of steps that were lost are still there."""
        if not self._world.is_first:
            return
        made = max((record["step"] + 1 for record in self.metrics.last(1)), default=0)
        steps_lost = max(found.steps_lost, made - found.step)  # if nobody lived to know of them, their lines tell
        lost = f", {steps_lost} steps lost" if steps_lost else ""
        self.progress.say(f" from step {found.step}, {FROM[found.tier]}{lost}")
        facts = {key: getattr(found, key) for key in ("step", "sent_bytes", "own_bytes")}
        took_s, refused = round(found.seconds, 3), list(found.refused)
        self.tell("recovered", source=found.tier, steps_lost=steps_lost, **facts, seconds=took_s, refused=refused)

    def started(self, step: int) -> None:
        """Training is about to begin at `step`; each process says so."""
        self.events.write(
            "start",
            step=step,
            plan=str(self._plan),
            world_size=self._world.size,
            peak_flops=self.peak_flops,
            hardware=vars(self._hardware()),
            torch=torch.__version__,
        )

    def write_missing_line(
        self, decided: Decision, tokens: int, samples_of: Callable[[int], Mapping[str, Any]]
    ) -> None:
        """The process that was to write the line of the last step may have died before it could."""
        if all(record["step"] < decided.step for record in self.metrics.last(1)):
            self.step(decided, tokens, samples_of(decided.step), {"step": 0.0})

    def step(
        self, decision: Decision, tokens: int, samples: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> dict[str, Any]:
        """Write the line of a step that was applied, and return it; the first process calls it.

        tokens: of the run until now. samples: what `Batches.line` says of the step. seconds: as the clock gives them.
        """
        step_s = seconds["step"] - sum(seconds.get(category, 0.0) for category in BESIDE)
        tokens_per_s = decision.tokens / step_s if step_s else 0.0
        record = {
            "step": decision.step,
            "tokens": tokens,
            "loss": decision.loss,
            "grad_norm": decision.gradient_norm,
            "lr": decision.learning_rate,
            **samples,
            "step_time_s": round(step_s, 6),
            "tokens_per_s": round(tokens_per_s, 1),
            "mfu": round(tokens_per_s * self._flops_per_token / self.peak_flops, 4),
            "memory_bytes": peak_memory_bytes(self._world.device),
            "seconds": {category: round(value, 6) for category, value in seconds.items()},
        }
        if decision.loads is not None:
            loads = loads_by_layer(decision.loads, self._run.model)
            record["experts"] = {str(layer): load.record() for layer, load in loads.items()}
        self.metrics.write(record)
        return record

    def transient(self, outcome: StepOutcome, doubt: Doubt) -> None:
        """A step looked bad, and was good when it was done again with the same samples."""
        self.tell(
            "transient",
            step=doubt.step,
            reason=doubt.reason.name.lower(),
            first_loss=_number(doubt.loss),
            first_grad_norm=_number(doubt.gradient_norm),
            loss=outcome.loss,
            grad_norm=outcome.gradient_norm,
        )
        what = f"loss {doubt.loss}, gradient norm {doubt.gradient_norm}"
        self.progress.say(f" step {doubt.step} was {doubt.reason.value} ({what}), and not so when it was done again")

    def bad_step(self, step: int, outcome: StepOutcome, ruling: Ruling, samples: Sequence[Range]) -> None:
        """Raises: RunFailed if the run ends with it."""
        assert ruling.reason is not None
        self.tell(
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

    def tell(self, kind: str, **facts: Any) -> None:
        """Record an event that is the same on all ranks, once."""
        if self._world.is_first:
            self.events.write(kind, **facts)

    def mtbf_s(self) -> float:
        """Seconds between failures of all devices."""
        machine = machine_at_hand(self._run, self._hardware())
        if machine is None:
            return 3600 * find_device(UNKNOWN_GPU).mtbf_h / self._world.size
        return float(mtbf_s(machine, self._world.size).mid)

    def _predict(self) -> Prediction | None:
        """What the plan will take, if anybody knows this machine's devices."""
        machine = machine_at_hand(self._run, self._hardware())
        return None if machine is None else predict(self._plan, self._run, machine)

    def _hardware(self) -> DetectedHardware:
        world, number_format = self._world, "bf16" if self._plan.precision == "fp8" else self._plan.precision
        return DetectedHardware(
            device=device_name(world.device),
            processes=world.size,
            per_node=processes_here(world.size),
            peak_flops_per_s={number_format: self.peak_flops / world.size},
        )


def _number(value: float) -> float | str:
    """JSON has no word for a number that is not finite."""
    return value if math.isfinite(value) else str(value)
