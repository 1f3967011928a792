"""Everything that an agent watches on its node apart from ranks, read together every few seconds.

Wall clocks that jump. No decision depends on wall time, but logs of several nodes are compared by it.

Limits that break a run in odd ways when they are reached: open files, shared memory, processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argosy.plan.hardware.host_memory import read_memory
from argosy.resilience.detect.disk import DiskDetector, DiskProbe
from argosy.resilience.detect.finding import Finding, Latch
from argosy.resilience.detect.memory import MemoryDetector

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


NEARLY, ENOUGH = 0.9, 0.8
"""Used shares: report above the first, reset below the second."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class LimitsReading:
    """How much of its limits a node and its workers have used."""

    files: Mapping[int, tuple[int, int]]
    """Process -> open files, and the limit."""
    shared_memory: tuple[int, int]
    """Bytes used in /dev/shm, and its size."""
    processes: tuple[int, int] | None = None
    """Processes of the control group and their limit, if there is one."""


class LimitsDetector:
    """Watch these limits."""

    def __init__(self) -> None:
        self._latch = Latch()

    def observe(self, reading: LimitsReading) -> list[Finding]:
        """Return what is found in a reading."""
        return list(self._near(reading))

    def _near(self, reading: LimitsReading) -> Iterator[Finding]:
        for pid, (used, most) in reading.files.items():
            yield from self._told(
                f"process {pid} has {used} open files; its limit is {most}", ("files", pid), used, most
            )
        used, most = reading.shared_memory
        yield from self._told(f"{used >> 20} of {most >> 20} MiB of {SHARED_MEMORY} are used", "shm", used, most)
        if reading.processes is not None:
            used, most = reading.processes
            yield from self._told(f"there are {used} processes and threads; the limit is {most}", "pids", used, most)

    def _told(self, why: str, key: Hashable, used: int, most: int) -> Iterator[Finding]:
        share = used / most if most > 0 else 0.0
        if self._latch.rises(key, share > NEARLY, share < ENOUGH):
            yield Finding("limit_near", "alarm", why, evidence={"used": used, "limit": most})


def read_limits(pids: Iterable[int], proc: Path = Path("/proc")) -> LimitsReading:
    """Read what the processes `pids` of this machine, and the machine, have used."""
    files = {}
    for pid in pids:
        with suppress(OSError, ValueError):  # it has ended
            files[pid] = sum(1 for _ in (proc / str(pid) / "fd").iterdir()), _most_files(proc / str(pid) / "limits")
    disk = os.statvfs(SHARED_MEMORY)
    size = disk.f_blocks * disk.f_frsize
    return LimitsReading(files, (size - disk.f_bfree * disk.f_frsize, size), _processes())


def _most_files(path: Path) -> int:
    line = next(line for line in path.read_text().splitlines() if line.startswith("Max open files"))
    return int(line.split()[3])


def _processes() -> tuple[int, int] | None:
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
        with suppress(OSError, ValueError):  # no such control group, or "max"
            return int((folder / "pids.current").read_text()), int((folder / "pids.max").read_text())
    return None


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
