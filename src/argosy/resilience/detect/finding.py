"""What a detector is given and what it gives: samples of all ranks in, findings with their evidence out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from argosy.observe.heartbeat import HeartbeatReading

Action = Literal["kill", "avoid", "check_node", "alarm"]
"""kill: the ranks will not go on by themselves; avoid: leave their node out of the next world, if there is another;
examine: have their node examined before it goes on; alarm: tell somebody."""


@dataclass(frozen=True)
class Finding:
    """Something is wrong, and why one thinks so."""

    kind: str
    action: Action
    why: str
    """A sentence for a person."""
    ranks: tuple[int, ...] = ()
    """Whose fault it is; of a finding about a node: none."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What the sentence rests on, for JSON."""

    def to_event(self) -> dict[str, Any]:
        """The facts of an event of this kind."""
        facts = asdict(self)
        del facts["kind"]
        return {**facts, "ranks": list(self.ranks)}


@dataclass(frozen=True)
class WorkerSeen:
    """One worker at one moment."""

    reading: HeartbeatReading
    state: str
    """As /proc/PID/stat has it: R and S run and sleep, D waits for a device, T is stopped, Z ended; empty: unknown."""


@dataclass(frozen=True)
class Sample:
    """All workers of a world as their watcher saw them at one moment.

    Their own clocks may be those of other machines: detectors compare what changed between samples, by `at_s`.
    """

    at_s: float
    """The watcher's CLOCK_MONOTONIC, seconds."""
    workers: Mapping[int, WorkerSeen]
    """By rank."""


class Latch:
    """Tells that something is wrong once, and again only after it was right in between."""

    def __init__(self) -> None:
        self._on: set[Hashable] = set()

    def rises(self, key: Hashable, is_wrong: bool, is_right: bool | None = None) -> bool:
        """Whether `key` has just become wrong. Between wrong and right, where both are False, it stays as it was."""
        if is_wrong:
            was_on = key in self._on
            self._on.add(key)
            return not was_on
        if is_right is None or is_right:
            self._on.discard(key)
        return False


def process_state(pid: int) -> str:
    """The state letter of a process of this machine; empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]  # the name before it may have brackets and spaces
