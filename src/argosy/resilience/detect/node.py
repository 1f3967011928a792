"""Everything that an agent watches on its node apart from ranks, read together every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from argosy.resilience.detect.clock import ClockDetector, read_clocks
from argosy.resilience.detect.disk import DiskDetector, DiskProbe
from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.limits import LimitsDetector, read_limits
from argosy.resilience.detect.memory import MemoryDetector, read_memory

EVERY_S = 2.0
"""Reading all takes about a millisecond."""


class NodeWatch:
    """Watch the memory, the disk under `folder`, the clock and the limits of this machine."""

    def __init__(self, folder: Path):
        self._memory, self._disk, self._clock, self._limits = (
            MemoryDetector(),
            DiskDetector(folder),
            ClockDetector(),
            LimitsDetector(),
        )
        self._probe = DiskProbe(folder)
        self._due_s = 0.0

    def look(self, pids: Iterable[int]) -> list[Finding]:
        """Return what is found; nothing if called again within `EVERY_S`. `pids`: the node's workers."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return []
        self._due_s = now_s + EVERY_S
        return [*self.look_at_memory(), *self._others(pids)]

    def look_at_memory(self) -> list[Finding]:
        """Return what is found about memory, without waiting for `EVERY_S`: call it when a worker was killed."""
        return self._memory.observe(time.monotonic(), read_memory())

    def why_killed(self) -> str:
        """Return why a worker was killed, if the kernel did it because memory ran out; empty if not."""
        return self._memory.why_killed(time.monotonic())

    def _others(self, pids: Iterable[int]) -> list[Finding]:
        return [
            *self._disk.observe(self._probe.read()),
            *self._clock.observe(*read_clocks()),
            *self._limits.observe(read_limits(pids)),
        ]
