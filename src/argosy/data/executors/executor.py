"""What is asked of an executor: start a program a number of times, say which of those processes live, end them.

The processes find their work in a folder that all machines see; an executor knows nothing of it. It starts none again
by itself: its caller does, which knows whether there is work left.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

WORKER = "ARGOSY_WORKER"
"""Environment variable with a worker's name, which an executor sets. No two workers of a folder have the same, unless
one is the other, started again by the cluster."""
WorkerState = Literal["waiting", "running", "ended"]


@dataclass(frozen=True)
class Program:
    """What each worker runs: `python -m MODULE ARGUMENTS`."""

    module: str
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The command, for executors that start it by its words."""
        return (sys.executable, "-m", self.module, *self.arguments)


@dataclass(frozen=True)
class WorkersRequest:
    """What is to be run, and what each worker asks for."""

    name: str
    """A short name, for lists such as squeue's."""
    program: Program
    folder: Path
    """A folder that all machines see, for what workers print and what an executor keeps. It exists."""
    work_dir: Path
    """Where the command was given: relative paths begin there."""
    environment: Mapping[str, str]
    """Added to the environment of each worker."""
    cpus: int = 1
    """CPUs of each worker."""
    time: str = ""
    account: str = ""
    partition: str = ""
    address: str = ""
    """Where the cluster is reached."""
    extra: tuple[str, ...] = ()
    """Options of the cluster's own, passed through."""


class CrewExecutor(Protocol):
    """Starts workers. Each method raises UserError if the cluster is not there or refuses."""

    def __init__(self, request: WorkersRequest) -> None:
        """Start nothing yet. Raises: UserError if the request asks for what this executor has not."""

    def start(self, count: int) -> Sequence[str]:
        """Start so many workers, and return their names. Return before they run: they may have to wait for machines."""
        ...

    def states(self) -> Mapping[str, tuple[WorkerState, str]]:
        """Return what has become of each worker that was started, and a few words on it (why it waits, how it ended).

        Cheap enough to be called every few seconds. One that is started again by the cluster, after a failure of its
        machine, waits or runs.
        """
        ...

    def stop(self) -> None:
        """End all workers, and free what was asked for. Nothing of theirs has to be saved."""
        ...
