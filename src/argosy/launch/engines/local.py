"""This machine: the command goes on when the shell that gave it has ended."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from argosy.launch.engines.engine import Engine, Job, JobState, Request

START_TIME = 19
"""Field of /proc/PID/stat behind the command: when the process started, in ticks since boot (proc(5), field 22)."""


class Local(Engine):
    """A process of this machine in a session of its own."""

    name = "local"
    takes = frozenset()

    def script(self, request: Request) -> str:
        """Return the command."""
        return f"cd {shlex.quote(str(request.work_dir))} && exec {request.command}\n"

    def submit(self, request: Request) -> Job:
        """Start the command, with what it prints in a file."""
        log = request.folder / "local.out"
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["bash", "-c", self.script(request)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Job(
            engine=self.name,
            id=job_id(process.pid),
            submitted_s=round(time.time(), 3),
            nodes=1,
            log=str(log),
        )

    def state(self, job: Job) -> tuple[JobState, str]:
        """Return whether that process is still there; a number may be another's by now."""
        return ("running", f"process {_pid(job)}") if _is_there(job) else ("ended", "")

    def stop(self, job: Job) -> None:
        """Send it SIGTERM."""
        if _is_there(job):
            with suppress(ProcessLookupError):
                os.kill(_pid(job), signal.SIGTERM)


def job_id(pid: int) -> str:
    """Return the id of the job of a process that runs here."""
    return f"{pid}@{_started(pid)}"


def _pid(job: Job) -> int:
    return int(job.id.partition("@")[0])


def _is_there(job: Job) -> bool:
    pid, _, started = job.id.partition("@")
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """Return when a process started; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[START_TIME]
