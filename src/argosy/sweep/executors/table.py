"""The places where trials run, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from argosy.errors import UserError
from argosy.sweep.config import SweepConfig
from argosy.sweep.executor import Asked, Executor
from argosy.sweep.executors.local import LocalTrials
from argosy.sweep.executors.slurm import SlurmTrials
from argosy.sweep.needs import Limits, limits_of

Place = Literal["local", "slurm"]


def limits_on(place: Place, config: SweepConfig) -> Limits:
    """Return what trials that run at the same time may take: in a place that queues them, only their number counts."""
    if place == "local":
        return limits_of(config.parallel)
    return Limits(trials=config.parallel.trials, cores=0, memory_bytes=float("inf"))


def executor_on(place: Place, config: SweepConfig, folder: Path, limits: Limits, asked: Asked) -> Executor:
    """Return the place of that name. Raises: UserError if it is not there, or does not take what is asked."""
    if place == "slurm":
        return SlurmTrials(folder, config.name, limits.trials, asked)
    if asked != Asked():
        raise UserError(
            "--gpus-per-trial, --time, --account, --partition and --extra are for clusters. Leave them out."
        )
    return LocalTrials(limits)
