"""A site of a run, reached through ssh: `argosy launch` is given there, and what becomes of it is asked there.

The site needs no disk that this machine sees. The run file, as it is here, and the run's secret go through ssh's input;
paths in the run file mean that machine's.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from argosy.config.launch import EngineOptions
from argosy.engines.engine import LOG_PIECE_BYTES, Engine, Job, RunJob
from argosy.engines.record import JobState, LaunchedJob
from argosy.engines.ssh import SSH_HOST, Answer, ask_all, command
from argosy.errors import UserError
from argosy.processes.secret import secret_of

LOGIN_START = """\
umask 077
mkdir -p {group} && cd {folder} || exit 2
printf '%s\\n' {secret} > {group}/.secret
umask 022
{write_run}
said=$({command}) || exit $?
printf '%s\\n' "$said" | sed -n 's/^launched .* job \\(.*\\), in .*/argosy:job=\\1/p'
"""
RUNS = """\
cd {folder} && said=$({program} runs {run_dir} --json) || exit $?
printf 'argosy:runs=%s\\n' "$(printf '%s' "$said" | tr -d '\\n')"
"""
LOGIN_STOP = "cd {folder} && {program} stop {run_dir}\n"
LOGIN_LINE = re.compile(r".+")
GOES_ON: dict[str, JobState] = {"waiting": "waiting", "training": "running", "running": "running", "unknown": "unknown"}
"""States of a run that has not ended there -> of its job; unknown: `argosy runs` there could not tell."""


@dataclass(frozen=True, kw_only=True)
class LoginJob(RunJob):
    """A site that is launched by a command on a machine of its own."""

    login: str
    """The machine to log in on, by a name that ssh takes."""
    login_options: tuple[str, ...]
    """Options of ssh to it."""
    there: str
    """The folder on it in which the command is given."""
    program: str
    """The path of `argosy` on it."""
    group: Path
    """The folder here of the whole run, whose secret the site gets."""
    group_there: Path
    run_dir_there: Path


class Login(Engine):
    """A machine of a site on which the command is given."""

    name = "login"
    takes: ClassVar[frozenset[str]] = frozenset(field.name for field in fields(EngineOptions))
    needs_seal = True
    starts_programs = False

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no machine, or a record without folder and program there."""
        job.check(login=(job.place.get("login"), SSH_HOST))
        job.check(**{name: (job.place.get(name), LOGIN_LINE) for name in ("folder", "program", "run_dir")})

    def script(self, job: RunJob) -> str:
        assert isinstance(job, LoginJob)
        return f"# on {job.login}\ncd {shlex.quote(job.there)} && {_command(job)}\n"

    def start(self, job: Job) -> LaunchedJob:
        """Give the command there. Raises: UserError with what it says."""
        assert isinstance(job, LoginJob)
        source = job.work_dir / job.words[0]
        name, text = Path(job.words[0]).name, source.read_text() if source.is_file() else ""
        script = LOGIN_START.format(
            folder=shlex.quote(job.there),
            group=shlex.quote(str(job.group_there)),
            secret=shlex.quote(secret_of(job.group).decode()),
            write_run=f"printf '%s' {shlex.quote(text)} > {shlex.quote(name)}" if text else "",
            command=_command(job),
        )
        answer = ask_all({job.login: script}, job.login_options)[job.login]
        if "job" not in answer.said:
            raise UserError(
                f"site {job.run.site}: {job.login} says: {answer.problem or 'nothing'}. `ssh {job.login} "
                f"{job.program} --help` must work; sites.launch.argosy names the program there."
            )
        place = {
            "login": job.login,
            "options": shlex.join(job.login_options),
            "folder": job.there,
            "program": job.program,
            "run_dir": str(job.run_dir_there),
        }
        return LaunchedJob.submitted(self.name, f"{job.login} {answer.said['job']}", job.nodes, place=place)

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return what `argosy runs` says there."""
        answer, login = _ask(job, RUNS), job.place["login"]
        if not answer.is_reached:
            return "unknown", f"no way to {login} ({answer.problem})"
        if (run := _run_of(answer)) is None:
            return "unknown", f"{login} does not say what became of it ({answer.problem or 'it lists no such run'})"
        state, why = str(run.get("state", "")), str(run.get("why", ""))
        if state in GOES_ON:
            return GOES_ON[state], why
        return "ended", f"{state} {why}".strip()

    def step(self, job: LaunchedJob) -> int | None:
        step = (_run_of(_ask(job, RUNS)) or {}).get("step")
        return int(step) if isinstance(step, int) else None

    def stop(self, job: LaunchedJob) -> None:
        """Give `argosy stop` there. Raises: UserError with what it says."""
        answer = _ask(job, LOGIN_STOP)
        if answer.problem:
            raise UserError(f"{job.place['login']} says: {answer.problem}")

    def logs(self, job: LaunchedJob, follow: bool) -> Iterator[bytes]:
        """Yield what `argosy logs` prints there."""
        text = shlex.join([job.place["program"], "logs", job.place["run_dir"], *(["-f"] if follow else [])])
        with subprocess.Popen(
            command(job.place["login"], shlex.split(job.place.get("options", "")), text),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            try:
                while piece := process.stdout.read1(LOG_PIECE_BYTES):  # type: ignore[attr-defined]
                    yield piece
            finally:
                process.terminate()


def _command(job: LoginJob) -> str:
    words = (job.program, "launch", Path(job.words[0]).name, *job.words[1:])
    return shlex.join([*words, "--here", "--run-dir", str(job.group_there)])


def _ask(job: LaunchedJob, script: str) -> Answer:
    quoted = {key: shlex.quote(job.place[key]) for key in ("folder", "program", "run_dir")}
    login, options = job.place["login"], shlex.split(job.place.get("options", ""))
    return ask_all({login: script.format(**quoted)}, options)[login]


def _run_of(answer: Answer) -> dict[str, Any] | None:
    """Return the run that `argosy runs` lists there; None if it lists none."""
    try:
        run = json.loads(answer.said.get("runs", ""))
    except ValueError:
        return None
    return run if isinstance(run, dict) else None
