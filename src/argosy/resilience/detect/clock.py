"""Wall clocks that jump. Nothing is decided by wall time; logs of several nodes are read by it, so a jump is told."""

from __future__ import annotations

import time

from argosy.resilience.detect.finding import Finding

JUMP_S = 1.0
"""NTP moves a clock by at most half a millisecond a second; more than this between two readings is no adjustment."""

TRIES = 5


def read_clocks() -> tuple[float, float]:
    """CLOCK_MONOTONIC and the wall clock at one moment, seconds: of some readings the one that took the shortest, since
    on a busy machine a process may well stand still for a second between two lines.
    """
    readings = ((time.monotonic(), time.time(), time.monotonic()) for _ in range(TRIES))
    at_s, wall_s, _ = min(readings, key=lambda reading: reading[2] - reading[0])
    return at_s, wall_s


class ClockDetector:
    """Compares the wall clock of a node with its CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._offset_s: float | None = None

    def observe(self, at_s: float, wall_s: float) -> list[Finding]:
        """What is found at `at_s` of CLOCK_MONOTONIC, when the wall clock shows `wall_s`."""
        before, self._offset_s = self._offset_s, wall_s - at_s
        jump_s = 0.0 if before is None else self._offset_s - before
        if abs(jump_s) < JUMP_S:
            return []
        way = "forward" if jump_s > 0 else "back"
        why = f"the wall clock jumped {way} by {abs(jump_s):.1f} s: times in logs before and after do not compare"
        return [Finding("clock_jump", "alarm", why, evidence={"jump_s": round(jump_s, 3)})]
