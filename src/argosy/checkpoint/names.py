"""The names that a checkpoint and its files can have; no other is read, written or deleted.

Names come from outside too: from a manifest in a folder or a bucket, and from a bucket's listing.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,14})")


def step_name(step: int) -> str:
    """Return the name of the folder of the checkpoint of `step`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step whose `step_name` this is; None if it is that of none."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def shard_name(rank: int) -> str:
    """Return the name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def foreign(names: Collection[str]) -> str | None:
    """Return the first of `names` that is not in a checkpoint of so many files; None if all are.

    The files of a checkpoint are those of ranks 0, 1, ... without a gap.
    """
    known = {shard_name(rank) for rank in range(len(names))}
    return next((name for name in names if name not in known), None)
