"""Asking hosts through the system's ssh, all at once: a script goes in, lines "argosy:NAME=VALUE" come back."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from argosy.errors import UserError

CONNECT_S, ANSWER_S = 10, 60.0
HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A name that ssh takes: an option, which begins with "-", is none."""
AT_ONCE = 32
"""Hosts that are asked at a time."""
MARK = "argosy:"
NO_WAY = 255
"""Exit code of ssh if it could not reach the host; else it is the script's."""


@dataclass(frozen=True)
class Answer:
    """What a host said."""

    said: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    """What ssh or the script said if it failed."""
    is_reached: bool = True


def ask_all(scripts: Mapping[str, str], options: Sequence[str]) -> dict[str, Answer]:
    """Run a script of bash on each host. options: of ssh.

    Raises: UserError if there is no ssh here.
    """
    if shutil.which("ssh") is None:
        raise UserError("--on ssh: there is no ssh here. Install it, e.g. apt-get install openssh-client.")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = threads.map(lambda host: _ask(host, scripts[host], options), scripts)
        return dict(zip(scripts, answers, strict=True))


def unreachable(answers: Mapping[str, Answer]) -> str:
    """Return the hosts that ssh did not reach, each with what it said; empty if it reached all."""
    return ", ".join(f"{host} ({answer.problem})" for host, answer in answers.items() if not answer.is_reached)


def command(host: str, options: Sequence[str], text: str) -> list[str]:
    """Return the words of ssh that give a shell's command on a host. options: of ssh."""
    own = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
    return ["ssh", *own, *options, "--", host, text]


def _ask(host: str, script: str, options: Sequence[str]) -> Answer:
    try:
        done = subprocess.run(
            command(host, options, "bash -s"),
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(problem=f"no answer within {ANSWER_S:.0f} s", is_reached=False)
    lines = [line.removeprefix(MARK).partition("=") for line in done.stdout.splitlines() if line.startswith(MARK)]
    problem = " ".join(done.stderr.split()) or f"exit code {done.returncode}" if done.returncode else ""
    return Answer({name: value for name, _, value in lines}, problem, done.returncode != NO_WAY)
