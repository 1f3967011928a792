"""Ranks that a test makes up: what their watcher would see of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from argosy.observe.heartbeat import HeartbeatReading
from argosy.resilience.detect.finding import Finding, Sample, WorkerSeen

READING = HeartbeatReading(
    pid=100,
    generation=1,
    rank=0,
    step=0,
    phase="forward",
    phase_since_ns=0,
    busy_s={},
    beats=0,
    beat_ns=0,
    peak_memory_bytes=0,
    sequences={"default_pg#0": 0},
)


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
        self.ranks = {rank: replace(READING, rank=rank, pid=100 + rank) for rank in range(self.size)}

    def change(self, ranks: Iterable[int] | int, **values: Any) -> None:
        """What these ranks do from now on."""
        for rank in [ranks] if isinstance(ranks, int) else ranks:
            self.ranks[rank] = replace(self.ranks[rank], **values)

    def count(self, ranks: Iterable[int], group: str = "default_pg#0", by: int = 1) -> None:
        """These ranks begin so many collectives of the group."""
        for rank in ranks:
            sequences: Mapping[str, int] = self.ranks[rank].sequences
            self.change(rank, sequences={**sequences, group: sequences.get(group, 0) + by})

    def step(self, *, busy_s: Mapping[int, float] | None = None) -> None:
        """All ranks make a step."""
        for rank, reading in self.ranks.items():
            took = {**reading.busy_s, reading.step: (busy_s or {}).get(rank, 0.1)}
            last = dict(sorted(took.items())[-64:])
            self.change(rank, step=reading.step + 1, busy_s=last, phase_since_ns=reading.phase_since_ns + 1)
        self.count(range(self.size))

    def sample(self) -> Sample:
        """What is seen `tick_s` later."""
        self.at_s += self.tick_s
        for rank in range(self.size):
            if rank not in self.stopped:
                self.change(rank, beats=self.ranks[rank].beats + 5)
        seen = {rank: WorkerSeen(reading, self.states.get(rank, "S")) for rank, reading in self.ranks.items()}
        return Sample(self.at_s, seen)

    def watch(self, detector: Any, seconds: float) -> list[tuple[float, Finding]]:
        """Let so much time pass without any change; (seconds from now, finding)."""
        began = self.at_s
        found = []
        while self.at_s < began + seconds:
            found += [(self.at_s - began, finding) for finding in detector.observe(self.sample())]
        return found
