"""Trials as tasks of SLURM array jobs: each task is the batch job that `argosy launch --on slurm` makes for a run.

So a trial saves before its time is over, and is requeued until it has come to its end or its rung. The tasks that are
ready at the same time are one array; what they print is in the trials' folders.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from argosy.errors import UserError
from argosy.files import atomic_write
from argosy.launch.engines.engine import LaunchRequest
from argosy.launch.engines.job import FOLDER, JobState, LaunchedJob
from argosy.launch.engines.slurm import Slurm
from argosy.processes.slurm import ask, directives, meaning
from argosy.sweep.executor import Asked, Task, TrialExecutor

ARRAYS, RECORD, SCRIPT = "arrays", "array.json", "array.sh"
"""The folder in a sweep's for what was submitted; in it, a folder for each array, with its record and its script."""
PATIENCE_S = 600.0
"""A controller that does not answer for so long ends the sweep; its trials go on."""


class SlurmTrials(TrialExecutor):
    """The cluster whose sbatch is at hand."""

    name = "slurm"

    def __init__(self, folder: Path, name: str, at_once: int, asked: Asked):
        """folder, name: the sweep's. at_once: trials that may run at a time; 0: as many as SLURM starts.

        Raises: UserError if there is no SLURM here.
        """
        self._arrays, self._at_once, self._asked = folder / ARRAYS, at_once, asked
        self._name = f"{name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        self._answered_s = time.monotonic()
        self._listed()

    def start(self, tasks: Sequence[Task]) -> list[LaunchedJob]:
        """Submit the tasks as one array. Its record is there before it is: see `found`."""
        array = self._arrays / f"{len(list(self._arrays.glob('*'))):04d}"
        array.mkdir(parents=True)
        (array / SCRIPT).write_text(self._script(array, tasks))
        numbers = [task.number for task in tasks]
        _record(array, numbers, "")
        job_id = ask("sbatch", "--parsable", str(array / SCRIPT)).split(";")[0]
        _record(array, numbers, job_id)
        return [_job(task, job_id, place) for place, task in enumerate(tasks)]

    def states(self, jobs: Sequence[LaunchedJob]) -> list[JobState]:
        """Return what squeue says of them. If it does not answer for a while, they are as they were."""
        try:
            listed = self._listed()
        except UserError:
            if time.monotonic() - self._answered_s > PATIENCE_S:
                raise
            return ["running"] * len(jobs)
        return [meaning(listed.get(job.id, ("", ""))[0]) for job in jobs]

    def stop(self, jobs: Sequence[LaunchedJob]) -> None:
        """Send SIGTERM to their agents, which save."""
        ask("scancel", *(job.id for job in jobs))

    def found(self, task: Task, job: LaunchedJob | None) -> LaunchedJob | None:
        """Return the task of the newest array with this trial, if it goes on.

        A sweep may have been killed before it knew the array's number: then it is found by its name.
        """
        for array in sorted(self._arrays.glob("*"), reverse=True):
            if not (array / RECORD).exists():
                continue
            record = json.loads((array / RECORD).read_text())
            if task.number not in record["trials"]:
                continue
            listed = self._listed()
            named = (id_ for id_, (_, name) in listed.items() if name == self._name_of(array))
            job_id = record["job"] or next(named, "").partition("_")[0]
            job = _job(task, job_id, record["trials"].index(task.number))
            return job if meaning(listed.get(job.id, ("", ""))[0]) != "ended" else None
        return None

    def _listed(self) -> dict[str, tuple[str, str]]:
        """Return id -> (state, name) of the user's jobs, tasks of arrays one by one. Raises: UserError."""
        lines = ask("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i %T %j").splitlines()
        self._answered_s = time.monotonic()
        return {words[0]: (words[1], words[2]) for line in lines if len(words := line.split(maxsplit=2)) == 3}

    def _name_of(self, array: Path) -> str:
        return f"{self._name}-{array.name}"

    def _script(self, array: Path, tasks: Sequence[Task]) -> str:
        """Return the batch script of an array: with the options of one of its trials, it runs the script of each."""
        scripts = [Slurm().script(self._request(task)) for task in tasks]
        for place, (task, script) in enumerate(zip(tasks, scripts, strict=True)):
            folder = shlex.quote(str(task.run_dir / FOLDER))
            log = f'{folder}/"slurm-${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}.out"'
            text = script.replace("#!/bin/bash\n", f"#!/bin/bash\nexec >> {log} 2>&1\n", 1)
            (array / f"{place}.sh").write_text(text)
        options = [line for line in scripts[0].splitlines() if line.startswith("#SBATCH ")]
        most = f"%{self._at_once}" if self._at_once else ""
        own = {
            "job-name": self._name_of(array),
            "array": f"0-{len(tasks) - 1}{most}",
            "cpus-per-task": str(max(task.needs.cores for task in tasks)),
            "output": "/dev/null",
        }
        options = [line for line in options if line.removeprefix("#SBATCH --").partition("=")[0] not in own]
        options += directives(own)
        return "\n".join(
            ["#!/bin/bash", *options, f'exec bash {shlex.quote(str(array))}/"$SLURM_ARRAY_TASK_ID.sh"', ""]
        )

    def _request(self, task: Task) -> LaunchRequest:
        return LaunchRequest(
            run=task.run,
            run_dir=task.run_dir,
            words=task.words[:1],  # the engine adds the folder
            work_dir=Path.cwd(),
            cpus_per_node=task.needs.cores,
            gpus_per_node=self._asked.gpus,
            time=self._asked.time,
            account=self._asked.account,
            partition=self._asked.partition,
            extra=self._asked.extra,
        )


def _job(task: Task, job_id: str, place: int) -> LaunchedJob:
    id_ = f"{job_id}_{place}"
    log = str(task.run_dir / FOLDER / f"slurm-{id_}.out")
    return LaunchedJob(engine=SlurmTrials.name, id=id_, submitted_s=round(time.time(), 3), nodes=1, log=log)


def _record(array: Path, numbers: list[int], job_id: str) -> None:
    with atomic_write(array / RECORD) as file:
        file.write(json.dumps({"trials": numbers, "job": job_id}).encode())
