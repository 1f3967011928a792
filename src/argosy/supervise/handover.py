"""What a coordinator leaves to the one that takes its place: what agents cannot tell it.

It stands in the run's folder, in membership.json, and is of the newest generation, or of none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from argosy.files import atomic_write

FILE = "membership.json"


@dataclass(frozen=True)
class Handover:
    """The generation in force, and what is held against nodes."""

    generation: int = 0
    """The newest that was formed; 0: none was."""
    plan: str = ""
    size: int = 0
    members: dict[str, int] = field(default_factory=dict)
    """Node -> how many of its workers are in it."""
    is_instead: bool = False
    """Its plan is in place of the run's own as long as there is room for it."""
    avoided: tuple[str, ...] = ()
    """Nodes to be taken only if there are not processes enough without them."""
    last: tuple[str, ...] = ()
    """Nodes that are last in line."""
    doubts: dict[str, int] = field(default_factory=dict)
    """Node -> how often it was in doubt."""

    def save(self, run_dir: Path) -> None:
        """Put it in place of what was left before."""
        with atomic_write(run_dir / FILE) as file:
            file.write(json.dumps(asdict(self), indent=1).encode() + b"\n")

    @classmethod
    def load(cls, run_dir: Path, generation: int) -> Handover:
        """What was left of `generation`; of one without members where that is nothing, or cannot be read."""
        try:
            record = json.loads((run_dir / FILE).read_bytes())
            avoided, last = tuple(record.pop("avoided")), tuple(record.pop("last"))
            found = cls(**record, avoided=avoided, last=last)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls(generation)
        return found if found.generation == generation else cls(generation)
