"""Findings of detectors with their evidence, and what is told of a worker that is to be judged."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from argosy.observe.heartbeat import Phase

Action = Literal["kill", "avoid", "check_node", "alarm"]
"""kill: end the ranks, which will not go on by themselves; avoid: leave their node out of the next world, if there is
another node; check_node: check the health of their node before it goes on; alarm: only report it."""


@dataclass(frozen=True)
class Finding:
    """Something is wrong, with the evidence for it."""

    kind: str
    action: Action
    why: str
    """A sentence for the user."""
    ranks: tuple[int, ...] = ()
    """Ranks at fault; none if the finding is about a node."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Facts behind the sentence, for JSON."""

    def to_event(self) -> dict[str, Any]:
        """Return the facts of an event of this kind."""
        facts = asdict(self)
        del facts["kind"]
        return {**facts, "ranks": list(self.ranks)}


@dataclass(frozen=True)
class WorkerSeen:
    """One worker at one moment, as `HeartbeatReading` says it."""

    pid: int
    step: int
    phase: Phase
    sequences: Mapping[str, int]
    state: str
    """As in /proc/PID/stat: R runs, S sleeps, D waits for a device, T is stopped, Z has ended; empty: unknown."""
    has_made_a_step: bool
    """True once it has ended a step in this world."""


class Latch:
    """Report a problem once, and again only after it was resolved in between."""

    def __init__(self) -> None:
        self._on: set[Hashable] = set()

    def rises(self, key: Hashable, is_wrong: bool, is_right: bool | None = None) -> bool:
        """Return True if `key` has just become wrong. While it is neither wrong nor right, it stays as it was."""
        if is_wrong:
            was_on = key in self._on
            self._on.add(key)
            return not was_on
        if is_right is None or is_right:
            self._on.discard(key)
        return False
