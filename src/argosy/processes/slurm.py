"""SLURM: what its programs answer, and options in batch scripts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from typing import Literal

from argosy.errors import UserError

ANSWER_S = 60.0
UNKNOWN_JOB = "Invalid job id"
"""What squeue says of jobs that ended some time ago. All else that it fails with says nothing of the job."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "SPECIAL_EXIT")
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "REVOKED", "TIMEOUT")  # fmt: skip
GONE = "no longer known to SLURM"
PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.,:=/+@%[]")
"""Characters of an option that mean the same in a script with and without quotes."""


def find(program: str) -> None:
    """Raises: UserError if a program of SLURM is not here."""
    if shutil.which(program) is None:
        raise UserError(f"--on slurm: there is no {program} here. Give the command on a machine of the SLURM cluster.")


def ask(program: str, *words: str) -> str:
    """Return what a program of SLURM prints. Raises: UserError with what it says, line by line, if it fails."""
    find(program)
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"--on slurm: {program} did not answer within {ANSWER_S:.0f} s. Try again later.") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = "\n  ".join(lines) or f"exit code {done.returncode}"
        if program == "sbatch":
            raise UserError(f"--on slurm: sbatch refuses: {said}\nMend that, or pass what is missing with --extra.")
        raise UserError(f"--on slurm: {program} says: {said}")
    return done.stdout.strip()


def listed(*words: str) -> list[str]:
    """Return the lines that squeue prints; none for jobs that SLURM no longer knows.

    Raises: UserError if it gives no answer: then nothing is known of any job.
    """
    try:
        return ask("squeue", "--noheader", "--states=all", *words).splitlines()
    except UserError as problem:
        if UNKNOWN_JOB in str(problem):
            return []
        raise


def meaning(state: str) -> Literal["waiting", "running", "ended"]:
    """Return what a state of squeue's means; "" is that of a job that SLURM no longer knows."""
    if not state or state in ENDED:
        return "ended"
    return "waiting" if state in WAITING else "running"


def in_words(state: str, reason: str) -> str:
    """Return a state and its reason, as squeue says them."""
    words = state.lower() or GONE
    return f"{words}: {reason}" if reason not in ("", "None") else words


def directives(options: Mapping[str, str]) -> list[str]:
    """Return the lines of a batch script that give sbatch these options; those that are empty are left out.

    Raises: UserError for a value that cannot stand in a line.
    """
    return [f"#SBATCH --{name}={_quoted(name, value)}" for name, value in options.items() if value]


def output(folder: str, name: str) -> str:
    """Return a value for the option `output`: `name` may hold patterns such as %j, `folder` is taken as it is."""
    return f"{folder.replace('%', '%%')}/{name}"


def _quoted(name: str, value: str) -> str:
    if "\\" in value or not value.isprintable():
        raise UserError(
            f"--on slurm: {name} = {value!r} cannot be given to sbatch: it has a backslash or a control character. "
            "Choose another name or folder."
        )
    return value if PLAIN.issuperset(value) else '"' + value.replace('"', '\\"') + '"'
