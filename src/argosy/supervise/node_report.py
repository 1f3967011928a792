"""Reports of a node's heartbeats: the changes since the report before, in a few numbers for the whole node.

While all goes well a report says that much, and how long the last steps took. What a rank shows in full is told only of
ranks without a beat, and of all where the coordinator asks for it (`wants_all`), once for each time that it changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, FiniteFloat

from argosy.observe.heartbeat import LAST_STEPS, HeartbeatReading, thinned
from argosy.processes.child import process_state
from argosy.processes.connection import Count
from argosy.resilience.detect.finding import WorkerSeen

Rank = Count
Step = Annotated[int, Field(ge=-1, lt=2**53)]
"""-1: none."""


@dataclass(frozen=True)
class NodeReport:
    """A node's workers in one generation, as far as they are not as in the report before. It arrives as a message."""

    generation: Count = 0
    """The newest of its workers; ranks are those of this generation."""
    workers: list[tuple[Rank, Count]] | None = None
    """Rank and process of each; None: the same as in the report before. If it is given, nothing before it counts."""
    step: Step = -1
    """The furthest that any of them is in, or did last."""
    safe_step: Step = -1
    """The newest that any of them could go back to."""
    still: list[Rank] = field(default_factory=list)
    """Ranks that have made no progress since the report before."""
    silent: list[Rank] = field(default_factory=list)
    """Ranks whose heart has not beaten since the report before."""
    waiting: Count = 0
    """Number of those that wait for the next world."""
    has_evaluated: bool = False
    """True if one of them has ended an evaluation since the report before."""
    took: list[tuple[Count, list[FiniteFloat]]] = field(default_factory=list)
    """Steps that all of them have ended, with the seconds of own work of each, in the order of `workers`."""
    microbatches: list[Annotated[int, Field(ge=1, lt=2**53)]] | None = None
    """Number that each ran in these steps, in the order of `workers`; None: as told before, and at first one."""
    suspicions: dict[Rank, Count] = field(default_factory=dict)
    """Rank -> how often it was found or suspected to be wrong, where that has grown."""
    seen: dict[Rank, WorkerSeen] = field(default_factory=dict)
    """Rank -> all that it shows."""


class NodeReporter:
    """Sums up the heartbeats of one node, from one report to the next."""

    def __init__(self, state_of: Callable[[int], str] = process_state):
        """`state_of` returns the state letter of a process."""
        self._state_of = state_of
        self._before: dict[int, HeartbeatReading] = {}
        self._told: dict[int, WorkerSeen] = {}
        self._last_step = -1
        self._microbatches: list[int] = []

    def start_over(self) -> None:
        """Report everything anew next time: its reader may not have had the report before."""
        self._before = {}

    def report(
        self, readings: Iterable[HeartbeatReading], wants_all: bool = False, most_steps: int = LAST_STEPS
    ) -> NodeReport:
        """Return the report on what the node's workers show now.

        wants_all: tell all that each rank shows. most_steps: of how many steps times may be told; if there were more,
        of every second, fourth, ... step, the same on all nodes.
        """
        known = list(readings)
        generation = max((reading.generation for reading in known), default=0)
        here = [reading for reading in known if reading.generation == generation > 0 and reading.rank >= 0]
        now = {reading.rank: reading for reading in sorted(here, key=lambda reading: reading.rank)}
        before, self._before = self._before, now
        is_other = _identities(before) != _identities(now)
        if is_other:
            before, self._told, self._last_step, self._microbatches = {}, {}, -1, [1] * len(now)
        still = [rank for rank, old in before.items() if old.progress == now[rank].progress]
        silent = [rank for rank, old in before.items() if old.beats == now[rank].beats]
        known_microbatches, took = self._microbatches, self._took(now, most_steps)
        return NodeReport(
            generation=generation,
            workers=[(rank, reading.pid) for rank, reading in now.items()] if is_other else None,
            step=max((reading.step for reading in now.values()), default=-1),
            safe_step=max((reading.safe_step for reading in now.values()), default=-1),
            still=still,
            silent=silent,
            waiting=sum(reading.phase == "waiting" for reading in now.values()),
            has_evaluated=any(
                old.phase == "evaluate" and now[rank].phase != "evaluate" for rank, old in before.items()
            ),
            took=took,
            microbatches=None if self._microbatches == known_microbatches else self._microbatches,
            suspicions={
                rank: reading.suspicions
                for rank, reading in now.items()
                if reading.suspicions > (before[rank].suspicions if rank in before else 0)
            },
            seen=self._seen(now, set(still), now if wants_all else silent, silent),
        )

    def _took(self, now: dict[int, HeartbeatReading], most_steps: int) -> list[tuple[int, list[float]]]:
        """Return the times of the steps that all ranks have ended and that were not told yet, as far as they have the
        microbatches of the last of them."""
        if not now:
            return []
        common = set.intersection(*(set(reading.busy_s) for reading in now.values()))
        fresh = sorted(step for step in common if step > self._last_step)
        if not fresh:
            return []
        self._last_step = fresh[-1]
        self._microbatches = _microbatches(now, fresh[-1])
        fresh = [step for step in fresh if _microbatches(now, step) == self._microbatches]
        fresh = thinned(fresh, most_steps)
        return [(step, [round(reading.busy_s[step], 6) for reading in now.values()]) for step in fresh]

    def _seen(
        self, now: dict[int, HeartbeatReading], still: set[int], ranks: Collection[int], silent: Collection[int]
    ) -> dict[int, WorkerSeen]:
        """Return what these ranks show, unless the coordinator knows it, which forgets it when a rank has moved."""
        self._told = {rank: seen for rank, seen in self._told.items() if rank in still}
        fresh = {}
        for rank in ranks:
            if rank not in self._told or rank in silent:
                seen = _seen(now[rank], self._state_of(now[rank].pid))
                if self._told.get(rank) != seen:
                    fresh[rank] = self._told[rank] = seen
        return fresh


def _microbatches(now: dict[int, HeartbeatReading], step: int) -> list[int]:
    return [max(1, reading.microbatches.get(step, 1)) for reading in now.values()]


def _seen(reading: HeartbeatReading, state: str) -> WorkerSeen:
    return WorkerSeen(
        reading.pid, reading.step, reading.phase, dict(reading.sequences), state, has_made_a_step=bool(reading.busy_s)
    )


def _identities(readings: dict[int, HeartbeatReading]) -> set[tuple[int, int, int]]:
    return {(reading.generation, rank, reading.pid) for rank, reading in readings.items()}
