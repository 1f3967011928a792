"""This machine: a job goes on when the shell that gave the command has ended, unless it is tied to its starter."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO

from argosy.engines.engine import Engine, Job, ProgramJob
from argosy.engines.record import JobState, LaunchedJob
from argosy.errors import UserError
from argosy.files import RUN_LOCK, boot_id
from argosy.processes.child import Child

PROCESSES = Path("/proc")
LOCAL_PROCESS = re.compile(r"[1-9][0-9]{0,9}@[0-9]{0,20}")
"""A process's number, and when it started; without that if it had ended at once."""
START_TIME = 19
"""Field of /proc/PID/stat behind the command: when the process started, in ticks since boot (proc(5), field 22)."""


def spawn(
    words: Sequence[str], out: IO[bytes] | int, environment: Mapping[str, str], work_dir: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; `environment` is added to this process's."""
    return subprocess.Popen(
        words, cwd=work_dir, env={**os.environ, **environment},
        stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


class Local(Engine):
    """Processes of this machine."""

    name = "local"
    takes = frozenset()
    poll_s = 0.5

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes] | Child] = {}
        """Job -> the process, of those that were started from here."""

    def script(self, job: Job) -> str:
        return f"cd {shlex.quote(str(job.work_dir))} && exec {job.command}\n"

    def start(self, job: Job) -> LaunchedJob:
        """Start the command, with what it prints in a file. What a tied program prints goes to this one's errors.

        Raises: OSError if there can be no more processes.
        """
        child: subprocess.Popen[bytes] | Child
        if isinstance(job, ProgramJob) and job.is_tied:
            child = Child(job.module, *job.words, environment=job.environment)
        else:
            with _log_of(job).open("ab") as out:
                if isinstance(job, ProgramJob):
                    child = spawn((sys.executable, *job.python_words), out, job.environment, job.work_dir)
                else:
                    child = spawn(("bash", "-c", self.script(job)), out, {})
        launched = job_of(child.pid, _log_of(job))
        self._children[launched.id] = child
        return launched

    def find(self, job: Job) -> LaunchedJob | None:
        """Return the job of the record, or of the process that holds the run's folder."""
        with suppress(UserError):
            if (before := super().find(job)) is not None and self.state(before)[0] == "running":
                return before
        owner = _owner(job.folder.parent)
        return job_of(owner, _log_of(job)) if owner else None

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no process, or no time at which one started."""
        job.check(id=(job.id, LOCAL_PROCESS))

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return whether the process is still there that runs this job; a number may be another's by now."""
        if host := _other_host(job):
            return "unknown", f"its process is on {host}; `argosy runs` there knows of it"
        match self._children.get(job.id):
            case Child() as child:
                return ("running", f"process {child.pid}") if child.is_alive else ("ended", child.reap())
            case subprocess.Popen() as process:
                is_there = process.poll() is None
            case None:
                is_there = _is_there(job)
        return ("running", f"process {_pid(job)}") if is_there else ("ended", "")

    def exit_code(self, job: LaunchedJob) -> int | None:
        """Return the exit code, if the process was started from here."""
        child = self._children.get(job.id)
        return child.poll() if isinstance(child, subprocess.Popen) else None

    def stop(self, job: LaunchedJob) -> None:
        """Send it SIGTERM; a tied program has nothing to save, and is killed. Raises: UserError if it is on another
        machine."""
        if host := _other_host(job):
            raise UserError(f"its process is on {host}, and this is {socket.gethostname()}. Give the command there.")
        if isinstance(child := self._children.get(job.id), Child):
            child.kill()
        elif self.state(job)[0] == "running":
            with suppress(ProcessLookupError):
                os.kill(_pid(job), signal.SIGTERM)


def _log_of(job: Job) -> Path:
    return job.log if isinstance(job, ProgramJob) else job.folder / "local.out"


def job_of(pid: int, log: Path) -> LaunchedJob:
    """Return the job of a process that runs here and prints to a file in its run's folder for launches."""
    here = {"host": socket.gethostname(), "boot": boot_id()}
    return LaunchedJob.submitted(Local.name, f"{pid}@{_started(pid)}", 1, log, here)


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


def _owner(run_dir: Path) -> int | None:
    """Return the process that holds the lock of a run's folder; None if none does."""
    with suppress(OSError, ValueError), (run_dir / RUN_LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.readline())
    return None
