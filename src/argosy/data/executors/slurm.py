"""SLURM: an array job with a task for each worker. Tasks begin one by one, as the cluster has room for them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress

from argosy.data.executors.executor import WORKER, WorkersRequest, WorkerState
from argosy.errors import UserError
from argosy.processes.slurm import GONE, ask, directives, find, in_words, listed, meaning, output


class SlurmExecutor:
    """Array jobs of the cluster whose sbatch is at hand."""

    def __init__(self, request: WorkersRequest) -> None:
        if request.address:
            raise UserError("--on slurm: --address has no effect there. Leave it out.")
        find("sbatch")
        self._request, self._jobs = request, list[str]()
        self._workers: dict[str, tuple[WorkerState, str]] = {}

    def start(self, count: int) -> Sequence[str]:
        """Submit an array of so many tasks. Raises: UserError with what sbatch says, if it refuses."""
        path = self._request.folder / "workers.sh"
        path.write_text(self.script(count))
        job = ask("sbatch", "--parsable", str(path)).split(";")[0]
        self._jobs.append(job)
        names = [f"slurm-{job}-{number}" for number in range(count)]
        self._workers.update(dict.fromkeys(names, ("waiting", "submitted")))
        return names

    def script(self, count: int) -> str:
        """Return the batch script of so many workers."""
        request = self._request
        options = {
            "job-name": request.name,
            "array": f"0-{count - 1}",
            "ntasks": "1",
            "cpus-per-task": str(request.cpus),
            "time": request.time,
            "account": request.account,
            "partition": request.partition,
            "output": output(str(request.folder), "slurm-%A-%a.out"),
            "open-mode": "append",
        }
        exports = [f"export {name}={shlex.quote(value)}" for name, value in request.environment.items()]
        return "\n".join(
            [
                "#!/bin/bash",
                *directives(options),
                "#SBATCH --requeue",
                *(f"#SBATCH {line}" for line in request.extra),
                *exports,
                f'export {WORKER}="slurm-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID"',
                f"cd {shlex.quote(str(request.work_dir))} || exit 2",
                f"exec {shlex.join(request.program.words)}",
                "",
            ]
        )

    def states(self) -> Mapping[str, tuple[WorkerState, str]]:
        """Return what squeue says of the tasks. One that it does not know any more has ended."""
        with suppress(UserError):  # a controller that is busy or restarts says nothing of any task
            known = {}
            for line in listed("--array", "--format=%F %K %T %r", f"--jobs={','.join(self._jobs)}"):
                job, task, state, *reason = line.split(maxsplit=3)
                known[f"slurm-{job}-{task}"] = (meaning(state), in_words(state, " ".join(reason)))
            self._workers = {name: known.get(name, ("ended", GONE)) for name in self._workers}
        return self._workers

    def stop(self) -> None:
        """Cancel the jobs."""
        with suppress(UserError):
            if self._jobs:
                ask("scancel", *self._jobs)
