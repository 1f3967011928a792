"""The executors, by the name that `--on` takes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from argosy.data.executors.executor import CrewExecutor

ExecutorName = Literal["local", "slurm", "ray"]
EXECUTORS: dict[ExecutorName, tuple[str, str]] = {
    "local": ("argosy.data.executors.local", "LocalExecutor"),
    "slurm": ("argosy.data.executors.slurm", "SlurmExecutor"),
    "ray": ("argosy.data.executors.ray", "RayExecutor"),
}
"""Module and class; imported when it is used, as it may need a package."""


@dataclass(frozen=True)
class Machines:
    """Where workers run, and what each asks for."""

    on: ExecutorName = "local"
    cpus: int = 1
    time: str = ""
    account: str = ""
    partition: str = ""
    address: str = ""
    extra: tuple[str, ...] = ()


def executor_class(name: ExecutorName) -> type[CrewExecutor]:
    """Import an executor. Raises: UserError if its package is missing."""
    module, kind = EXECUTORS[name]
    found: type[CrewExecutor] = getattr(import_module(module), kind)
    return found
