"""Learn calibration factors from finished runs: how much longer than predicted each part of their steps took.

Before any run is seen, the logarithm of each factor is normal around 0 (no change). The logarithm of a measured part of
a step is normal around the sum of its predicted categories times their factors. A part may hold several categories (a
layer's waits are inside its forward), so that all factors are found together, by Gauss-Newton on the posterior; its
curvature gives their uncertainty. Few runs move a factor less; a category that no run tells about has no factor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.calibration.reconcile import Reconciled, part_of
from argosy.plan.cost.breakdown import OF_MEMORY, OF_TIME
from argosy.plan.cost.prediction import Prediction, predict
from argosy.plan.hardware.clusters import Category, Cluster, Factor
from argosy.plan.hardware.devices import device_names, find_device
from argosy.plan.hardware.local_machine import PROBED, device_named, resized
from argosy.plan.plan import Plan

Floats = NDArray[np.float64]

PRIOR_STD = 0.5
"""Standard deviation of a factor's logarithm before any run: within 1/1.6 and 1.6 two times of three."""
PLAN_STD, STEP_STD = 0.15, 0.02
"""Standard deviations of a measurement around its prediction: a share of the part, and a share of the whole step."""
FREEDOM = 4
"""Weight of these guesses, as a number of measurements: with many more measurements, their own scatter counts."""
ITERATIONS, LONGEST_MOVE = 30, 1.0
TOLD = 0.9
"""A factor with a standard deviation above this share of PRIOR_STD is left out: the runs tell too little about it."""


@dataclass(frozen=True)
class Finished:
    """A finished run and its report."""

    folder: Path
    run: RunConfig
    plan: Plan
    device: str
    software: str
    reconciled: Reconciled

    @classmethod
    def read(cls, folder: Path) -> Finished:
        """Read a run's folder. Raises: UserError if it has no report with measured parts."""
        path = folder / "report.json"
        try:
            report: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise UserError(f"--learn {folder}: there is no report.json. Give the folders of finished runs.") from None
        except ValueError as error:
            raise UserError(f"--learn {folder}: report.json cannot be read ({error}). Leave it out.") from None
        if not report.get("predicted"):
            raise UserError(f"--learn {folder}: its report has no measured parts of a step. Leave it out.")
        return cls(
            folder=folder,
            run=load(folder / "run.toml"),
            plan=Plan.load(folder / "plan.toml"),
            device=report["device"],
            software=report["software"],
            reconciled=Reconciled.model_validate(report["predicted"]),
        )


def cluster_file(named: str | None) -> Path:
    """Return the file to write factors to: the named one, or that of `argosy probe`. Raises: UserError."""
    path = PROBED if named is None else Path(named).expanduser()
    if path.suffix != ".toml" or not path.is_file():
        raise UserError(
            f"--learn writes factors into a cluster's file, and {path} is not one. Write one with argosy probe, or "
            "give --cluster FILE.toml."
        )
    return path


def learn(folders: Sequence[Path], cluster: Cluster) -> Cluster:
    """Return the cluster with the factors that these runs tell, in place of those that it had.

    Raises: UserError if they ran on other devices, or with different software.
    """
    return learn_from([Finished.read(folder) for folder in folders], cluster)


def learn_from(runs: Sequence[Finished], cluster: Cluster) -> Cluster:
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


def _check(runs: Sequence[Finished], cluster: Cluster) -> None:
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


def _of_times(runs: Sequence[Finished], raw: Sequence[Prediction]) -> dict[Category, Factor]:
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


def _of_memory(runs: Sequence[Finished], raw: Sequence[Prediction]) -> dict[Category, Factor]:
    passing = [[sum(prediction.memory.get(name, 0.0) for name in OF_MEMORY["memory"])] for prediction in raw]
    state = [float(p.memory_bytes.mid) - row[0] for p, row in zip(raw, passing, strict=True)]
    measured = [max(done.reconciled.memory_bytes.measured, 1.0) for done in runs]
    std = np.full(len(runs), PLAN_STD)
    return _factors(("memory",), np.array(passing), np.array(state), np.array(measured), std)


def _factors(
    names: Sequence[Category], design: Floats, known: Floats, measured: Floats, std: Floats
) -> dict[Category, Factor]:
    """Return factors of the design's columns such that each row, with its known part, adds up to what was measured."""
    logs, deviations, misses = _posterior(design, known, measured, std)
    scatter = np.sqrt((FREEDOM + ((misses / std) ** 2).sum()) / (FREEDOM + len(misses)))
    logs, deviations, _ = _posterior(design, known, measured, std * max(1.0, scatter))
    return {
        name: Factor(value=_short(np.exp(log)), std=_short(np.exp(log) * deviation))
        for name, log, deviation in zip(names, logs, deviations, strict=True)
        if deviation < TOLD * PRIOR_STD
    }


def _posterior(design: Floats, known: Floats, measured: Floats, std: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the logarithms of the most probable factors, their standard deviations, and the rows' errors."""
    logs = np.zeros(design.shape[1])
    prior = np.eye(len(logs)) / PRIOR_STD**2
    for _ in range(ITERATIONS):
        parts = design * np.exp(logs)
        total = known + parts.sum(axis=1)
        misses, slopes = np.log(measured / total), parts / total[:, None]
        curvature = slopes.T / std**2 @ slopes + prior
        move = np.linalg.solve(curvature, slopes.T @ (misses / std**2) - prior @ logs)
        logs = logs + np.clip(move, -LONGEST_MOVE, LONGEST_MOVE)
    return logs, np.sqrt(np.diag(np.linalg.inv(curvature))), misses


def _short(value: float) -> float:
    return float(f"{value:.4g}")
