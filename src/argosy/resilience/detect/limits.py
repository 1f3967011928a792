"""Limits that break a run in odd ways when they are reached: open files, shared memory, processes."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argosy.resilience.detect.finding import Finding, Latch

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
