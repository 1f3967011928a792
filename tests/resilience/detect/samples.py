"""Ranks that a test makes up: what their watcher would see of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from argosy.observe.heartbeat import HeartbeatReading
from argosy.resilience.detect.finding import Finding, Sample
from argosy.supervise.node_report import NodeReporter
from argosy.supervise.watch import WorldView

T = TypeVar("T")

READING = HeartbeatReading(
    pid=100,
    generation=1,
    rank=0,
    step=0,
    phase="forward",
    phase_since_ns=0,
    busy_s={},
    beats=0,
    peak_memory_bytes=0,
    sequences={"default_pg#0": 0},
)


def _last(steps: dict[int, T]) -> dict[int, T]:
    return dict(sorted(steps.items())[-64:])


@dataclass
class World:
    """Some ranks, and a clock that their watcher reads every `tick_s`."""

    size: int
    tick_s: float = 0.5
    at_s: float = 1000.0
    ranks: dict[int, HeartbeatReading] = field(init=False)
    states: dict[int, str] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._reporter = NodeReporter(lambda pid: self.states.get(pid - READING.pid, "S"))
        self._view = WorldView(0, 0)
        self.ranks = {rank: replace(READING, rank=rank, pid=READING.pid + rank) for rank in range(self.size)}

    def change(self, ranks: Iterable[int] | int, **values: Any) -> None:
        """What these ranks do from now on."""
        for rank in [ranks] if isinstance(ranks, int) else ranks:
            self.ranks[rank] = replace(self.ranks[rank], **values)

    def count(self, ranks: Iterable[int], group: str = "default_pg#0", by: int = 1) -> None:
        """These ranks begin so many collectives of the group."""
        for rank in ranks:
            sequences: Mapping[str, int] = self.ranks[rank].sequences
            self.change(rank, sequences={**sequences, group: sequences.get(group, 0) + by})

    def step(self, *, busy_s: Mapping[int, float] | None = None, microbatches: Mapping[int, int] | None = None) -> None:
        """All ranks make a step."""
        for rank, reading in self.ranks.items():
            last = _last({**reading.busy_s, reading.step: (busy_s or {}).get(rank, 0.1)})
            many = _last({**reading.microbatches, reading.step: (microbatches or {}).get(rank, 1)})
            after_ns = reading.phase_since_ns + 1
            self.change(rank, step=reading.step + 1, busy_s=last, microbatches=many, phase_since_ns=after_ns)
        self.count(range(self.size))

    def sample(self) -> Sample | None:
        """What is seen `tick_s` later, all that ranks show included; None if not all are in the newest generation."""
        self.at_s += self.tick_s
        for rank in range(self.size):
            if rank not in self.stopped:
                self.change(rank, beats=self.ranks[rank].beats + 5)
        report = self._reporter.report(self.ranks.values(), wants_all=True)
        if report.generation != self._view.generation:
            self._view = WorldView(report.generation, self.size)
        self._view.take("a", report)
        return self._view.sample(self.at_s, 0.5)

    def sampled(self) -> Sample:
        """The same, of a world whose ranks are all in one generation."""
        sample = self.sample()
        assert sample is not None
        return sample

    def watch(self, detector: Any, seconds: float) -> list[tuple[float, Finding]]:
        """Let so much time pass without any change; (seconds from now, finding)."""
        began = self.at_s
        found = []
        while self.at_s < began + seconds:
            sample = self.sample()
            found += [(self.at_s - began, finding) for finding in (detector.observe(sample) if sample else ())]
        return found
