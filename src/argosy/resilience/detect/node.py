"""Everything that an agent watches on its node apart from ranks, read every few seconds: memory, the disk under the
run's folder, the wall clock, limits.

A disk that fails, fills up or slows down is detected by writing and syncing a small file from time to time. Of wall
clocks that jump no decision depends, but logs of several nodes are compared by them. Limits that are reached (open
files, shared memory, processes) break a run in odd ways.

Memory may be about to run out, or the kernel may have killed a process because it did.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, variance

from argosy.errors import counted
from argosy.plan.hardware.local_machine import MemoryReading, read_memory
from argosy.resilience.detect.finding import Finding, Latch

LOW_DISK, ENOUGH_LEFT = 0.02, 0.04
"""Shares of the disk's bytes or inodes that are left: report below the first, reset above the second."""
LOW_BYTES = 5 * 2**30
"""Free bytes above which the free share does not matter."""
SLOWER, SLOW_S = 20.0, 1.0
"""A write is slow if it takes this many times the median of those before, and this long."""
IN_A_ROW = 3
HISTORY, LEAST_HISTORY = 200, 10
WRITE_EVERY_S = 30.0
"""Time from the beginning of a trial write to the next."""
HANGS_S = 30.0
"""A write that has not returned by then hangs."""
DISK_BLOCK = os.urandom(1 << 16)
DISK_PROBE = ".disk-probe"


@dataclass(frozen=True)
class DiskReading:
    """A disk at one moment."""

    free_bytes: int
    total_bytes: int
    free_inodes: int
    total_inodes: int
    """0 where the file system has no such limit."""
    is_read_only: bool
    write_s: float | None
    """Duration of the newest trial write, if there was one since the last reading."""
    error: int | None = None
    """The errno that the trial write failed with."""
    pending_s: float = 0.0
    """Time for which a trial write has been running."""


class DiskDetector:
    """Watch the disk of one folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._slow = 0
        self._latch = Latch()

    def observe(self, reading: DiskReading) -> list[Finding]:
        return [*self._failed(reading), *self._slowed(reading), *self._filled(reading)]

    def _failed(self, now: DiskReading) -> Iterator[Finding]:
        is_wrong = now.error is not None or now.is_read_only
        if self._latch.rises("failed", is_wrong, is_right=now.write_s is not None and not is_wrong):
            code = now.error or errno.EROFS
            why = f"{self._folder}: a trial write failed: {os.strerror(code)}"
            yield Finding("disk_failed", "alarm", why, evidence={"errno": errno.errorcode.get(code, str(code))})

    def _slowed(self, now: DiskReading) -> Iterator[Finding]:
        usual_s = median(self._history) if len(self._history) >= LEAST_HISTORY else None
        if now.write_s is not None:
            is_slow = usual_s is not None and now.write_s > max(SLOW_S, SLOWER * usual_s)
            self._slow = self._slow + 1 if is_slow else 0
            if not is_slow:  # else a long slow time would become the usual one
                self._history.append(now.write_s)
        evidence = {"write_s": now.write_s, "usual_s": usual_s, "pending_s": round(now.pending_s, 1)}
        if self._latch.rises("hangs", now.pending_s > HANGS_S):
            why = f"{self._folder}: a trial write has not returned for {now.pending_s:.0f} s"
            yield Finding("disk_slow", "alarm", why, evidence=evidence)
        if self._latch.rises("slow", self._slow >= IN_A_ROW, is_right=now.write_s is not None and not self._slow):
            why = f"{self._folder}: {len(DISK_BLOCK) >> 10} KiB take {now.write_s:.1f} s to write, not {usual_s:.3f} s"
            yield Finding("disk_slow", "alarm", why, evidence=evidence)

    def _filled(self, now: DiskReading) -> Iterator[Finding]:
        share = now.free_bytes / now.total_bytes if now.total_bytes else 1.0
        is_low = share < LOW_DISK and now.free_bytes < LOW_BYTES
        facts = {"free_bytes": now.free_bytes, "total_bytes": now.total_bytes}
        if self._latch.rises("bytes", is_low, is_right=share > ENOUGH_LEFT or now.free_bytes > 2 * LOW_BYTES):
            why = f"{self._folder}: {now.free_bytes / 2**20:.0f} MiB are left on its disk"
            yield Finding("disk_full", "alarm", why, evidence=facts)
        inodes = now.free_inodes / now.total_inodes if now.total_inodes else 1.0
        if self._latch.rises("inodes", inodes < LOW_DISK, is_right=inodes > ENOUGH_LEFT):
            why = f"{self._folder}: {now.free_inodes} more files fit on its disk"
            evidence = {"free_inodes": now.free_inodes, "total_inodes": now.total_inodes}
            yield Finding("disk_full", "alarm", why, evidence=evidence)


class DiskProbe:
    """Write a small file in `folder` from time to time, in a thread: a write that hangs blocks nothing else."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._began: float | None = None
        self._due = 0.0
        self._result: tuple[float, int | None] | None = None

    def read(self) -> DiskReading:
        """Return the disk's state, and begin another trial write if one is due. Does not wait for the write."""
        result, self._result = self._result, None
        now = time.monotonic()
        if self._began is None and now >= self._due:
            self._began, self._due = now, now + WRITE_EVERY_S
            try:
                threading.Thread(target=self._write, name="argosy-disk-probe", daemon=True).start()
            except RuntimeError:  # there can be no more threads: the run needs none
                self._began = None
        began = self._began
        write_s, error = result or (None, None)
        disk = _statistics(self._folder)
        return DiskReading(
            free_bytes=disk.f_bavail * disk.f_frsize if disk else 0,
            total_bytes=disk.f_blocks * disk.f_frsize if disk else 0,
            free_inodes=disk.f_favail if disk else 0,
            total_inodes=disk.f_files if disk else 0,
            is_read_only=bool(disk and disk.f_flag & os.ST_RDONLY),
            write_s=None if error is not None else write_s,
            error=error,
            pending_s=0.0 if began is None else now - began,
        )

    def _write(self) -> None:
        began = time.monotonic()
        error = None
        # Where nodes share the folder, one must not remove what another writes: NFS would call that an error (ESTALE).
        path = self._folder / f"{DISK_PROBE}-{socket.gethostname()}"
        try:
            with path.open("wb") as file:
                file.write(DISK_BLOCK)
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            error = problem.errno or errno.EIO
        with suppress(OSError):
            path.unlink()
        self._result = time.monotonic() - began, error
        self._began = None


def _statistics(folder: Path) -> os.statvfs_result | None:
    try:
        return os.statvfs(folder)
    except OSError:
        return None  # the trial write reports what is wrong


JUMP_S = 1.0
"""NTP moves a clock by at most half a millisecond a second; more than this between two readings is no adjustment."""

CLOCK_TRIES = 5


def read_clocks() -> tuple[float, float]:
    """Return CLOCK_MONOTONIC and the wall clock at one moment, seconds.

    The quickest of several readings: on a busy machine a process may stop for a second between two lines.
    """
    readings = ((time.monotonic(), time.time(), time.monotonic()) for _ in range(CLOCK_TRIES))
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


NEAR_LIMIT, BELOW_LIMIT = 0.9, 0.8
"""Used shares: report above the first, reset below the second."""
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class LimitsReading:
    """The limits of a node and its workers, and how much of them is used."""

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
        if self._latch.rises(key, share > NEAR_LIMIT, share < BELOW_LIMIT):
            yield Finding("limit_near", "alarm", why, evidence={"used": used, "limit": most})


def read_limits(pids: Iterable[int]) -> LimitsReading:
    """Read what the processes `pids` of this machine, and the machine, have used."""
    files = {}
    for pid in pids:
        with suppress(OSError, ValueError):  # it has ended
            process = Path("/proc", str(pid))
            files[pid] = sum(1 for _ in (process / "fd").iterdir()), _most_files(process / "limits")
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


READ_EVERY_S = 2.0
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
        """Return what is found; nothing if called again within `READ_EVERY_S`. `pids`: the node's workers."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return []
        self._due_s = now_s + READ_EVERY_S
        return [*self.look_at_memory(), *self._others(pids)]

    def look_at_memory(self) -> list[Finding]:
        """Return what is found about memory, without waiting for `READ_EVERY_S`: call it when a worker was killed."""
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


LOW, NO_LONGER_LOW = 0.04, 0.08
"""Shares of the limit that are left: report below the first, where the kernel soon kills a process; reset above the
second."""
LITTLE_MEMORY = 0.2
"""Free share of memory below which a kill on the machine counts as one of this run."""
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
        machine_was_full = before.available_bytes < LITTLE_MEMORY * before.limit_bytes
        killed = ours or (now.machine_oom_kills - before.machine_oom_kills if machine_was_full else 0)
        if killed > 0:
            evidence = {"oom_kills": now.oom_kills, "machine_oom_kills": now.machine_oom_kills, **_facts(before)}
            why = f"the kernel killed {counted(killed, 'process', 'es')} because memory ran out"
            self._kills.extend([(at_s, why)] * killed)
            yield Finding("oom_kill", "alarm", why, evidence=evidence)

    def _low(self, now: MemoryReading) -> Iterator[Finding]:
        share = now.available_bytes / now.limit_bytes
        if self._latch.rises("low", share < LOW, share > NO_LONGER_LOW):
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
