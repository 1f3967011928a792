"""Whether a plan gives the numbers of one process: the same run, trained both ways and compared."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from argosy.config.schema import RunConfig
from argosy.errors import ArgosyWarning, Interrupted, RunFailed, UserError
from argosy.inference.trained_model import open_checkpoint
from argosy.launch.devices import find_devices
from argosy.launch.local import train
from argosy.observe.metrics import Metrics
from argosy.parallel.world import threads_per_process
from argosy.plan.plan import Plan, words_of
from argosy.plan.search.auto import Devices, choose_plan

TOLERANCE = 1e-5
"""Of the loss, in fp32: what another order of the same sums makes of it in some steps."""
LOOSER = {"loss": 1.0, "grad_norm": 10.0, "weights": 100.0}
"""Times the tolerance. AdamW divides by the root of the second moment: where a gradient is little more than rounding,
rounding decides a whole step of the weight."""


def limits(tolerance: float) -> dict[str, float]:
    """The largest relative difference of each quantity, for this one of the loss."""
    return {name: tolerance * times for name, times in LOOSER.items()}


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity."""

    relative: float
    """To the reference; infinite if one of the two is not finite."""
    where: str
    """The step, or the weight."""


@dataclass(frozen=True)
class Differences:
    """How far two runs of the same steps are apart."""

    loss: Difference
    """Of the training loss in any step."""
    grad_norm: Difference
    """Of the global gradient norm before clipping in any step."""
    weights: Difference
    """Of any weight after the last step: the norm of the difference over the norm of the reference's."""

    def beyond(self, tolerance: float) -> dict[str, Difference]:
        """What is further apart than its limit (`limits`)."""
        return {name: d for name, d in vars(self).items() if not d.relative <= limits(tolerance)[name]}


@dataclass(frozen=True)
class Parity:
    """What `parity` found."""

    reference: str
    """The plan of the one process."""
    plan: str
    steps: int
    tolerance: float | None
    """Of the loss; None if the plan rounds more than fp32, and none was asked for."""
    differences: Differences

    @property
    def holds(self) -> bool:
        """Whether the plan gives the numbers of one process; without a tolerance, there is nothing to hold."""
        return self.tolerance is None or not self.differences.beyond(self.tolerance)


def parity(
    run: RunConfig, *, steps: int = 5, tolerance: float | None = None, say: Callable[[str], None] | None = None
) -> Parity:
    """Train `steps` steps of `run` in one process and as `run.plan` says, from the same weights on the same data.

    Real processes of this machine do it, as many as the plan is for, in temporary run folders. One process must have
    the memory for the whole model. What the plan leaves open is eager and fp32, as the reference is; of `run`, the
    lengths and `schedule` are not used: the learning rate has its peak from the first step, so that wrong updates show.

    tolerance: largest relative difference of the loss (`LOOSER` is that of the rest); None is `TOLERANCE` for a plan
    in fp32, and for others none. say: is told when each half is done. Raises: UserError, before any process starts,
    if the plan cannot train the run; RunFailed if a process dies; Interrupted after SIGTERM or SIGINT.
    """
    tell = say or (lambda text: None)
    if steps < 1:
        raise UserError(f"steps = {steps}: must be at least 1. Try 5.")
    run = _brief(run, steps)
    plan = _complete(run)
    threads = threads_per_process(run.launch, plan.world_size)  # alike: their number too is an order of sums
    run = run.model_copy(update={"launch": run.launch.model_copy(update={"threads": threads})})
    reference = choose_plan(_under(run, REFERENCE), Devices(1, "cpu", fast_bf16=False))
    with tempfile.TemporaryDirectory(prefix="argosy-parity-") as folder:
        alone, together = Path(folder, "reference"), Path(folder, "plan")
        _train(run, reference, alone)
        tell(f"single process, {steps} steps: done")
        _train(run, plan, together)
        tell(f"{plan}, {steps} steps: done")
        differences = compare(alone, together)
    if tolerance is None and (plan.precision, plan.weights, plan.reduce) == ("fp32", "fp32", "fp32"):
        tolerance = TOLERANCE
    return Parity(str(reference), str(plan), steps, tolerance, differences)


def compare(reference: Path, other: Path) -> Differences:
    """How far the finished run in the folder `other` is from that in `reference`, which has as many steps."""
    expected, found = _steps(reference), _steps(other)
    if len(expected) != len(found) or not expected:
        raise RunFailed(f"{other} has {len(found)} steps, and {reference} has {len(expected)}: no two runs to compare.")

    def of_steps(key: str) -> Difference:
        pairs = zip(expected, found, strict=True)
        return _largest((_relative(abs(b[key] - a[key]), abs(a[key])), f"step {a['step']}") for a, b in pairs)

    return Differences(of_steps("loss"), of_steps("grad_norm"), _weights_apart(reference, other))


REFERENCE = "precision=fp32,compile=false"


def _brief(run: RunConfig, steps: int) -> RunConfig:
    """`run`, cut to `steps` steps and to what is compared."""
    changes: dict[str, dict[str, Any]] = {
        "train": {"steps": steps, "minutes": 0.0, "deterministic": True},
        "schedule": {"kind": "constant", "warmup_steps": 0},
        "evaluate": {"every_steps": 0, "tokens": 1, "sample_prompt": None},  # a window at the end, and no more
        "checkpoint": {"every_steps": 0, "every_minutes": 0.0},  # only the last state, by which weights are compared
        "launch": {"max_restarts": 0},
    }
    sections = {name: getattr(run, name).model_copy(update=keys) for name, keys in changes.items()}
    return run.model_copy(update={"name": "parity", **sections})


def _complete(run: RunConfig) -> Plan:
    """The plan that `run.plan` writes down, for as many processes as its axes make. Raises: UserError."""
    words = words_of(run.plan)
    if "auto" in words:
        raise UserError(f'plan = "{run.plan}": write down the layout to compare, e.g. "tp=2,dp_shard=2".')
    eager = ",".join(word for word in REFERENCE.split(",") if word.split("=")[0] not in words)
    run = _under(run, f"{run.plan},{eager}")
    size = Plan.from_words(words).world_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArgosyWarning)  # more processes than cores: here it is numbers that count
        devices = find_devices(run.launch.model_copy(update={"processes": size}))
    return choose_plan(run, devices)


def _under(run: RunConfig, plan: str) -> RunConfig:
    return run.model_copy(update={"plan": plan})


def _train(run: RunConfig, plan: Plan, run_dir: Path) -> None:
    launch = run.launch.model_copy(update={"processes": plan.world_size})
    run = run.model_copy(update={"plan": str(plan), "launch": launch})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArgosyWarning)
        try:
            train(run, run_dir, quiet=True)
        except Interrupted as stop:  # its own words name a folder that is gone by now
            raise Interrupted("stopped; parity keeps nothing.", stop.exit_code - 128) from None


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in Metrics(run_dir).read() if "loss" in record]


def _weights_apart(reference: Path, other: Path) -> Difference:
    cpu = torch.device("cpu")
    expected, found = (open_checkpoint(run).model(cpu).state_dict() for run in (reference, other))
    with torch.no_grad():
        return _largest(
            (_relative((found[name] - weight).norm().item(), weight.norm().item()), name)
            for name, weight in expected.items()
        )


def _relative(difference: float, size: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / size if size else math.inf if difference else 0.0


def _largest(found: Iterable[tuple[float, str]]) -> Difference:
    return Difference(*max(found, key=lambda pair: pair[0]))
