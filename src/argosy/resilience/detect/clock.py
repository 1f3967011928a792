"""Wall clocks that jump. No decision depends on wall time, but logs of several nodes are compared by it."""

from __future__ import annotations

import time

from argosy.resilience.detect.finding import Finding

JUMP_S = 1.0
"""NTP moves a clock by at most half a millisecond a second; more than this between two readings is no adjustment."""

TRIES = 5


def read_clocks() -> tuple[float, float]:
    """Return CLOCK_MONOTONIC and the wall clock at one moment, seconds.

    The quickest of several readings: on a busy machine a process may stop for a second between two lines.
    """
    readings = ((time.monotonic(), time.time(), time.monotonic()) for _ in range(TRIES))
    at_s, wall_s, _ = min(readings, key=lambda reading: reading[2] - reading[0])
    return at_s, wall_s


class ClockDetector:
    """Compare the wall clock of a node with its CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self._offset_s: float | None = None

    def observe(self, at_s: float, wall_s: float) -> list[Finding]:
        """Return what is found at `at_s` of CLOCK_MONOTONIC, when the wall clock shows `wall_s`."""
        before, self._offset_s = self._offset_s, wall_s - at_s
        jump_s = 0.0 if before is None else self._offset_s - before
        if abs(jump_s) < JUMP_S:
            return []
        way = "forward" if jump_s > 0 else "back"
        why = f"the wall clock jumped {way} by {abs(jump_s):.1f} s: times in logs before and after do not compare"
        return [Finding("clock_jump", "alarm", why, evidence={"jump_s": round(jump_s, 3)})]
