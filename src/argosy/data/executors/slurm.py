"""SLURM: an array job with a task for each worker. Tasks begin one by one, as the cluster has room for them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from argosy.data.executors.executor import WORKER, Request, WorkerState
from argosy.errors import UserError

ANSWER_S = 60.0
RUNNING = ("RUNNING", "COMPLETING", "STOPPED")
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "REVOKED", "TIMEOUT")  # fmt: skip


class SlurmExecutor:
    """Array jobs of the cluster whose sbatch is at hand."""

    def __init__(self, request: Request) -> None:
        if request.address:
            raise UserError("--on slurm: --address has no effect there. Leave it out.")
        _find("sbatch")
        self._request, self._jobs = request, list[str]()
        self._workers: dict[str, tuple[WorkerState, str]] = {}

    def start(self, count: int) -> Sequence[str]:
        """Submit an array of so many tasks. Raises: UserError with what sbatch says, if it refuses."""
        path = self._request.folder / "workers.sh"
        path.write_text(self.script(count))
        job = _ask("sbatch", "--parsable", str(path)).split(";")[0]
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
            "output": f"{request.folder}/slurm-%A-%a.out",
            "open-mode": "append",
        }
        exports = [f"export {name}={shlex.quote(value)}" for name, value in request.environment.items()]
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH --{name}={value}" for name, value in options.items() if value),
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
        with suppress(_NoAnswer):  # a controller that is busy or restarts says nothing of any task
            answer = _ask(
                "squeue", "--noheader", "--array", "--states=all", "--format=%F %K %T %r",
                f"--jobs={','.join(self._jobs)}", may_be_away=True,
            )  # fmt: skip
            known = {}
            for line in answer.splitlines():
                job, task, state, *reason = line.split(maxsplit=3)
                known[f"slurm-{job}-{task}"] = _state(state, " ".join(reason))
            self._workers = {name: known.get(name, ("ended", "no longer known to SLURM")) for name in self._workers}
        return self._workers

    def stop(self) -> None:
        """Cancel the jobs."""
        with suppress(UserError, _NoAnswer):
            if self._jobs:
                _ask("scancel", *self._jobs)


class _NoAnswer(Exception):
    """SLURM's controller is away."""


def _state(state: str, reason: str) -> tuple[WorkerState, str]:
    words = f"{state.lower()}: {reason}" if reason not in ("", "None") else state.lower()
    if state in ENDED:
        return "ended", words
    return ("running" if state in RUNNING else "waiting"), words


def _find(program: str) -> None:
    if shutil.which(program) is None:
        raise UserError(f"--on slurm: there is no {program} here. Give the command on a machine of the SLURM cluster.")


def _ask(program: str, *words: str, may_be_away: bool = False) -> str:
    """Return what a program of SLURM prints.

    Raises: UserError with what it says, if it fails; _NoAnswer instead if it `may_be_away`.
    """
    _find(program)
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        if may_be_away:
            raise _NoAnswer from None
        raise UserError(f"--on slurm: {program} did not answer within {ANSWER_S:.0f} s. Try again later.") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if may_be_away and "Invalid job id" not in said:
            raise _NoAnswer
        if may_be_away:
            return ""
        raise UserError(f"--on slurm: {program} refuses: {said}. Mend that, or pass what is missing with --extra.")
    return done.stdout.strip()
