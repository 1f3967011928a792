"""A node's memory: is it about to run out, and did the kernel kill a process because it ran out?"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean, variance

from argosy.plan.hardware.host_memory import MemoryReading
from argosy.resilience.detect.finding import Finding, Latch

LOW = 0.04
"""Share of the limit that is left: below it the kernel soon kills a process."""
ENOUGH = 0.08
FULL = 0.2
"""With less than this share left just before, a kill on the machine counts as one of this run."""
SOON_S = 900.0
"""Memory that will run out within this time is reported, if the trend has lasted for `TREND_S`."""
TREND_S = 300.0
SURE = 5.0
"""A trend must be this many times the noise."""
DYING_S = 10.0
"""The kernel counts a killed process at once; its end is seen later, when its memory is freed."""


class MemoryDetector:
    """Watch a node's memory."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, MemoryReading]] = deque()
        self._least_before = math.inf
        self._latch = Latch()
        self._kills: deque[tuple[float, str]] = deque()

    def observe(self, at_s: float, reading: MemoryReading) -> list[Finding]:
        """Return what is found in a reading at `at_s` of CLOCK_MONOTONIC."""
        before = self._past[-1][1] if self._past else reading
        self._past.append((at_s, reading))
        while len(self._past) > 2 and self._past[1][0] <= at_s - TREND_S:
            self._least_before = min(self._least_before, self._past.popleft()[1].available_bytes)
        return [*self._killed(at_s, before, reading), *self._low(reading), *self._shrinking(reading)]

    def why_killed(self, at_s: float) -> str:
        """Return why a process was killed that was found dead at `at_s`, if the kernel did it; empty if not.

        Each observed kill explains one death.
        """
        while self._kills:
            killed_s, why = self._kills.popleft()
            if at_s - killed_s < DYING_S:
                return why
        return ""

    def _killed(self, at_s: float, before: MemoryReading, now: MemoryReading) -> Iterator[Finding]:
        ours = now.oom_kills - before.oom_kills
        machine_was_full = before.available_bytes < FULL * before.limit_bytes
        killed = ours or (now.machine_oom_kills - before.machine_oom_kills if machine_was_full else 0)
        if killed > 0:
            evidence = {"oom_kills": now.oom_kills, "machine_oom_kills": now.machine_oom_kills, **_facts(before)}
            why = f"the kernel killed {killed} process{'es' if killed > 1 else ''} because memory ran out"
            self._kills.extend([(at_s, why)] * killed)
            yield Finding("oom_kill", "alarm", why, evidence=evidence)

    def _low(self, now: MemoryReading) -> Iterator[Finding]:
        share = now.available_bytes / now.limit_bytes
        if self._latch.rises("low", share < LOW, share > ENOUGH):
            yield Finding("memory_low", "alarm", f"{_left(now)}: the kernel may soon kill", evidence=_facts(now))

    def _shrinking(self, now: MemoryReading) -> Iterator[Finding]:
        left_s = seconds_left([(at, reading.available_bytes) for at, reading in self._past])
        # Memory that comes and goes was as low before: each save takes some and frees it.
        is_new = now.available_bytes < self._least_before
        is_soon = left_s is not None and left_s < SOON_S and is_new
        if self._latch.rises("shrinking", is_soon, is_right=left_s is None):
            why = f"{_left(now)}, and at the rate of the last {TREND_S:.0f} s it runs out in {left_s:.0f} s"
            yield Finding("memory_low", "alarm", why, evidence={**_facts(now), "seconds_left": round(left_s or 0)})


def seconds_left(past: Sequence[tuple[float, int]]) -> float | None:
    """Seconds until nothing is left, from (seconds, bytes available); None without a steady trend downwards.

    Steady: it lasted for `TREND_S`, each third of that time had less than the one before by more than the noise, and
    the last third lost at least half as much as the one before, so that memory which grows only while a run starts does
    not count.
    """
    if len(past) < 6 or past[-1][0] - past[0][0] < TREND_S:
        return None
    start, span_s = past[0][0], past[-1][0] - past[0][0]
    thirds: list[list[int]] = [[], [], []]
    for at, available in past:
        thirds[min(2, int(3 * (at - start) / span_s))].append(available)
    if min(map(len, thirds)) < 2:
        return None
    first, middle, last = map(fmean, thirds)
    noise = sum(variance(third) / len(third) for third in thirds) ** 0.5
    if min(first - middle, middle - last, first - last - SURE * noise) <= 0 or middle - last < 0.5 * (first - middle):
        return None
    return past[-1][1] / ((first - last) / (span_s * 2 / 3))


def _facts(reading: MemoryReading) -> dict[str, int]:
    return {"available_bytes": reading.available_bytes, "limit_bytes": reading.limit_bytes}


def _left(reading: MemoryReading) -> str:
    return f"{reading.available_bytes / 2**30:.2f} of {reading.limit_bytes / 2**30:.1f} GiB of memory are left"
