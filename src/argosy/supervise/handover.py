"""The handover from a coordinator to the one that takes its place: what agents cannot tell it.

It is kept in the run's folder, in membership.json, and describes the newest generation, or none.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from argosy.checkpoint.fence import OLD_NAME
from argosy.files import atomic_write

FILE = "membership.json"
OLD_NAMES = {"generation": OLD_NAME, "suspicions": "doubts"}
"""What keys were called in the folders of older runs, which go on."""


@dataclass(frozen=True)
class Handover:
    """The generation in force, and the nodes that are to be avoided."""

    generation: int = 0
    """The newest that was formed; 0 if none was."""
    plan: str = ""
    size: int = 0
    members: dict[str, int] = field(default_factory=dict)
    """Node -> how many of its workers are members."""
    is_instead: bool = False
    """True if its plan replaces the run's own as long as there is room for it."""
    avoided: tuple[str, ...] = ()
    """Nodes to use only if there are not enough processes without them."""
    last: tuple[str, ...] = ()
    """Nodes to use after all others."""
    suspicions: dict[str, int] = field(default_factory=dict)
    """Node -> how often it was suspected."""

    def save(self, run_dir: Path) -> None:
        """Write it, in place of an older one."""
        with atomic_write(run_dir / FILE) as file:
            file.write(json.dumps(asdict(self), indent=1).encode() + b"\n")

    @classmethod
    def load(cls, run_dir: Path, generation: int) -> Handover:
        """Read the handover of `generation`; one without members if there is none, or it cannot be read."""
        try:
            record = json.loads((run_dir / FILE).read_bytes())
            for new, old in OLD_NAMES.items():
                if old in record:
                    record[new] = record.pop(old)
            avoided, last = tuple(record.pop("avoided")), tuple(record.pop("last"))
            found = cls(**record, avoided=avoided, last=last)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls(generation)
        return found if found.generation == generation else cls(generation)
