"""What is asked of an engine, and the record of what was launched."""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from argosy.config.launch_options import EngineOptions
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.files import atomic_write
from argosy.launch.engines.followed import follow as followed

FOLDER = "launch"
"""The folder in a run's folder for what was launched, and what that printed."""
RECORD = "job.json"
JobState = Literal["waiting", "running", "ended"]


@dataclass(frozen=True)
class Request(EngineOptions):
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


class Job(BaseModel):
    """What was launched, as it stands in the run's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str
    id: str
    """The engine's name for it."""
    submitted_s: float
    """Seconds since 1970."""
    nodes: int
    log: str = ""
    """The file that it prints to, or the folder of several, if there is one."""
    secret: str = ""
    """The fingerprint of the secret that the environment or the run's folder gave it; empty: it made its own."""
    place: dict[str, str] = {}
    """Where the engine finds it again: an address, a namespace, hosts, ..."""

    def save(self, run_dir: Path) -> None:
        """Write it to the run's folder."""
        with atomic_write(run_dir / FOLDER / RECORD) as file:
            file.write(self.model_dump_json(indent=1).encode() + b"\n")

    @classmethod
    def load(cls, run_dir: Path) -> Job | None:
        """Return the last one that was launched in a run's folder; None if none was. Raises: UserError."""
        path = run_dir / FOLDER / RECORD
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as problem:
            raise UserError(
                f"{path}: is no record of a launched run ({problem}). Remove it, and launch again."
            ) from None


class Engine(ABC):
    """An engine. Each method raises UserError if the engine is not there, or refuses."""

    name: ClassVar[str]
    takes: ClassVar[frozenset[str]]
    """The fields of a request with a default that have a meaning there."""

    def check(self, request: Request) -> None:
        """Raises: UserError for options that have no meaning there."""
        others = [f"--{name.replace('_', '-')}" for name in request.given if name not in self.takes]
        if others:
            known = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(self.takes)) or "none"
            raise UserError(
                f"--on {self.name}: {', '.join(others)} has no meaning there. Leave it out; known: {known}."
            )

    @abstractmethod
    def script(self, request: Request) -> str:
        """Return what would be submitted."""

    @abstractmethod
    def submit(self, request: Request) -> Job:
        """Launch it. The request has passed `check`, and its `folder` is there."""

    @abstractmethod
    def state(self, job: Job) -> tuple[JobState, str]:
        """Return what the engine knows of a job, and a few words on it."""

    @abstractmethod
    def stop(self, job: Job) -> None:
        """Have it save its state and end."""

    def step(self, job: Job) -> int | None:
        """Return the steps that a run has made whose folder cannot be seen from here; None if that is not known."""
        return None

    def files(self, job: Job) -> dict[str, Path]:
        """Return the files that the job prints to, by what their lines are marked with if there are several."""
        return {"": Path(job.log)}

    def logs(self, job: Job, follow: bool) -> Iterator[bytes]:
        """Yield what the job prints, in pieces; follow: until it has ended."""
        yield from followed(self.files(job), lambda: not follow or self.state(job)[0] == "ended")
