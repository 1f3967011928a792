"""Trials as jobs of a Ray cluster, each of which asks for its trial's cores, GPUs and memory and waits for them.

A job is an `argosy train` in a session of its own; Ray knows it by its number, which begins as those of its sweep and
trial. So it outlives a sweep that is killed, the same command finds it again, and `argosy runs`, `logs` and `stop` take
it for what it is: a run that was launched on Ray.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from argosy.errors import UserError
from argosy.launch.engines.engine import LaunchRequest
from argosy.launch.engines.job import FOLDER, JobState, LaunchedJob
from argosy.launch.engines.ray import Ray, client_of, refusals, submit
from argosy.sweep.executor import Asked, Needs, Task, TrialExecutor
from argosy.sweep.needs import Limits, Room

LOG = "ray.out"
MOST_WAITING = 8
"""Most trials that wait in the cluster for room. Ray gives each of them a process, and takes the first that
fits; those that the sweep has not handed over cost nothing."""
WAITED_LONG = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
"""What Ray calls the end of a job that has waited for room for 15 minutes (RAY_JOB_START_TIMEOUT_SECONDS of the
head): it is submitted again."""
PATIENCE_S = 600.0
"""A dashboard that does not answer for so long ends the sweep; its trials go on."""
NEWS_S = 1.0
"""Age at which what the cluster has said of its jobs is asked for again."""
RESOURCES = {
    "entrypoint_num_cpus": ("CPU", 1.0, "CPUs"),
    "entrypoint_num_gpus": ("GPU", 1.0, "GPUs"),
    "entrypoint_memory": ("memory", 1e9, "GB of memory"),
}
"""What a job asks for -> what Ray calls it on a node, its unit, and that in words."""
NODES = 10_000
"""Most nodes that Ray is asked for."""


@dataclass
class _Trial:
    """A trial that waits or runs."""

    task: Task
    job: LaunchedJob
    """What is in Ray's queue for it now."""
    is_waiting: bool = True


class RayTrials(TrialExecutor):
    """The cluster whose dashboard is at an address, or that this machine is a part of."""

    name = "ray"
    queues = False
    poll_s = 2.0

    def __init__(self, folder: Path, name: str, limits: Limits, asked: Asked):
        """folder, name: the sweep's. limits: of all trials together; 0 cores: no limit.

        Raises: UserError if there is no cluster there.
        """
        self._room = Room(replace(limits, cores=limits.cores or sys.maxsize))
        self._asked = asked
        self._prefix = f"argosy-{name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        self._client = client_of(asked.address)
        self._trials: dict[str, _Trial] = {}
        """Job, as the sweep knows it -> its trial."""
        self._listed: dict[str, Any] = {}
        self._listed_s = -math.inf
        self._list()

    def fits(self, task: Task) -> bool:
        """Return True if the sweep's own limits leave room, and not too many trials wait for the cluster's."""
        return not self._many_wait and self._room.fits(task.needs)

    @property
    def is_full(self) -> bool:
        """True if no trial would fit."""
        return self._many_wait or self._room.is_full

    @property
    def _many_wait(self) -> bool:
        return sum(trial.is_waiting for trial in self._trials.values()) >= MOST_WAITING

    def start(self, tasks: Sequence[Task]) -> list[LaunchedJob]:
        """Submit a job for each task."""
        return [self._take(task, self._submit(task)) for task in tasks]

    def found(self, task: Task, job: LaunchedJob | None) -> LaunchedJob | None:
        """Return the job with this trial that waits or runs.

        A sweep may have been killed before it wrote the job down: then it is found by the beginning of its number.
        """
        self._list()
        for job_id, details in self._listed.items():
            if job_id.startswith(self._number(task)) and _state(details) != "ended":
                return self._take(task, self._job(task, job_id))  # not the record's words: its folder may be a copy
        return None

    def states(self, jobs: Sequence[LaunchedJob]) -> list[JobState]:
        """Return what Ray says of them. If it does not answer for a while, they are as they were."""
        self._list()
        return [self._state(job) for job in jobs]

    def stop(self, jobs: Sequence[LaunchedJob]) -> None:
        """Send SIGTERM to their agents, which save."""
        for job in jobs:
            Ray().stop(self._trials[job.id].job if job.id in self._trials else job)

    def _take(self, task: Task, job: LaunchedJob) -> LaunchedJob:
        self._room.take(task.number, task.needs)
        self._trials[job.id] = _Trial(task, job)
        return job

    def _state(self, job: LaunchedJob) -> JobState:
        if (trial := self._trials.get(job.id)) is None:
            return "ended"
        details = self._listed.get(trial.job.id)
        if details is None and trial.is_waiting:  # Ray was asked before it was submitted
            return "waiting"
        if getattr(details, "error_type", None) == WAITED_LONG:
            self._submit_again(trial)
            return "waiting"
        state = _state(details)
        trial.is_waiting = state == "waiting"
        if state == "ended":
            self._room.give_back(trial.task.number)
            del self._trials[job.id]
        return state

    def _submit(self, task: Task) -> LaunchedJob:
        job_id = self._number(task) + secrets.token_hex(3)
        words = ("-m", "argosy", "train", *task.words)
        wanted = self._resources(task.needs)
        return submit(self._request(task), job_id, words, _log(task), is_ours=True, **wanted)

    def _submit_again(self, trial: _Trial) -> None:
        """Put a job that waited too long into the queue again. Raises: UserError if no node of the cluster fits it."""
        wanted = self._resources(trial.task.needs)
        nodes = _nodes(self._client.get_address())
        if not any(_fits(wanted, node) for node in nodes):
            there = "; ".join(sorted({_in_words(node) for node in nodes})) or "it has no nodes"
            raise UserError(
                f"--on ray: trial {trial.task.number:04d} needs {_in_words(wanted)} of one node, and no node of the "
                f"cluster has that ({there}). Let trials be smaller (model, train.global_batch), ask for fewer "
                "--gpus-per-trial, or add a node; the same command goes on."
            )
        trial.job = self._submit(trial.task)
        trial.job.save(trial.task.run_dir)

    def _list(self) -> None:
        """Ask Ray for its jobs, if that was not done a moment ago. Raises: UserError if it is away for too long."""
        now_s = time.monotonic()
        if now_s - self._listed_s < NEWS_S:
            return
        try:
            with refusals():
                jobs = self._client.list_jobs()
        except (UserError, OSError):
            if now_s - self._listed_s > PATIENCE_S:
                raise
            return
        self._listed_s = now_s
        self._listed = {job.submission_id: job for job in jobs if (job.submission_id or "").startswith(self._prefix)}

    def _number(self, task: Task) -> str:
        """Return the beginning of what Ray calls this trial's jobs."""
        return f"{self._prefix}-{task.number:04d}-"

    def _job(self, task: Task, job_id: str) -> LaunchedJob:
        place = {"address": self._client.get_address()}
        now_s = round(time.time(), 3)
        return LaunchedJob(engine=self.name, id=job_id, submitted_s=now_s, nodes=1, log=str(_log(task)), place=place)

    def _resources(self, needs: Needs) -> dict[str, float]:
        """Return what a trial asks of the cluster, by the names of `RESOURCES`."""
        gpus = self._asked.gpus
        more = {"entrypoint_num_gpus": gpus} if gpus else {"entrypoint_memory": int(needs.memory_bytes)}
        return {"entrypoint_num_cpus": needs.cores, **more}

    def _request(self, task: Task) -> LaunchRequest:
        return LaunchRequest(
            run=task.run,
            run_dir=task.run_dir,
            words=task.words,
            work_dir=Path.cwd(),
            address=self._asked.address,
            extra=self._asked.extra,
        )


def _log(task: Task) -> Path:
    return task.run_dir / FOLDER / LOG


def _state(details: Any) -> JobState:
    """Return the state of a job from Ray's details; of one that it no longer knows, that it has ended."""
    status = "" if details is None else str(details.status.value)
    return {"PENDING": "waiting", "RUNNING": "running"}.get(status, "ended")  # type: ignore[return-value]


def _nodes(address: str) -> list[dict[str, float]]:
    """Return what each node of a cluster has, by the names of `RESOURCES`."""
    from ray.util.state import list_nodes

    with refusals():
        nodes = list_nodes(address=address, filters=[("state", "=", "ALIVE")], limit=NODES, detail=True)
    return [
        {name: float(node.resources_total.get(theirs, 0)) for name, (theirs, _, _) in RESOURCES.items()}
        for node in nodes
    ]


def _fits(wanted: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node[name] >= amount for name, amount in wanted.items())


def _in_words(amounts: Mapping[str, float]) -> str:
    return ", ".join(
        f"{amounts[name] / unit:.3g} {words}" for name, (_, unit, words) in RESOURCES.items() if amounts.get(name)
    )
