"""What a place where trials run has to do: the interface between a sweep and local processes, SLURM and Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from argosy.config.schema import RunConfig
from argosy.launch.engines.job import JobState, LaunchedJob


@dataclass(frozen=True)
class Needs:
    """What one trial takes of a machine."""

    cores: int
    gpus: int = 0
    memory_bytes: float = 0.0
    """Host memory of all its processes, as predicted; 0 if its model is on GPUs."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks of a cluster for each trial."""

    gpus: int = 0
    time: str = ""
    account: str = ""
    partition: str = ""
    address: str = ""
    """Where the cluster is reached."""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A trial that is to be trained from its newest checkpoint on, or from the start if it has none.

    It trains until its run file says, its end or `train.pause_at`; then its command ends with exit code 0.
    """

    number: int
    """The trial's number in the sweep, from 0."""
    run: RunConfig
    run_dir: Path
    """Absolute. It exists, and so does its folder `launch`, for what the task prints."""
    words: tuple[str, ...]
    """The words after `argosy train`: the run file, --run-dir and `run_dir`; both paths are absolute."""
    needs: Needs


class TrialExecutor(ABC):
    """A place where trials run. Each method raises UserError if the place is not there, or refuses.

    The sweep calls it from one thread, asks for `states` every few seconds, and keeps each job in its trial's folder
    (`LaunchedJob.save`), so that a sweep that was killed finds its trials again: a job must be found by what stands in
    it, from another process. A job that has ended is not asked about again; if its trial has not ended, it is given to
    `start` once more and gets a new job.
    """

    name: ClassVar[str]
    """What stands in `LaunchedJob.engine`; the engine of that name in `launch.engines.table` serves `argosy runs`,
    `logs` and `stop` for single trials."""
    queues: ClassVar[bool] = True
    """True if the place lets tasks wait until there is room: then all that are ready are handed over at once."""
    poll_s: ClassVar[float] = 5.0
    """Seconds between two looks."""

    @abstractmethod
    def start(self, tasks: Sequence[Task]) -> list[LaunchedJob]:
        """Start each task, or put it into the place's queue; return their jobs, in the same order."""

    @abstractmethod
    def states(self, jobs: Sequence[LaunchedJob]) -> list[JobState]:
        """Return waiting, running or ended for each job; one that the place no longer knows has ended."""

    @abstractmethod
    def stop(self, jobs: Sequence[LaunchedJob]) -> None:
        """Have these jobs save their state and end (SIGTERM to `argosy train`), and return without waiting for it."""

    def fits(self, task: Task) -> bool:
        """Return True if the task may be started now."""
        return True

    @property
    def is_full(self) -> bool:
        """True if no task would fit, whatever it needs."""
        return False

    def found(self, task: Task, job: LaunchedJob | None) -> LaunchedJob | None:
        """Return the job that a sweep that was killed has left, if it goes on; job: its record, if there is one."""
        return job if job is not None and self.states([job])[0] != "ended" else None

    def exit_code(self, job: LaunchedJob) -> int | None:
        """Return the exit code of a job that has ended; None if nobody knows it."""
        return None
