"""Nodes and workers as the coordinator knows them: its orders, when it gives up, and what it leaves to the next one."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from argosy.checkpoint.fence import OLD_NAME
from argosy.errors import FINAL, Poisoned, Retryable
from argosy.files import atomic_write
from argosy.observe.heartbeat import HeartbeatReading, heartbeat_path, read_heartbeat
from argosy.processes.channel import Channel, Message
from argosy.processes.child import end_in_words


class RankState(Enum):
    """State of a worker process."""

    STARTING = "starting"
    """It imports what it needs."""
    READY = "ready"
    """It waits for a world."""
    RUNNING = "running"
    """It was told to join the generation's world."""
    DONE = "done"
    """It has reached the end of the run."""


@dataclass
class RankProcess:
    """A process that can have a rank."""

    state: RankState = RankState.STARTING
    rank: int | None = None
    """Its rank in its world, or in the last world it was in."""
    generation: int = 0
    """The generation of that world; 0 if it has been in none."""
    pid: int = 0


@dataclass
class Node:
    """An agent and its workers, by slot."""

    host: str
    slots: int
    """Number of workers that the node has room for, spare ones included."""
    workers: dict[int, RankProcess] = field(default_factory=dict)
    is_avoided: bool = False
    """True if it is used only when there are not enough processes without it."""
    is_last: bool = False
    """True if it is slow, or was suspected too often: where more are ready than needed, the others come first."""
    is_being_checked: bool = False
    """True while its workers wait for a node health check."""


@dataclass(frozen=True)
class Cause:
    """Why a worker was lost."""

    why: str
    error: str = ""
    """Class of the error that the worker reported, if it could."""
    exit_code: int = 0
    """Negative: a signal. From FINAL on: an error that a restart would only meet again."""
    step: int = -1
    """The step it was in, if known."""

    @property
    def is_own(self) -> bool:
        """True if the worker itself failed, rather than was killed from outside."""
        return self.exit_code not in (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True)
class Start:
    """Start a worker in a slot."""

    node: str
    slot: int


@dataclass(frozen=True)
class Join:
    """Form a world: the agent of rank 0 opens a rendezvous store, then each member is told its place."""

    generation: int
    plan: str
    places: dict[tuple[str, int], int]
    """(node, slot) -> rank."""


@dataclass(frozen=True)
class Break:
    """The generation is over: its members leave its world and wait."""

    generation: int
    why: str


@dataclass(frozen=True)
class FinishRun:
    """End the run."""

    exit_code: int
    why: str
    error: str = ""
    """Class of the error that the user sees; empty if no worker raised it."""


@dataclass(frozen=True)
class CheckNode:
    """Run a node health check; the agent reports when it is done."""

    node: str


Order = Start | Join | Break | FinishRun | CheckNode


class Failures:
    """The failures of a run since it last made progress."""

    def __init__(self, max_restarts: int):
        self._max_restarts, self._failures = max_restarts, 0
        self._step = self._safe_step = -1
        self._last_crash: tuple[str, int] | None = None
        self._last_crash_generation = 0

    def made_step(self, step: int, safe_step: int) -> None:
        """The run is in `step`, and would go back to `safe_step` at most; -1: not known.

        It makes progress if either is further than ever: steps that are repeated do not count, unless the next failure
        costs fewer of them.
        """
        is_first = self._step < 0  # that this coordinator hears of: it does not know what was before
        if not is_first and (step > self._step or safe_step > self._safe_step):
            self._failures = 0
        self._step, self._safe_step = max(step, self._step), max(safe_step, self._safe_step)

    def count(self, cause: Cause, generation: int, is_same: bool = False) -> FinishRun | None:
        """Count a failure. Return how the run ends if going on would only repeat it, else None.

        is_same: it is a part of the failure that was counted last; it may still be a crash that was seen before.
        """
        crash, is_repeated = (cause.why, cause.step), generation > self._last_crash_generation
        if cause.is_own and cause.step >= 0 and crash == self._last_crash and is_repeated:
            return FinishRun(Poisoned.exit_code, f"the same crash twice at step {cause.step}: {cause.why}")
        self._last_crash, self._last_crash_generation = crash, generation
        self._failures += not is_same
        if self._failures <= self._max_restarts:
            return None
        times = f"{self._failures} times (launch.max_restarts = {self._max_restarts})"
        why = f"the workers died {times} without making progress; the last time: {cause.why}"
        return FinishRun(Retryable.exit_code, why)


HANDOVER_FILE = "membership.json"
OLD_NAMES = {"generation": OLD_NAME, "suspicions": "doubts"}
"""Names of keys in the folders of older runs, which go on."""


@dataclass(frozen=True)
class Handover:
    """The generation in force, and the nodes that are to be avoided."""

    generation: int = 0
    """The newest that was formed; 0 if none was."""
    plan: str = ""
    size: int = 0
    members: dict[str, int] = field(default_factory=dict)
    """Node -> how many of its workers are members."""
    is_instead: bool = False
    """True if its plan replaces the run's own as long as there is room for it."""
    avoided: tuple[str, ...] = ()
    """Nodes to use only if there are not enough processes without them."""
    last: tuple[str, ...] = ()
    """Nodes to use after all others."""
    suspicions: dict[str, int] = field(default_factory=dict)
    """Node -> how often it was suspected."""

    def save(self, run_dir: Path) -> None:
        """Write it, in place of an older one."""
        with atomic_write(run_dir / HANDOVER_FILE) as file:
            file.write(json.dumps(asdict(self), indent=1).encode() + b"\n")

    @classmethod
    def load(cls, run_dir: Path, generation: int) -> Handover:
        """Read the handover of `generation`; one without members if there is none, or it cannot be read."""
        try:
            record = json.loads((run_dir / HANDOVER_FILE).read_bytes())
            for new, old in OLD_NAMES.items():
                if old in record:
                    record[new] = record.pop(old)
            avoided, last = tuple(record.pop("avoided")), tuple(record.pop("last"))
            found = cls(**record, avoided=avoided, last=last)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls(generation)
        return found if found.generation == generation else cls(generation)


@dataclass
class WorkerProcess:
    """A process that the agent's fork server forked."""

    slot: int
    channel: Channel
    pid: int = 0
    """0 until it is forked."""
    state: RankState = RankState.STARTING
    rank: int | None = None
    generation: int = 0
    failure: Message | None = None
    """Its message about the error that it ended with."""
    killed: str = ""
    """Why its agent killed it; empty if it did not."""
    leave_by: float | None = None
    """The time by which it must have left the broken world."""
    is_ending: bool = False
    """True once it has closed its end of the channel."""
    is_finished: bool = False
    """With state DONE: True if the run's last step was made."""

    def reading(self, scratch: Path) -> HeartbeatReading | None:
        """Return what it shows in its agent's folder `scratch`; None if it shows nothing (yet)."""
        return read_heartbeat(heartbeat_path(scratch, self.pid))

    def signal(self, number: int) -> None:
        """Send it a signal, unless it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def cause_of_death(self, exit_code: int, step: int) -> Cause:
        """Return why it was lost, from its exit code (negative: a signal), its last message and why it was killed.

        `step`: the one it was in; -1 if that is not known.
        """
        if self.failure is not None:
            text = self.failure["text"]
            why = text if exit_code >= FINAL else f"exit code {exit_code}, {(text.splitlines() or [''])[0]}"
            return Cause(why, self.failure["error"], exit_code, step)
        if exit_code < 0:
            return Cause(self.killed or end_in_words(exit_code), "", exit_code, step)
        return Cause(end_in_words(exit_code), "", exit_code or 1, step)
