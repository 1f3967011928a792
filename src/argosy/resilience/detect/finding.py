"""Samples of all ranks, which detectors take, and findings with their evidence, which they return."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from argosy.observe.heartbeat import Phase

Action = Literal["kill", "avoid", "check_node", "alarm"]
"""kill: end the ranks, which will not go on by themselves; avoid: leave their node out of the next world, if there is
another node; check_node: check the health of their node before it goes on; alarm: only report it."""


@dataclass(frozen=True)
class Finding:
    """Something is wrong, with the evidence for it."""

    kind: str
    action: Action
    why: str
    """A sentence for the user."""
    ranks: tuple[int, ...] = ()
    """Ranks at fault; none if the finding is about a node."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Facts behind the sentence, for JSON."""

    def to_event(self) -> dict[str, Any]:
        """Return the facts of an event of this kind."""
        facts = asdict(self)
        del facts["kind"]
        return {**facts, "ranks": list(self.ranks)}


@dataclass(frozen=True)
class WorkerSeen:
    """One worker at one moment, as `HeartbeatReading` says it."""

    pid: int
    step: int
    phase: Phase
    sequences: Mapping[str, int]
    state: str
    """As in /proc/PID/stat: R runs, S sleeps, D waits for a device, T is stopped, Z has ended; empty: unknown."""
    has_made_a_step: bool
    """True once it has ended a step in this world."""


class Latch:
    """Report a problem once, and again only after it was resolved in between."""

    def __init__(self) -> None:
        self._on: set[Hashable] = set()

    def rises(self, key: Hashable, is_wrong: bool, is_right: bool | None = None) -> bool:
        """Return True if `key` has just become wrong. While it is neither wrong nor right, it stays as it was."""
        if is_wrong:
            was_on = key in self._on
            self._on.add(key)
            return not was_on
        if is_right is None or is_right:
            self._on.discard(key)
        return False


Flags = NDArray[np.bool_]
Times = NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """Times of one step on each rank."""

    step: int
    busy_s: Times
    """Seconds of own work, without waiting for others. Shape: (ranks,)."""
    microbatches: Times
    """Number that each rank ran. Shape: (ranks,)."""


@dataclass(frozen=True)
class Suspicion:
    """Number of times that a process was found, or suspected, to be wrong since it started."""

    node: str
    pid: int
    times: int


@dataclass(frozen=True)
class Sample:
    """All ranks of a world, and what has changed since the sample before.

    Workers may run on machines with other clocks: detectors compare what changed between samples, by `at_s`.
    """

    at_s: float
    """The watcher's CLOCK_MONOTONIC, seconds."""
    generation: int
    moved: Flags
    """True for ranks that have made progress. Shape, as of all arrays: (ranks,)."""
    beaten: Flags
    """True for ranks that have sent a heartbeat."""
    every_s: float = 0.5
    """Least time between two samples, seconds."""
    step: int = -1
    """The furthest step that any rank is in, or did last."""
    has_evaluated: bool = False
    """True if a rank has ended an evaluation since the sample before."""
    took: Sequence[StepTimes] = ()
    """Steps that all ranks have ended, ascending; each is in one sample."""
    suspicions: Mapping[int, Suspicion] = field(default_factory=dict)
    """Suspicions by rank; other ranks have none."""
    seen: Mapping[int, WorkerSeen] = field(default_factory=dict)
    """Rank -> all that it shows; of ranks that do not beat, and of others where a detector has asked for it."""

    @property
    def size(self) -> int:
        return len(self.moved)


class SuspectDetector:
    """Watch the ranks of a world."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], int] = {}
        """Node and process -> how often it was blamed so far. Nodes give the same numbers to their processes."""

    def observe(self, sample: Sample) -> list[Finding]:
        found = []
        for rank, suspicion in sorted(sample.suspicions.items()):
            process, times = (suspicion.node, suspicion.pid), suspicion.times
            if times > self._known.get(process, 0):
                self._known[process] = times
                why = f"the state or results of rank {rank} are wrong, or suspect"
                evidence = {"times": times, "pid": suspicion.pid}
                found.append(Finding("suspect", "check_node", why, (rank,), evidence))
        return found
