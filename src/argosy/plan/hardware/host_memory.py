"""Memory that this process may use: of the machine, of the control groups it is in (version 1 and 2), of its limits."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 writes "none" as a number near 2^63."""


@dataclass(frozen=True)
class MemoryReading:
    """A node's memory at one moment."""

    available_bytes: int
    """Memory that can be used before a process is killed."""
    limit_bytes: int
    """The machine's memory, or the control group's limit."""
    oom_kills: int
    """Processes of the control group that the kernel has killed so far because memory ran out."""
    machine_oom_kills: int
    """The same for the whole machine, including groups that reached their own limit."""


def read_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryReading:
    """Read how much memory is left on this node, without the file pages that the kernel frees when needed."""
    kills = None
    for folder in _groups(proc, cgroup):
        if kills is None:  # the group's own count: groups above it count other processes too
            kills = (_table(folder / "memory.events") or _table(folder / "memory.oom_control")).get("oom_kill")
    return MemoryReading(*min(_left(proc, cgroup)), kills or 0, _table(proc / "vmstat").get("oom_kill", 0))


def host_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Return the memory of the machine, or of the control group with the lowest limit."""
    return float(min(limit for _, limit in _left(proc, cgroup)))


def process_memory_bytes() -> float:
    """Return the most memory that one process of this user may have (`ulimit -v`, `-d`)."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min((float(limit) for limit in limits if limit != resource.RLIM_INFINITY), default=math.inf)


def _left(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield bytes that are available, and the limit, of the machine and of each control group that has one."""
    machine = _table(proc / "meminfo")
    yield machine["MemAvailable:"] * 1024, machine["MemTotal:"] * 1024
    for folder in _groups(proc, cgroup):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and limit < NO_LIMIT and used is not None:
            reclaimable = _table(folder / "memory.stat").get("inactive_file", 0)
            yield max(0, limit - used + reclaimable), limit


def _groups(proc: Path, root: Path) -> Iterator[Path]:
    """Yield the control groups of this process that may limit its memory, and those above them."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / ("memory" if controllers else "") / path.lstrip("/")
        # In a container the path is that of the host, and the root is the group itself.
        yield from (f for f in (folder, *folder.parents) if f.is_relative_to(root) and f.is_dir())


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is none


def _table(path: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}
