"""This machine: the command goes on when the shell that gave it has ended."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from argosy.errors import UserError
from argosy.files import boot_id
from argosy.launch.engines.engine import Engine, LaunchRequest
from argosy.launch.engines.job import JobState, LaunchedJob

PROCESSES = Path("/proc")
PROCESS = re.compile(r"[1-9][0-9]{0,9}@[0-9]{0,20}")
"""A process's number, and when it started; without that if it had ended at once."""
START_TIME = 19
"""Field of /proc/PID/stat behind the command: when the process started, in ticks since boot (proc(5), field 22)."""


class Local(Engine):
    """A process of this machine in a session of its own."""

    name = "local"
    takes = frozenset()

    def script(self, request: LaunchRequest) -> str:
        """Return the command."""
        return f"cd {shlex.quote(str(request.work_dir))} && exec {request.command}\n"

    def submit(self, request: LaunchRequest) -> LaunchedJob:
        """Start the command, with what it prints in a file."""
        log = request.folder / "local.out"
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["bash", "-c", self.script(request)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return job_of(process.pid, log)

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no process, or no time at which one started."""
        job.check(id=(job.id, PROCESS))

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return whether the process is still there that trains this run; a number may be another's by now."""
        if host := _other_host(job):
            return "unknown", f"its process is on {host}; `argosy runs` there knows of it"
        return ("running", f"process {_pid(job)}") if _is_there(job) else ("ended", "")

    def stop(self, job: LaunchedJob) -> None:
        """Send it SIGTERM. Raises: UserError if it is on another machine."""
        if host := _other_host(job):
            raise UserError(f"its process is on {host}, and this is {socket.gethostname()}. Give the command there.")
        if _is_there(job):
            with suppress(ProcessLookupError):
                os.kill(_pid(job), signal.SIGTERM)


def job_of(pid: int, log: Path) -> LaunchedJob:
    """Return the job of a process that runs here and prints to a file in its run's folder for launches."""
    return LaunchedJob(
        engine=Local.name,
        id=f"{pid}@{_started(pid)}",
        submitted_s=round(time.time(), 3),
        nodes=1,
        log=str(log),
        place={"host": socket.gethostname(), "boot": boot_id()},
    )


def _pid(job: LaunchedJob) -> int:
    return int(job.id.partition("@")[0])


def _other_host(job: LaunchedJob) -> str:
    """Return the name of the machine that a job's process is on; empty if that is this one, or was before it started
    anew."""
    host = job.place.get("host", "")
    is_here = job.place.get("boot", "") == boot_id() or host in ("", socket.gethostname())
    return "" if is_here else host


def _is_there(job: LaunchedJob) -> bool:
    """Return True if the process is there, started when the record says, and with this run's folder in its command: a
    record that was changed must not end another process of its reader's."""
    pid, _, started = job.id.partition("@")
    return bool(started and job.log) and _started(int(pid)) == started and _trains(int(pid), job.run_dir)


def _trains(pid: int, run_dir: Path) -> bool:
    """Return True if a process is an `argosy train` whose --run-dir is that folder, or the shell that becomes one."""
    process = PROCESSES / str(pid)
    try:
        words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")]
        if words[:2] == ["bash", "-c"]:
            words = shlex.split(words[2])
        named = [word for before, word in pairwise(words) if before == "--run-dir"]
        folder = process / "cwd"  # a path that is relative is so to this
        is_train = {"argosy", "train"} <= {Path(word).name for word in words}
        return is_train and any((folder / name).samefile(run_dir) for name in named)
    except (OSError, ValueError, IndexError):
        return False


def _started(pid: int) -> str:
    """Return when a process started; empty if it has ended."""
    try:
        fields = (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[START_TIME]
