"""The interface of an engine: a place where jobs are started, followed and stopped.

Whatever Argosy starts elsewhere is a job: a run, whose nodes have an agent each (`RunJob`: also a site, a parameter
server, a trial), or a program that needs no other (`ProgramJob`: a worker of `prepare`, a trial).
"""

from __future__ import annotations

import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from argosy.config.launch import EngineOptions, read_rank_map
from argosy.config.schema import RunConfig
from argosy.engines.record import LAUNCH_FOLDER, JobState, LaunchedJob
from argosy.errors import UserError
from argosy.files import open_regular

LOG_PIECE_BYTES = 1 << 16
PROGRAM_ANSWER_S = 60.0
"""A program of the cluster that does not answer within this time is given up."""
STOP_SPARE_S = 30
"""Time for stopping that is asked of a cluster beside `grace_s`."""
FOLLOW_LOOK_S = 0.5
"""Seconds between two looks at what a job prints."""


@dataclass(frozen=True, kw_only=True)
class Job(EngineOptions, ABC):
    """A command that an engine is to start, and the machines that it asks for."""

    words: tuple[str, ...]
    work_dir: Path
    """The folder in which the command is given: relative paths begin there."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for lists such as squeue's."""

    @property
    @abstractmethod
    def folder(self) -> Path:
        """The folder for what the job prints and for what its engine keeps; all machines see it."""

    @property
    @abstractmethod
    def python_words(self) -> tuple[str, ...]:
        """The words after `python`."""

    @property
    @abstractmethod
    def grace_s(self) -> float:
        """Time that it may take to end after a signal."""

    @property
    def command(self) -> str:
        """The command of each node, quoted for a shell."""
        return shlex.join((sys.executable, *self.python_words))


@dataclass(frozen=True, kw_only=True)
class RunJob(Job):
    """A run that is to be launched; `words`: those after `argosy train`."""

    run: RunConfig
    """The run as its file and the command line say it; what SLURM or another engine adds is not in it."""
    run_dir: Path

    @property
    def name(self) -> str:
        """The run's name, with that of its site if it is of one."""
        return f"{self.run.name}-{self.run.site}" if self.run.site else self.run.name

    @property
    def home(self) -> Path:
        """The folder with the run's secret: for a site or a parameter server that of the whole run."""
        return self.run_dir.parent.parent if self.run.site else self.run_dir

    @property
    def folder(self) -> Path:
        return self.run_dir / LAUNCH_FOLDER

    @property
    def python_words(self) -> tuple[str, ...]:
        return ("-m", "argosy", "train", *self.words, "--run-dir", str(self.run_dir))

    @property
    def grace_s(self) -> float:
        return self.run.resilience.grace_s

    def check_nodes(self) -> None:
        """Raises: UserError if the run needs more nodes than are asked for."""
        needed, asked = self.run.launch.nodes, self.nodes
        if needed > asked:
            raise UserError(
                f"launch.nodes = {needed}, and --nodes {asked}. Give --nodes {needed} or more (the others are spares), "
                "or leave launch.nodes out."
            )


@dataclass(frozen=True, kw_only=True)
class ProgramJob(Job):
    """A program on one machine: `python -m MODULE WORDS`."""

    title: str
    module: str
    log: Path
    """The file that it prints to; its folder is the job's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to that of the process."""
    memory_bytes: float = 0.0
    """Memory that it is predicted to take; 0: nobody knows."""
    save_s: float = 0.0
    """Time that it may take to save after a signal."""
    is_tied: bool = False
    """It is to end at once with the process that starts it. Elsewhere than on this machine it has to see to that."""

    @property
    def name(self) -> str:
        return self.title

    @property
    def grace_s(self) -> float:
        return self.save_s

    @property
    def folder(self) -> Path:
        return self.log.parent

    @property
    def python_words(self) -> tuple[str, ...]:
        return ("-m", self.module, *self.words)


class NeverFits(UserError):
    """No machine of the cluster has what a job asks for."""


class Engine(ABC):
    """An engine. Each method raises UserError if the engine is not there, or refuses."""

    name: ClassVar[str]
    takes: ClassVar[frozenset[str]]
    """The fields of `EngineOptions` that have a meaning there."""
    needs_seal: ClassVar[bool] = False
    """True if a job's record says where programs go, or what they do there: it must have this user's seal."""
    starts_programs: ClassVar[bool] = True
    """False if it starts runs only."""
    queues: ClassVar[bool] = False
    """True if it queues any number of runs until there is room, and restarts each until the run has ended. The process
    that submitted them may end."""
    poll_s: ClassVar[float] = 2.0
    """Seconds between two looks at jobs that are waited for."""
    most_waiting: ClassVar[int] = sys.maxsize
    """Jobs that may wait there for room without harm."""

    def check_options(self, options: EngineOptions, called: Mapping[str, str] | None = None) -> None:
        """Raises: UserError for options that have no meaning there. called: field -> option, where names differ."""

        def option(name: str) -> str:
            return (called or {}).get(name) or f"--{name.replace('_', '-')}"

        if others := [option(name) for name in options.given if name not in self.takes]:
            known = ", ".join(sorted(option(name) for name in self.takes if called is None or name in called)) or "none"
            raise UserError(
                f"--on {self.name}: {', '.join(others)} has no meaning there. Leave it out; known: {known}."
            )

    def check(self, job: RunJob) -> None:
        """Raises: UserError for options that have no meaning there, or that do not fit the run; for a bad rank map."""
        self.check_options(job)
        read_rank_map(job.run.launch.rank_map)

    def check_is_there(self, options: EngineOptions) -> None:  # noqa: B027  (some are always there)
        """Raises: UserError if the engine can be told to be away, before anything is made for it."""

    @abstractmethod
    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for a record that this engine cannot have written; no other is asked about or stopped."""

    @abstractmethod
    def script(self, job: RunJob) -> str:
        """Return what would be submitted."""

    @abstractmethod
    def start(self, job: Job) -> LaunchedJob:
        """Start it. A run has passed `check`; the job's `folder` is there."""

    def start_all(self, jobs: Sequence[Job], at_once: int = 0) -> list[LaunchedJob]:
        """Start each. at_once: an engine that `queues` lets no more of them run at a time; 0: any number."""
        return [self.start(job) for job in jobs]

    def find(self, job: Job) -> LaunchedJob | None:
        """Return what was started for a job by a process that is gone, if that waits or runs.

        It may have been killed before it wrote the record.
        """
        before = self.recorded(job)
        return before if before is not None and self.state(before)[0] != "ended" else None

    def recorded(self, job: Job) -> LaunchedJob | None:
        """Return the last job that was started here for this one, if its record may be acted upon."""
        before = LaunchedJob.load(job.folder.parent)
        if before is None or before.engine != self.name or before.foreign or before.original:
            return None
        if self.needs_seal and not before.is_sealed:
            return None
        self.check_job(before)
        return before

    @abstractmethod
    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return what the engine knows of a job, and a few words on it. Raises: UserError if it gives no answer."""

    def states(self, jobs: Sequence[LaunchedJob]) -> list[tuple[JobState, str]]:
        """Return the state of each; cheap enough to be asked every second.

        Raises: UserError if it gives no answer; NeverFits.
        """
        return [self.state(job) for job in jobs]

    def known(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return `state`; unknown, and why, if the engine gives no answer. A copy of a run's folder has no job."""
        if job.original:
            return "ended", f"the job is that of {job.original}, and this folder is a copy"
        try:
            return self.state(job)
        except UserError as problem:
            return "unknown", str(problem)

    def exit_code(self, job: LaunchedJob) -> int | None:
        """Return the exit code of a job that has ended; None if nobody knows it."""
        return None

    @abstractmethod
    def stop(self, job: LaunchedJob) -> None:
        """Have it save its state and end; return without waiting for that."""

    def stop_all(self, jobs: Sequence[LaunchedJob]) -> None:
        """Stop each. Raises: the first UserError, once all were asked."""
        refused: UserError | None = None
        for job in jobs:
            try:
                self.stop(job)
            except UserError as problem:
                refused = refused or problem
        if refused:
            raise refused

    def step(self, job: LaunchedJob) -> int | None:
        """Return the steps that a run has made whose folder cannot be seen from here; None if that is not known."""
        return None

    def files(self, job: LaunchedJob) -> dict[str, Path]:
        """Return the files that the job prints to, by what their lines are marked with if there are several."""
        return {"": Path(job.log)}

    def logs(self, job: LaunchedJob, follow: bool) -> Iterator[bytes]:
        """Yield what the job prints, in pieces; follow: until it has ended."""
        yield from follow_files(self.files(job), lambda: not follow or self.known(job)[0] == "ended")


def follow_files(files: Mapping[str, Path], has_ended: Callable[[], bool]) -> Iterator[bytes]:
    """Yield what the files hold, and what is added until `has_ended`. Keys: marks of their lines, if several."""
    followed = [_FollowedFile(path, mark) for mark, path in files.items()]
    is_last = False
    while not is_last:
        is_last = has_ended()  # before the last look: what was printed until then is read
        for file in followed:
            yield from file.new(len(followed) > 1, is_last)
        if not is_last:
            time.sleep(FOLLOW_LOOK_S)


class _FollowedFile:
    """A file, and how far it was read; `mark` stands before each line if several files are printed."""

    def __init__(self, path: Path, mark: str):
        self._path, self._mark = path, mark.encode()
        self._at, self._rest = 0, b""

    def new(self, is_marked: bool, is_last: bool) -> Iterator[bytes]:
        """Yield what was added, in pieces. is_marked: whole lines only, with the mark before each."""
        try:
            file = open_regular(self._path)
        except OSError:
            return  # not there yet, or not to be read
        with file:
            file.seek(self._at)
            while text := file.read(LOG_PIECE_BYTES):
                self._at += len(text)
                yield from self._lines(text) if is_marked else [text]
        if is_last and self._rest:
            yield from self._lines(b"\n")

    def _lines(self, text: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            yield b"%s: %s\n" % (self._mark, line)
