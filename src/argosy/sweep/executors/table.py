"""The places where trials run, by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Literal

from argosy.errors import UserError
from argosy.sweep.config import SweepConfig
from argosy.sweep.executor import Asked, TrialExecutor
from argosy.sweep.executors.local import LocalTrials
from argosy.sweep.executors.ray import RayTrials
from argosy.sweep.executors.slurm import SlurmTrials
from argosy.sweep.needs import Limits, limits_of

Place = Literal["local", "slurm", "ray"]
TAKES: dict[Place, tuple[str, ...]] = {
    "local": (),
    "slurm": ("gpus", "time", "account", "partition", "extra"),
    "ray": ("gpus", "address", "extra"),
}
"""What the command line may ask of each place."""


def limits_on(place: Place, config: SweepConfig) -> Limits:
    """Return what trials that run at the same time may take together.

    On SLURM only their number counts, on Ray what the sweep file says.
    """
    parallel = config.parallel
    if place == "local":
        return limits_of(parallel)
    if place == "ray":
        return Limits(parallel.trials, parallel.cores, parallel.memory_gb * 1e9 or float("inf"))
    return Limits(parallel.trials, cores=0, memory_bytes=float("inf"))


def executor_on(place: Place, config: SweepConfig, folder: Path, limits: Limits, asked: Asked) -> TrialExecutor:
    """Return the place of that name. Raises: UserError if it is not there, or does not take what is asked."""
    default = Asked()
    given = [field.name for field in fields(Asked) if getattr(asked, field.name) != getattr(default, field.name)]
    if others := [_option(name) for name in given if name not in TAKES[place]]:
        known = ", ".join(map(_option, TAKES[place])) or "none"
        raise UserError(f"--on {place}: {', '.join(others)} has no meaning there. Leave it out; known: {known}.")
    if place == "slurm":
        return SlurmTrials(folder, config.name, limits.trials, asked)
    if place == "ray":
        return RayTrials(folder, config.name, limits, asked)
    return LocalTrials(limits)


def _option(name: str) -> str:
    return "--gpus-per-trial" if name == "gpus" else f"--{name}"
