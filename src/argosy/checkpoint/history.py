"""Where a state stands in its run, and which worlds of processes it has been through.

A run goes back: to a copy, to a checkpoint, to before a bad step. Copies of later steps may lie about, or come back
with a node that was cut off: whole, and of this run, but of a course that it has left. The history tells them apart.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

REMEMBERED = 64
"""Worlds; what an older one has left is long replaced."""


@dataclass(frozen=True)
class Position:
    """What there is of a state besides tensors, the same on all ranks."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Trained on, over all processes."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges of samples that no update is made from."""


@dataclass(frozen=True)
class History:
    """The worlds of a run that led to a state, oldest first."""

    depth: int = 0
    """How many there were."""
    ended: tuple[tuple[str, int], ...] = ()
    """(name, the last of its steps that counts) of those before the present one."""
    world: str = ""
    """Name of the present one; empty before the first."""

    def next(self, world: str, step: int) -> History:
        """Where a world named `world` takes over from `step` steps done."""
        ended = ((*self.ended, (self.world, step)) if self.world else self.ended)[-REMEMBERED:]
        return History(self.depth + 1, tuple((name, min(last, step)) for name, last in ended), world)

    def turned_back(self, step: int) -> History:
        """Where the ranks of the present world go back, all together, to `step` steps done: what they did since then,
        and what was copied of it, is not taken up again.
        """
        name = hashlib.sha256(repr(self).encode()).hexdigest()[:12]  # the same on all ranks
        return self.next(name, step)

    def admits(self, world: str, step: int) -> bool:
        """Whether the state after `step` steps in `world` is one that the run has been in and not turned away from."""
        return world == self.world or any(world == name and step <= last for name, last in self.ended)


def to_metadata(position: Position, history: History) -> dict[str, str]:
    """Both as the metadata of a file."""
    return {
        "position": json.dumps([position.step, position.tokens, position.skipped]),
        "history": json.dumps([history.depth, history.ended, history.world]),
    }


def from_metadata(about: dict[str, str]) -> tuple[Position, History]:
    """What `to_metadata` was given. Raises: KeyError, ValueError if it is not that."""
    step, tokens, skipped = json.loads(about["position"])
    depth, ended, world = json.loads(about["history"])
    return (
        Position(step, tokens, tuple((first, end) for first, end in skipped)),
        History(depth, tuple((name, last) for name, last in ended), world),
    )
