"""What detectors take: all ranks of a world at one moment, in arrays by rank, since a world may have thousands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argosy.resilience.detect.finding import WorkerSeen

Flags = NDArray[np.bool_]
Times = NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """How long one step took on each rank."""

    step: int
    busy_s: Times
    """Seconds of own work, without waiting for others. Shape: (ranks,)."""
    microbatches: Times
    """How many each rank ran. Shape: (ranks,)."""


@dataclass(frozen=True)
class Suspicion:
    """How often a process was found, or suspected, to be wrong since it started."""

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
    """Which ranks have made progress. Shape, as of all arrays: (ranks,)."""
    beaten: Flags
    """Which ranks have sent a heartbeat."""
    every_s: float = 0.5
    """How often samples come at most, seconds."""
    step: int = -1
    """The furthest step that any rank is in, or did last."""
    has_evaluated: bool = False
    """True if a rank has ended an evaluation since the sample before."""
    took: Sequence[StepTimes] = ()
    """Steps that all ranks have ended, ascending; each is in one sample."""
    suspicions: Mapping[int, Suspicion] = field(default_factory=dict)
    """By rank; of others there is none."""
    seen: Mapping[int, WorkerSeen] = field(default_factory=dict)
    """Rank -> all that it shows; of ranks that do not beat, and of others where a detector has asked for it."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.moved)
