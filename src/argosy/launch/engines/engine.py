"""What is asked of an engine, and the record of what was launched."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from argosy.errors import UserError
from argosy.files import atomic_write

FOLDER = "launch"
"""The folder in a run's folder for what was launched, and what that printed."""
RECORD = "job.json"
JobState = Literal["waiting", "running", "ended"]


@dataclass(frozen=True)
class Request:
    """A run that is to be launched, and the machines that it asks for."""

    name: str
    run_dir: Path
    words: tuple[str, ...]
    """The words after `argosy train`."""
    work_dir: Path
    """Where the command is given: relative paths in the run file begin there."""
    nodes: int
    grace_s: float
    cpus_per_node: int = 0
    """0: whole nodes."""
    gpus_per_node: int = 0
    time: str = ""
    account: str = ""
    partition: str = ""
    image: str = ""
    extra: tuple[str, ...] = ()
    """Lines for the engine, passed through."""

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
    log: str
    """The file that it prints to."""

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


class Engine(Protocol):
    """An engine. Each method raises UserError if the engine is not there, or refuses."""

    def script(self, request: Request) -> str:
        """Return what would be submitted."""
        ...

    def submit(self, request: Request) -> Job:
        """Launch it."""
        ...

    def state(self, job: Job) -> tuple[JobState, str]:
        """Return what the engine knows of a job, and a few words on it."""
        ...

    def stop(self, job: Job) -> None:
        """Have it save its state and end."""
        ...
