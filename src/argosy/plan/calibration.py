"""A run's prediction beside its measurements, part by part; and the calibration factors that finished runs teach.

A factor tells how much longer than predicted a part of a step takes. Before any run is seen, its logarithm is normal
around 0 (no change). The logarithm of a measured part of a step is normal around the sum of its predicted categories
times their factors. A part may hold several categories (a layer's waits are inside its forward), so that all factors
are found together, by Gauss-Newton on the posterior; its curvature gives their uncertainty. Few runs move a factor
less; a category that no run tells about has no factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError, first_error
from argosy.files import expanded, json_of, read_at_most
from argosy.plan.cost.breakdown import MEMORY_FACTORS, OF_TIME
from argosy.plan.cost.estimate import seconds
from argosy.plan.cost.prediction import Prediction, predict
from argosy.plan.hardware.clusters import Category, Cluster, Factor
from argosy.plan.hardware.devices import device_names, find_device
from argosy.plan.hardware.local_machine import PROBED, device_named, resized
from argosy.plan.hardware.measurements import four_digits
from argosy.plan.plan import Plan
from argosy.plan.workload import Numbers

MOST_REPORT_BYTES = 16 * 2**20
PASSES, COMMUNICATION, OPTIMIZER, REST = "forward_backward", "communication", "optimizer", "rest"


@dataclass(frozen=True)
class StepPart:
    """A part of a step that can be both predicted and measured."""

    predicted: tuple[str, ...]
    """Its categories in `plan.cost.step_time.StepTime`."""
    measured: tuple[str, ...]
    """Its categories in the step's clock."""


CALIBRATED_PARTS = {
    # A layer waits inside its passes for other ranks' tokens, hidden states and parameters.
    PASSES: StepPart(
        (*OF_TIME["compute"], "tensor", "context", "experts", "pipeline"),
        ("forward", "backward", "pipeline"),
    ),
    # Gradient sums that backward did not hide, and updated values on their way back; of a worker of asynchronous
    # training its pushes and pulls.
    COMMUNICATION: StepPart(("gradients", "sites"), ("communication",)),
    # The update and the gradients' norm.
    OPTIMIZER: StepPart(("optimizer",), ("optimizer",)),
    # Reading the batch, code of the user's, and the time between the parts. Compiling, checks, evaluation and
    # checkpoints are in no part.
    REST: StepPart(("other",), ("data", "user", "other")),
}
"""Part of a step -> its predicted and measured categories."""


class ComparedFigure(BaseModel):
    """One figure, predicted and measured."""

    model_config = ConfigDict(frozen=True)

    predicted: float
    measured: float
    low: float | None = None
    """Ends of the prediction's 90 % interval; None for a part of a total."""
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.predicted else None


class Reconciled(BaseModel):
    """A run's steps, predicted and measured."""

    model_config = ConfigDict(frozen=True)

    cluster: str
    """Name of the cluster that the prediction was made for."""
    seconds: dict[str, ComparedFigure]
    """Seconds of a step, by part; they add up to step_s."""
    step_s: ComparedFigure
    memory_bytes: ComparedFigure
    """Peak of a process beyond its memory before the model was made; predicted for the rank that needs most."""
    sent_bytes: dict[str, ComparedFigure] = {}
    """Bytes that the first rank sends in a step, by axis."""
    update_s: ComparedFigure | None = None
    """Seconds of an update of a worker of asynchronous training: its steps, push and pull."""
    round_wait_s: ComparedFigure | None = None
    """Seconds that a site waits in a round for the others and for what travels; the median."""

    def in_words(self) -> str:
        """Return a small table, with the interval behind each total."""
        rows = [_row(name.replace("_", " + "), each, seconds) for name, each in self.seconds.items()]
        rows += [_row("step", self.step_s, seconds), _row("memory", self.memory_bytes, _megabytes)]
        rows += [_row("update", self.update_s, seconds)] if self.update_s else []
        rows += [_row(f"sent: {axis}", each, partial(_megabytes, decimals=2)) for axis, each in self.sent_bytes.items()]
        rows += [_row("wait of a round", self.round_wait_s, seconds)] if self.round_wait_s else []
        head = f"  {'':18}{'predicted':>12}{'measured':>12}{'ratio':>8}   90 % interval"
        return "\n".join([f"predicted for {self.cluster}:", head, *rows])


def _row(name: str, each: ComparedFigure, write: Callable[[Numbers], str]) -> str:
    ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
    interval = "" if each.low is None or each.high is None else f"   {write(each.low)} to {write(each.high)}"
    return f"  {name:18}{write(each.predicted):>12}{write(each.measured):>12}{ratio:>8}{interval}"


def _megabytes(value: Numbers, decimals: int = 0) -> str:
    return f"{float(value) / 1e6:,.{decimals}f} MB"


def part_of(category: str, plan: Plan) -> str:
    """Return the part of a step whose measured time includes a predicted category."""
    if category == "gradients" and plan.shards_parameters:
        return PASSES  # FSDP2 gathers parameters and sums gradients layer by layer, in forward and backward
    return next(name for name, part in CALIBRATED_PARTS.items() if category in part.predicted)


def reconcile(
    prediction: Prediction,
    plan: Plan,
    clock: Mapping[str, float],
    memory_bytes: float,
    with_reserve: bool,
    sent_bytes: Mapping[str, float] = MappingProxyType({}),
    update_s: float | None = None,
    round_wait_s: float | None = None,
) -> Reconciled:
    """Compare a prediction for `plan` with a typical step (seconds by the clock's categories) and the peak memory.

    with_reserve: the measured memory includes what the allocator holds unused. sent_bytes: of a typical step, by axis.
    update_s: of a typical update of a worker of asynchronous training. round_wait_s: of a typical round of sites.
    """
    predicted = dict.fromkeys(CALIBRATED_PARTS, 0.0)
    for category, value in prediction.seconds.items():
        predicted[part_of(category, plan)] += value
    measured = {name: sum(clock.get(c, 0.0) for c in part.measured) for name, part in CALIBRATED_PARTS.items()}
    parts = {name: ComparedFigure(predicted=predicted[name], measured=measured[name]) for name in CALIBRATED_PARTS}
    step, memory = prediction.step_s, prediction.memory_bytes
    reserve = 0.0 if with_reserve else prediction.memory.get("reserve", 0.0)
    share = 1 - reserve / float(memory.mid)
    update = prediction.update.get("seconds")
    return Reconciled(
        cluster=prediction.cluster,
        update_s=ComparedFigure(predicted=update, measured=update_s) if update and update_s else None,
        seconds=parts,
        step_s=ComparedFigure(
            predicted=float(step.mid), measured=sum(measured.values()), low=float(step.low), high=float(step.high)
        ),
        memory_bytes=ComparedFigure(
            predicted=float(memory.mid) * share,
            measured=memory_bytes,
            low=float(memory.low) * share,
            high=float(memory.high) * share,
        ),
        sent_bytes={
            axis: ComparedFigure(predicted=float(predicted), measured=sent_bytes[axis])
            for axis, predicted in prediction.traffic.items()
            if axis in sent_bytes
        },
        round_wait_s=None
        if round_wait_s is None or not prediction.rounds
        else ComparedFigure(predicted=prediction.rounds["waits_s"], measured=round_wait_s),
    )


Floats = NDArray[np.float64]

FACTOR_STD = 0.5
"""Standard deviation of a factor's logarithm before any run: within 1/1.6 and 1.6 two times of three."""
PLAN_STD, STEP_STD = 0.15, 0.02
"""Standard deviations of a measurement around its prediction: a share of the part, and a share of the whole step."""
GUESS_WEIGHT = 4
"""Weight of these guesses, as a number of measurements: with many more measurements, their own scatter counts."""
ITERATIONS, FACTOR_LONGEST_MOVE = 30, 1.0
LEFT_OUT_STD_SHARE = 0.9
"""A factor with a standard deviation above this share of FACTOR_STD is left out: the runs tell too little about it."""


class SavedComparison(BaseModel):
    """The keys of a run's report that factors are learnt from."""

    device: str
    software: str
    predicted: Reconciled


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    run: RunConfig
    plan: Plan
    device: str
    software: str
    reconciled: Reconciled

    @classmethod
    def read(cls, folder: Path) -> FinishedRun:
        """Read a run's folder. Raises: UserError if it has no report with measured parts."""
        path = folder / "report.json"
        try:
            report: Any = json_of(read_at_most(path, MOST_REPORT_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"--learn {folder}: there is no report.json. Give the folders of finished runs.") from None
        except (OSError, ValueError) as error:
            raise UserError(f"--learn {folder}: report.json cannot be read ({error}). Leave it out.") from None
        if not isinstance(report, dict) or not report.get("predicted"):
            raise UserError(f"--learn {folder}: its report has no measured parts of a step. Leave it out.")
        try:
            saved = SavedComparison.model_validate(report)
        except ValidationError as problem:
            raise UserError(
                f"--learn {folder}: report.json is not as this version writes it ({first_error(problem)}). Leave it "
                "out, or run it again."
            ) from None
        return cls(
            folder=folder,
            run=load(folder / "run.toml"),
            plan=Plan.load(folder / "plan.toml"),
            device=saved.device,
            software=saved.software,
            reconciled=saved.predicted,
        )


def cluster_file(named: str | None) -> Path:
    """Return the file to write factors to: the named one, or that of `argosy probe`. Raises: UserError."""
    path = PROBED if named is None else expanded(named)
    if path.suffix != ".toml" or not path.is_file():
        raise UserError(
            f"--learn writes factors into a cluster's file, and {path} is not one. Write one with argosy probe, or "
            "give --cluster FILE.toml."
        )
    return path


@dataclass(frozen=True)
class LearntFactors:
    """Factors that were written into a cluster's file, for a program."""

    cluster: Path
    """The file."""
    factors: dict[str, Factor]
    """Factors by category, or by constant of serving."""


def learn(folders: Sequence[Path], cluster: Cluster) -> Cluster:
    """Return the cluster with the factors that these runs tell, in place of those that it had.

    Raises: UserError if they ran on other devices, or with different software.
    """
    return learn_from([FinishedRun.read(folder) for folder in folders], cluster)


def learn_from(runs: Sequence[FinishedRun], cluster: Cluster) -> Cluster:
    """Return what `learn` does for runs whose measured parts are known. Raises: UserError, as `learn`."""
    _check(runs, cluster)
    plain = cluster.model_copy(update={"factors": {}})
    raw = [predict(done.plan, done.run, resized(plain, done.plan.world_size)) for done in runs]
    factors = _of_times(runs, raw) | _of_memory(runs, raw)
    return cluster.model_copy(update={"factors": factors, "software": runs[0].software})


def in_words(before: Cluster, after: Cluster, runs: int) -> str:
    """Describe the changes, a line each."""
    lines = [f"factors from {runs} run{'s' if runs > 1 else ''} with {after.software}:"]
    if before.software not in ("", after.software):
        lines.append(f"  (before, the file held factors for {before.software})")
    for name in dict.fromkeys((*before.factors, *after.factors)):
        old, new = before.factors.get(name), after.factors.get(name)
        was = "" if old is None else f"   was {old.value:.2f} +- {old.std:.2f}"
        lines.append(f"  {name:10} " + (f"{new.value:.2f} +- {new.std:.2f}" if new else "none: no run tells") + was)
    return "\n".join(lines)


def _check(runs: Sequence[FinishedRun], cluster: Cluster) -> None:
    for done in runs:
        if done.software != runs[0].software:
            raise UserError(
                f"--learn: {runs[0].folder} ran with {runs[0].software}, and {done.folder} with {done.software}. "
                "Factors hold for one version only: give runs of one."
            )
        if not _is_of(done.device, cluster):
            raise UserError(
                f"--learn {done.folder}: it ran on {done.device}, and the cluster has {cluster.device.name}. "
                "Give --cluster FILE of the machine that it ran on."
            )


def _is_of(device: str, cluster: Cluster) -> bool:
    """Return True if a device, as a report names it, is that of the cluster."""
    if device == "cpu" or cluster.device.kind == "cpu":
        return device == "cpu" and cluster.device.kind == "cpu"
    name = device_named(device)
    return name not in device_names() or cluster.device.name.startswith(find_device(name).name)


def _of_times(runs: Sequence[FinishedRun], raw: Sequence[Prediction]) -> dict[Category, Factor]:
    design, measured, std = [], [], []
    for done, prediction in zip(runs, raw, strict=True):
        step_s = done.reconciled.step_s.measured
        for part, compared in done.reconciled.seconds.items():
            row = [
                sum(prediction.seconds[name] for name in OF_TIME[category] if part_of(name, done.plan) == part)
                for category in OF_TIME
            ]
            if compared.measured > 0 and sum(row) > 0:
                design.append(row)
                measured.append(compared.measured)
                std.append(np.hypot(PLAN_STD, STEP_STD * step_s / compared.measured))
    return _factors(tuple(OF_TIME), np.array(design), np.zeros(len(design)), np.array(measured), np.array(std))


def _of_memory(runs: Sequence[FinishedRun], raw: Sequence[Prediction]) -> dict[Category, Factor]:
    passing = [[sum(prediction.memory.get(name, 0.0) for name in MEMORY_FACTORS["memory"])] for prediction in raw]
    state = [float(p.memory_bytes.mid) - row[0] for p, row in zip(raw, passing, strict=True)]
    measured = [max(done.reconciled.memory_bytes.measured, 1.0) for done in runs]
    std = np.full(len(runs), PLAN_STD)
    return _factors(("memory",), np.array(passing), np.array(state), np.array(measured), std)


def _factors(
    names: Sequence[Category], design: Floats, known: Floats, measured: Floats, std: Floats
) -> dict[Category, Factor]:
    """Return factors of the design's columns such that each row, with its known part, adds up to what was measured."""
    logs, deviations, misses = _posterior(design, known, measured, std)
    scatter = np.sqrt((GUESS_WEIGHT + ((misses / std) ** 2).sum()) / (GUESS_WEIGHT + len(misses)))
    logs, deviations, _ = _posterior(design, known, measured, std * max(1.0, scatter))
    return {
        name: Factor(value=four_digits(np.exp(log)), std=four_digits(np.exp(log) * deviation))
        for name, log, deviation in zip(names, logs, deviations, strict=True)
        if deviation < LEFT_OUT_STD_SHARE * FACTOR_STD
    }


def _posterior(design: Floats, known: Floats, measured: Floats, std: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the logarithms of the most probable factors, their standard deviations, and the rows' errors."""
    logs = np.zeros(design.shape[1])
    prior = np.eye(len(logs)) / FACTOR_STD**2
    for _ in range(ITERATIONS):
        parts = design * np.exp(logs)
        total = known + parts.sum(axis=1)
        misses, slopes = np.log(measured / total), parts / total[:, None]
        curvature = slopes.T / std**2 @ slopes + prior
        move = np.linalg.solve(curvature, slopes.T @ (misses / std**2) - prior @ logs)
        logs = logs + np.clip(move, -FACTOR_LONGEST_MOVE, FACTOR_LONGEST_MOVE)
    return logs, np.sqrt(np.diag(np.linalg.inv(curvature))), misses
