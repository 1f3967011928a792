"""The run file's table `observe.profile`: steps that are recorded with torch's profiler."""

from __future__ import annotations

import re

from pydantic import field_validator

from argosy.config.section import Section


class ProfileConfig(Section):
    """Steps that are recorded with torch's profiler, and summed up (docs/profiling.md)."""

    steps: str = ""
    """FIRST:END, as Python's slices: 10:13 records the steps 10, 11 and 12 as metrics.jsonl counts them; "": none."""
    ranks: str = "nodes"
    """Ranks that record: nodes (the first rank of each), all, or ranks such as 0,7."""
    memory: bool = True
    """Record memory too: on a GPU a snapshot of it, on a CPU each allocation."""
    stacks: bool = False
    """Record where in the source each operation was called; makes steps slower and traces larger."""

    @field_validator("steps")
    @classmethod
    def _is_range(cls, value: str) -> str:
        found = re.fullmatch(r"(\d+):(\d+)", value)
        if value and found is None:
            raise ValueError(f"{value} is not FIRST:END, such as 10:13 for the steps 10, 11 and 12")
        if found and int(found[1]) >= int(found[2]):
            ahead = int(found[1]) + 3
            raise ValueError(f"{value} has no step: END must exceed FIRST. Try {found[1]}:{ahead}")
        return value

    @field_validator("ranks")
    @classmethod
    def _are_ranks(cls, value: str) -> str:
        if value not in ("nodes", "all") and not re.fullmatch(r"\d+(, *\d+)*", value):
            raise ValueError(f"{value} is neither nodes, nor all, nor ranks such as 0,7")
        return value

    @property
    def chosen(self) -> frozenset[int] | None:
        """The ranks that are named; None if they are chosen by their place."""
        return None if self.ranks in ("nodes", "all") else frozenset(map(int, self.ranks.split(",")))

    @property
    def range(self) -> range:
        """The steps, 0-based; empty if none are recorded."""
        first, _, end = self.steps.partition(":")
        return range(int(first), int(end)) if end else range(0)
