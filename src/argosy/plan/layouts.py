"""Many plans at once, as arrays: the cost model computes 100,000s of plans in a second with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import Offload, Plan, Precision, Recompute, Sync

Ints = NDArray[np.int64]

SCHEDULE_NAMES = tuple(SCHEDULES)
WORDS: dict[str, tuple[Any, ...]] = {
    "schedule": SCHEDULE_NAMES,
    "context": ("ring", "ulysses"),
    "recompute": get_args(Recompute),
    "offload": get_args(Offload),
    "precision": get_args(Precision),
    "weights": ("fp32", "bf16"),
    "reduce": ("fp32", "bf16"),
    "sync": get_args(Sync),
    "compile": (False, True),
}
"""Keys of a plan whose values are words; in arrays, each word is its place in this list."""


@dataclass(frozen=True)
class Layouts:
    """Plans as columns, all of one length or of length 1. `Plan` says what each column means."""

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    zero: Ints
    schedule: Ints
    stages_per_rank: Ints
    context: Ints
    recompute: Ints
    recompute_every: Ints
    offload: Ints
    microbatch: Ints
    precision: Ints
    weights: Ints
    reduce: Ints
    sync: Ints
    sum_inside: Ints
    sum_between: Ints
    bucket_mb: Ints
    compile: Ints

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Layouts:
        """Return these plans as columns."""
        rows = [plan.model_dump() for plan in plans]
        return cls(**{f.name: np.array([_number(f.name, row[f.name]) for row in rows]) for f in fields(cls)})

    def __len__(self) -> int:
        return max(len(getattr(self, f.name)) for f in fields(self))

    def __getitem__(self, chosen: NDArray[Any] | slice) -> Layouts:
        """Return the rows that a mask, an array of numbers or a slice chooses."""
        n = len(self)
        return Layouts(**{f.name: np.broadcast_to(getattr(self, f.name), n)[chosen] for f in fields(self)})

    def plan(self, row: int) -> Plan:
        """Return the plan in one row."""
        n = len(self)
        columns = {f.name: np.broadcast_to(getattr(self, f.name), n) for f in fields(self)}
        return Plan(**{key: _value(key, int(column[row])) for key, column in columns.items()})

    @property
    def dp(self) -> Ints:
        """Data-parallel ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Ints:
        """Processes."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages_here(self) -> Ints:
        """Pipeline stages on each rank."""
        fixed = np.array([SCHEDULES[name].stages_per_rank or 0 for name in SCHEDULE_NAMES])[self.schedule]
        return np.where(self.pp == 1, 1, np.where(fixed > 0, fixed, self.stages_per_rank))

    @property
    def stages(self) -> Ints:
        """Pipeline stages in all."""
        return self.pp * self.stages_here

    def microbatches(self, global_batch: int) -> Ints:
        """Microbatches that each data-parallel rank runs in one step."""
        return global_batch // (self.dp * self.microbatch)

    @property
    def shares_state(self) -> Ints:
        """Ranks that share a parameter's state (the n of ZeRO); 1 for stage 0."""
        return np.where(self.zero == 0, 1, self.dp_shard * self.cp)

    @property
    def shards_parameters(self) -> NDArray[np.bool_]:
        """True where FSDP2 splits parameters."""
        return (self.zero == 3) & (self.dp_shard * self.cp > 1)

    def is_(self, key: str, *words: object) -> NDArray[np.bool_]:
        """Return True where the column `key` is one of these words."""
        column = getattr(self, key)
        return reduce(np.logical_or, [column == WORDS[key].index(word) for word in words])


def _number(key: str, value: object) -> int:
    return WORDS[key].index(value) if key in WORDS else int(value)  # type: ignore[call-overload]


def _value(key: str, number: int) -> object:
    return WORDS[key][number] if key in WORDS else number
