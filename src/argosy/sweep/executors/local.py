"""Trials as processes of this machine, within the limits of its cores, memory and GPUs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from argosy.files import LOCK
from argosy.launch.engines.job import FOLDER, JobState, LaunchedJob
from argosy.launch.engines.local import Local, job_of
from argosy.launch.engines.table import state_of
from argosy.sweep.executor import Task, TrialExecutor
from argosy.sweep.needs import Limits, Room

LOG = "local.out"
GPUS = "gpus"
"""File in a trial's folder for launches: the GPUs that its processes were given."""


class LocalTrials(TrialExecutor):
    """Each trial is an `argosy train` in a session of its own: it outlives a sweep that is killed."""

    name = "local"
    queues = False
    poll_s = 0.5

    def __init__(self, limits: Limits):
        self._room = Room(limits)
        self._engine = Local()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers: dict[str, int] = {}

    def fits(self, task: Task) -> bool:
        """Return True if there is room for the trial beside those that run."""
        return self._room.fits(task.needs)

    @property
    def is_full(self) -> bool:
        """True if no trial fits."""
        return self._room.is_full

    def start(self, tasks: Sequence[Task]) -> list[LaunchedJob]:
        """Start each task, unless a process that a killed sweep has left trains it already."""
        return [self.found(task, None) or self._start(task) for task in tasks]

    def found(self, task: Task, job: LaunchedJob | None) -> LaunchedJob | None:
        """Return the job that trains this trial already: of its record, or of the process that holds its folder."""
        if job is None or job.engine != self.name or state_of(job)[0] != "running":
            owner = _owner(task.run_dir)
            job = job_of(owner, _log(task)) if owner else None
        if job is None:
            return None
        gpus = task.run_dir / FOLDER / GPUS
        self._room.take(task.number, task.needs, tuple(gpus.read_text().split()) if gpus.exists() else ())
        self._numbers[job.id] = task.number
        return job

    def states(self, jobs: Sequence[LaunchedJob]) -> list[JobState]:
        """Return what runs; the room of what has ended is given back."""
        states: list[JobState] = []
        for job in jobs:
            child = self._children.get(job.id)
            running = child.poll() is None if child else self._engine.state(job)[0] != "ended"
            if not running:
                self._room.give_back(self._numbers.pop(job.id, -1))
            states.append("running" if running else "ended")
        return states

    def exit_code(self, job: LaunchedJob) -> int | None:
        """Return the exit code of a job that has ended; None if another process has started it."""
        child = self._children.get(job.id)
        return child.poll() if child else None

    def stop(self, jobs: Sequence[LaunchedJob]) -> None:
        """Send SIGTERM."""
        for job in jobs:
            self._engine.stop(job)

    def _start(self, task: Task) -> LaunchedJob:
        gpus = self._room.take(task.number, task.needs)
        environment = dict(os.environ)
        folder = task.run_dir / FOLDER
        if gpus:
            (folder / GPUS).write_text(" ".join(gpus))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with _log(task).open("ab") as out:
            child = subprocess.Popen(
                [sys.executable, "-m", "argosy", "train", *task.words], env=environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        job = job_of(child.pid, _log(task))
        self._children[job.id] = child
        self._numbers[job.id] = task.number
        return job


def _log(task: Task) -> Path:
    return task.run_dir / FOLDER / LOG


def _owner(run_dir: Path) -> int | None:
    """Return the process that holds the lock of a run's folder; None if none does."""
    with suppress(OSError, ValueError), (run_dir / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.readline())
    return None
