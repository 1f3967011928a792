"""What is asked of an engine."""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import ClassVar

from argosy.config.launch import EngineOptions
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.launch.engines.followed import follow as followed
from argosy.launch.engines.job import FOLDER, JobState, LaunchedJob


@dataclass(frozen=True)
class LaunchRequest(EngineOptions):
    """A run that is to be launched, and what it asks for."""

    run: RunConfig
    """The run as its file and the command line say it; what SLURM or another engine adds is not in it."""
    run_dir: Path
    words: tuple[str, ...]
    """The words after `argosy train`."""
    work_dir: Path
    """Where the command is given: relative paths in the run file begin there."""
    login: str = ""
    """A machine on which the command is given, by a name that ssh takes."""
    login_options: tuple[str, ...] = ()
    """Options of ssh to that machine."""
    there: str = ""
    """The folder on that machine in which the command is given."""
    program: str = ""
    """The path of `argosy` on that machine."""

    @property
    def name(self) -> str:
        """The run's name, with that of its site if it is of one."""
        return f"{self.run.name}-{self.run.site}" if self.run.site else self.run.name

    @property
    def grace_s(self) -> float:
        """How long the run may take to save after a signal."""
        return self.run.resilience.grace_s

    @property
    def given(self) -> list[str]:
        """The names of the fields for an engine that are not as they are without an option."""
        optional = [field for field in fields(self) if field.default is not MISSING]
        return [field.name for field in optional if getattr(self, field.name) != field.default]

    @property
    def folder(self) -> Path:
        """The folder for what is launched."""
        return self.run_dir / FOLDER

    @property
    def command(self) -> str:
        """The command of each node, quoted for a shell."""
        words = (sys.executable, "-m", "argosy", "train", *self.words, "--run-dir", str(self.run_dir))
        return shlex.join(words)


class Engine(ABC):
    """An engine. Each method raises UserError if the engine is not there, or refuses."""

    name: ClassVar[str]
    takes: ClassVar[frozenset[str]]
    """The fields of a request with a default that have a meaning there."""
    needs_seal: ClassVar[bool] = False
    """True if a job's record says where programs go, or what they do there: it must have this user's seal."""

    def check(self, request: LaunchRequest) -> None:
        """Raises: UserError for options that have no meaning there."""
        others = [f"--{name.replace('_', '-')}" for name in request.given if name not in self.takes]
        if others:
            known = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(self.takes)) or "none"
            raise UserError(
                f"--on {self.name}: {', '.join(others)} has no meaning there. Leave it out; known: {known}."
            )

    @abstractmethod
    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for a record that this engine cannot have written; no other is asked about or stopped."""

    @abstractmethod
    def script(self, request: LaunchRequest) -> str:
        """Return what would be submitted."""

    @abstractmethod
    def submit(self, request: LaunchRequest) -> LaunchedJob:
        """Launch it. The request has passed `check`, and its `folder` is there."""

    @abstractmethod
    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return what the engine knows of a job, and a few words on it. Raises: UserError if it gives no answer."""

    def known(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return `state`; unknown, and why, if the engine gives no answer."""
        try:
            return self.state(job)
        except UserError as problem:
            return "unknown", str(problem)

    @abstractmethod
    def stop(self, job: LaunchedJob) -> None:
        """Have it save its state and end."""

    def step(self, job: LaunchedJob) -> int | None:
        """Return the steps that a run has made whose folder cannot be seen from here; None if that is not known."""
        return None

    def files(self, job: LaunchedJob) -> dict[str, Path]:
        """Return the files that the job prints to, by what their lines are marked with if there are several."""
        return {"": Path(job.log)}

    def logs(self, job: LaunchedJob, follow: bool) -> Iterator[bytes]:
        """Yield what the job prints, in pieces; follow: until it has ended."""
        yield from followed(self.files(job), lambda: not follow or self.known(job)[0] == "ended")


def check_nodes(request: LaunchRequest) -> None:
    """Raises: UserError if the run needs more nodes than are asked for."""
    needed, asked = request.run.launch.nodes, request.nodes
    if needed > asked:
        raise UserError(
            f"launch.nodes = {needed}, and --nodes {asked}. Give --nodes {needed} or more (the others are spares), or "
            "leave launch.nodes out."
        )
