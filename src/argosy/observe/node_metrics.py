"""nodes/NODE.jsonl: what the ranks of one node did, summed up by one process of the node from their heartbeats.

A line comes every `observe.ranks_every_s` at most. In large worlds lines come so rarely that all nodes together write
about `BYTES_PER_DAY`, whatever the number of ranks: means lose nothing by that, since the counters go on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from argosy.config.schema import RunConfig
from argosy.errors import ArgosyWarning
from argosy.observe.counters import Counters
from argosy.observe.events import JsonLines
from argosy.observe.heartbeat import HeartbeatReading
from argosy.observe.instruments import NOTHING, Instruments

BYTES_PER_DAY = 1e9
"""Most bytes that all nodes of a run together write in a day."""
DAY_S = 86_400.0
MOST_OWN = 16
"""A line has own seconds of at most so many steps: of every second, fourth, ... where there are more."""

Readings = Callable[[], Iterable[HeartbeatReading]]
"""Gives what the node's workers show now."""


class NodeMetrics:
    """Writes the lines of one node."""

    def __init__(self, path: Path, every_s: float, instruments: Instruments = NOTHING):
        """`path`: of the node's lines (`lines_of_node`); `instruments` are asked for each line."""
        self._lines = JsonLines(path)
        self._every_s, self._instruments = every_s, instruments
        self._due_s = time.monotonic() + every_s
        self._before: dict[tuple[int, int], Counters] = {}
        self._wrote: dict[tuple[int, int], int] = {}
        self._own_until = -1
        self._generation = 0
        self._ended: list[HeartbeatReading] = []

    @classmethod
    def of_run(cls, run: RunConfig, run_dir: Path, node: str) -> NodeMetrics:
        """Return the lines of a node of a run, with all that its machine can measure."""
        path = lines_of_node(run_dir, node)
        return cls(path, run.observe.ranks_every_s, Instruments.find(run, run_dir, path))

    def tend(self, readings: Readings, world_size: int) -> None:
        """Write a line on what `readings` gives, if one is due. Call it every second, or more often."""
        if time.monotonic() >= self._due_s:
            self.write(readings, world_size)
        else:
            self._instruments.poll(time.monotonic())

    def ended(self, reading: HeartbeatReading) -> None:
        """Keep what a worker showed last, which is gone: the next line of its world counts it."""
        self._ended.append(reading)

    def write(self, readings: Readings, world_size: int) -> None:
        """Write a line on these workers, of which those of the newest world count; none without any.

        world_size: ranks of that world on all nodes, by which the next line is put off. Whatever goes wrong (a full
        disk, say) costs the line and a warning, not the run.
        """
        began_s = time.monotonic()
        self._due_s = began_s + self._every_s
        try:
            line = self.line(readings())
            if line is not None:
                size, nodes = self._lines.write(line), world_size / len(line["ranks"])
                self._due_s = began_s + max(self._every_s, size * nodes * DAY_S / BYTES_PER_DAY)
        except Exception as problem:
            warnings.warn(f"{self._lines.path}: a line is lost ({problem})", ArgosyWarning, stacklevel=2)

    def line(self, readings: Iterable[HeartbeatReading]) -> dict[str, Any] | None:
        """Return the line on what was done since the last one; None while no worker is in a world."""
        known = [*readings, *self._ended]
        generation = max((reading.generation for reading in known), default=0)
        self._ended = [reading for reading in self._ended if reading.generation == generation]
        now = sorted((r for r in known if r.generation == generation > 0 and r.rank >= 0), key=lambda r: r.rank)
        if not now:
            return None
        if generation != self._generation:
            self._generation, self._before, self._wrote, self._own_until = generation, {}, {}, -1
        return {
            "time_s": round(time.time(), 3),
            "generation": generation,
            "ranks": [reading.rank for reading in now],
            **self._steps(now),
            "memory_bytes": [reading.counted.memory_bytes or reading.peak_memory_bytes for reading in now],
            **self._checkpoints(now),
            **self._instruments.measure([reading.rank for reading in now]),
        }

    def _steps(self, now: Sequence[HeartbeatReading]) -> dict[str, Any]:
        """Return what steps were made of; nothing until each of the ranks has ended one since."""
        done = [r.counted.since(self._before.get(_key(r), Counters())) for r in now]
        if any(each.steps <= 0 for each in done):
            return {}
        self._before = {_key(reading): reading.counted for reading in now}
        categories = sorted({name for each in done for name in each.seconds} - {"step"})
        channels = sorted(
            {(axis, tier) for each in done for axis, tiers in each.communication.items() for tier in tiers}
        )
        communication: dict[str, dict[str, Any]] = {}
        for axis, tier in channels:
            both = [(each.communication.get(axis, {}).get(tier, (0.0, 0)), each.steps) for each in done]
            communication.setdefault(axis, {})[tier] = {
                "seconds": [round(waited_s / steps, 6) for (waited_s, _), steps in both],
                "bytes": [round(sent / steps) for (_, sent), steps in both],
            }
        return {
            "steps": [min(each.first_step for each in done), max(each.last_step for each in done)],
            "step_s": [_mean(each, "step") for each in done],
            "seconds": {name: [_mean(each, name) for each in done] for name in categories},
            **self._own(now),
            **({"communication": communication} if communication else {}),
        }

    def _own(self, now: Sequence[HeartbeatReading]) -> dict[str, Any]:
        """Return the own seconds of all ranks in steps that all have ended, the same steps on all nodes, and from which
        of them on each rank ran how many microbatches; without that it is one."""
        common = set.intersection(*(set(reading.busy_s) for reading in now))
        fresh = sorted(step for step in common if step > self._own_until)
        if fresh:
            self._own_until = fresh[-1]
        stride = 1
        while len(fresh) > MOST_OWN:
            stride *= 2
            fresh = [step for step in fresh if step % stride == 0]
        microbatches: list[tuple[int, list[int]]] = []
        for step in fresh:
            many = [reading.microbatches.get(step, 1) for reading in now]
            if many != (microbatches[-1][1] if microbatches else [1] * len(now)):
                microbatches.append((step, many))
        own = [(step, [round(reading.busy_s[step], 6) for reading in now]) for step in fresh]
        return {"own": own, **({"microbatches": microbatches} if microbatches else {})}

    def _checkpoints(self, now: Sequence[HeartbeatReading]) -> dict[str, int]:
        wrote = {_key(reading): reading.counted.checkpoint_bytes for reading in now}
        fresh = sum(written - self._wrote.get(key, 0) for key, written in wrote.items())
        self._wrote = wrote
        return {"checkpoint_bytes": fresh} if fresh else {}


def lines_of_node(run_dir: Path, node: str) -> Path:
    """Return the file in which `node` of a run writes its lines."""
    return run_dir / "nodes" / f"{node}.jsonl"


def _key(reading: HeartbeatReading) -> tuple[int, int]:
    return reading.rank, reading.pid


def _mean(counted: Counters, category: str) -> float:
    return round(counted.seconds.get(category, 0.0) / counted.steps, 6)
