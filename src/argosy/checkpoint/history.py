"""Position of a state in its run, and the worlds of processes that it has been through.

A run may go back: to an in-memory checkpoint, to one on disk, to before a bad step. Checkpoints of later steps may be
left over, or come back with a node that was cut off. They are whole, and of this run, but of a course that it has left.
The history tells them apart.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass

REMEMBERED_WORLDS = 64
"""Number of worlds that are remembered; what older ones left is long replaced."""


@dataclass(frozen=True)
class Position:
    """The part of a state that is not tensors, the same on all ranks."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained on, over all processes."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges of samples that no update is made from."""
    rounds: int = 0
    """Outer steps made; 0 unless the run has sites."""
    base_sha256: str = ""
    """SHA-256 of the weights beside an adapter (`CheckpointManifest.base_sha256`); empty without one."""


@dataclass(frozen=True)
class History:
    """The worlds of a run that led to a state, oldest first."""

    depth: int = 0
    """Number of worlds."""
    ended: tuple[tuple[str, int], ...] = ()
    """Name and last step that counts of each world before the present one."""
    world: str = ""
    """Name of the present one; empty before the first."""

    def next(self, world: str, step: int) -> History:
        """Return the history of a world named `world` that takes over after `step` steps."""
        ended = ((*self.ended, (self.world, step)) if self.world else self.ended)[-REMEMBERED_WORLDS:]
        return History(self.depth + 1, tuple((name, min(last, step)) for name, last in ended), world)

    def turned_back(self, step: int) -> History:
        """Return the history after all ranks of the present world went back to `step` steps.

        What they did since then, and checkpoints in memory of it, are not taken up again.
        """
        name = hashlib.sha256(repr(self).encode()).hexdigest()[:12]  # the same on all ranks
        return self.next(name, step)

    def admits(self, world: str, step: int) -> bool:
        """True if the run was in the state after `step` steps of `world`, and has not turned away from it."""
        return world == self.world or any(world == name and step <= last for name, last in self.ended)


def to_metadata(position: Position, history: History) -> dict[str, str]:
    """Return both as the metadata of a file."""
    return {
        "position": json.dumps(astuple(position)),
        "history": json.dumps([history.depth, history.ended, history.world]),
    }


def from_metadata(about: dict[str, str]) -> tuple[Position, History]:
    """Return what `to_metadata` was given. Raises: KeyError, ValueError if `about` is something else."""
    try:
        step, tokens, skipped, rounds, base_sha256 = json.loads(about["position"])
        depth, ended, world = json.loads(about["history"])
        return (
            Position(step, tokens, tuple((first, end) for first, end in skipped), rounds, base_sha256),
            History(depth, tuple((name, last) for name, last in ended), world),
        )
    except TypeError as problem:  # a number where there should be a list
        raise ValueError(str(problem)) from None
