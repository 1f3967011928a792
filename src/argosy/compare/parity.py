"""Parity: train the same run in one process and under a plan, and compare the numbers."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import computed_field
from pydantic.dataclasses import dataclass as documented

from argosy.config.identity import REPETITION, check_repeatable
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyWarning, Interrupted, RunFailed, UserError, counted
from argosy.extend.loading import check_approved
from argosy.inference.trained_model import open_checkpoint
from argosy.launch.devices import check_compiler, find_devices
from argosy.launch.local import train
from argosy.observe.events import Metrics
from argosy.parallel.world import threads_per_process
from argosy.plan.plan import Plan, words_of
from argosy.plan.search.auto import Devices, choose_plan

TOLERANCE = 1e-5
"""Largest relative difference of the loss in fp32: another order of the same sums makes about as much."""
LOOSER = {"loss": 1.0, "grad_norm": 10.0, "weights": 100.0}
"""Factors on the tolerance. AdamW divides by the root of the second moment: where a gradient is little more than
rounding error, rounding decides a whole step of the weight."""


def limits(tolerance: float) -> dict[str, float]:
    """Return the largest relative difference allowed for each quantity, if that of the loss is `tolerance`."""
    return {name: tolerance * times for name, times in LOOSER.items()}


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity."""

    relative: float
    """Relative to the reference; infinite if one of the two is not finite."""
    where: str
    """The step, or the weight."""


@dataclass(frozen=True)
class Differences:
    """The largest differences between two runs of the same steps."""

    loss: Difference
    """The largest difference of the training loss in any step."""
    grad_norm: Difference
    """The largest difference of the global gradient norm, before clipping, in any step."""
    weights: Difference
    """The largest difference of any weight after the last step: norm of the difference over norm of the reference."""

    def beyond(self, tolerance: float) -> dict[str, Difference]:
        """Return the differences that exceed their limit (`limits`)."""
        return {name: d for name, d in vars(self).items() if not d.relative <= limits(tolerance)[name]}


@documented(frozen=True)
class Parity:
    """The result of `parity`."""

    reference: str
    """The plan of the one process."""
    plan: str
    steps: int
    tolerance: float | None
    """Tolerance of the loss; None if the plan rounds more than fp32 and the user gave none."""
    differences: Differences

    @computed_field  # type: ignore[prop-decorator]
    @property
    def holds(self) -> bool:
        """True if the plan gives the numbers of one process. Without a tolerance it is always true."""
        return self.tolerance is None or not self.differences.beyond(self.tolerance)


def parity(
    run: RunConfig,
    *,
    steps: int = 5,
    tolerance: float | None = None,
    trust_code: bool = False,
    say: Callable[[str], None] | None = None,
) -> Parity:
    """Train `steps` steps of `run` in one process and as `run.plan` says, from the same weights on the same data.

    Both runs use real processes of this machine, as many as the plan has ranks, in temporary run folders. One process
    must have the memory for the whole model. What the plan leaves open is eager and fp32, as the reference is. The
    lengths and the `schedule` of `run` are not used: the learning rate is at its peak from the first step, so that
    wrong updates show.

    tolerance: largest relative difference of the loss (`LOOSER` gives the others'); None means `TOLERANCE` for a plan
    all in fp32, and no limit for others. trust_code: approve and run code that the run brings along. say: called with a
    line when each half is done.

    Raises: UserError, before any process starts, if the plan cannot train the run or nothing repeats it; RunFailed if a
    process dies; Interrupted after SIGTERM or SIGINT.
    """
    tell = say or (lambda text: None)
    if steps < 1:
        raise UserError(f"steps = {steps}: must be at least 1. Try 5.")
    check_repeatable(run, run.name)
    check_approved(run.extend.code, trust_code)
    run = _brief(run, steps)
    plan = _complete(run)
    # The same in both runs: the number of threads sets the order of sums too.
    threads = threads_per_process(run.launch, plan.world_size)
    run = run.with_keys(launch={"threads": threads})
    reference = choose_plan(run.with_keys(plan=REFERENCE), Devices(1, "cpu", fast_bf16=False))
    with tempfile.TemporaryDirectory(prefix="argosy-parity-") as folder:
        alone, together = Path(folder, "reference"), Path(folder, "plan")
        _train(run, reference, alone)
        tell(f"single process, {counted(steps, 'step')}: done")
        _train(run, plan, together)
        tell(f"{plan}, {counted(steps, 'step')}: done")
        differences = compare(alone, together)
    in_fp32 = (plan.precision, plan.weights, plan.reduce) == ("fp32", "fp32", "fp32") and not plan.is_compressed
    if tolerance is None and in_fp32:
        tolerance = TOLERANCE
    return Parity(str(reference), str(plan), steps, tolerance, differences)


def compare(reference: Path, other: Path) -> Differences:
    """Compare the finished run in `other` with that in `reference`. Raises: RunFailed if either lacks steps."""
    expected, found = _steps(reference), _steps(other)
    if len(expected) != len(found) or not expected:
        raise RunFailed(f"{other} has {len(found)} steps, and {reference} has {len(expected)}: no two runs to compare.")

    def value(record: dict[str, Any], key: str) -> float:
        return math.nan if record[key] is None else float(record[key])  # what is read has null for what is no number

    def of_steps(key: str) -> Difference:
        pairs = ((value(a, key), value(b, key), a["step"]) for a, b in zip(expected, found, strict=True))
        return _largest((_relative(abs(b - a), abs(a)), f"step {step}") for a, b, step in pairs)

    return Differences(of_steps("loss"), of_steps("grad_norm"), _weights_apart(reference, other))


REFERENCE = "precision=fp32,compile=false"
"""The plan of the single process, and what a plan leaves open."""


def _brief(run: RunConfig, steps: int) -> RunConfig:
    """Return `run` cut to `steps` steps and to what is compared."""
    return run.with_keys(**REPETITION).with_keys(
        name="parity",
        train={"steps": steps, "minutes": 0.0, "epochs": 0.0, "pause_at": 0, "deterministic": True},
        schedule={"kind": "constant", "warmup_steps": 0, "warmup_fraction": 0.0},
        resilience={"replay_check_every_steps": 0},  # the single process has no replicas
    )


def _complete(run: RunConfig) -> Plan:
    """Return the plan that `run.plan` writes down, for as many processes as its axes need. Raises: UserError."""
    words = words_of(run.plan)
    if "auto" in words:
        raise UserError(f'plan = "{run.plan}": write down the layout to compare, e.g. "tp=2,dp_shard=2".')
    eager = ",".join(word for word in REFERENCE.split(",") if word.split("=")[0] not in words)
    run = run.with_keys(plan=f"{run.plan},{eager}")
    size = Plan.from_words(words).world_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArgosyWarning)  # more processes than cores: only the numbers matter here
        here = run.launch.model_copy(update={"processes": size})
        devices = find_devices(here)
    plan = choose_plan(run, devices)
    check_compiler(plan, devices.kind)
    return plan


def _train(run: RunConfig, plan: Plan, run_dir: Path) -> None:
    run = run.with_keys(plan=str(plan), launch={"processes": plan.world_size})
    train_quietly(run, run_dir, "parity")


def train_quietly(run: RunConfig, run_dir: Path, command: str) -> None:
    """Train in a folder that does not outlive the command. Raises: as `train`; Interrupted says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArgosyWarning)
        try:
            train(run, run_dir, quiet=True)
        except Interrupted as stop:  # its own words name a folder that is gone by now
            raise Interrupted(f"stopped; {command} keeps nothing.", stop.exit_code - 128) from None


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in Metrics(run_dir).each() if "loss" in record]


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
