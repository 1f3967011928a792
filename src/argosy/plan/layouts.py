"""Many plans at once, as arrays: the cost model computes 100,000s of plans in a second with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from argosy.plan.pipeline import SCHEDULES, Schedule
from argosy.plan.plan import Plan
from argosy.plan.quantities import Quantities, numbers_of

Ints = NDArray[np.int64]
Texts = NDArray[np.object_]

PLAN_WORDS: dict[str, tuple[Any, ...]] = {
    key: words
    for key, field in Plan.model_fields.items()
    if (words := (False, True) if field.annotation is bool else get_args(field.annotation))
}
"""Keys of a plan whose values are words; in arrays, each word is its place in this list."""
SCHEDULE_NAMES: tuple[Schedule, ...] = PLAN_WORDS["schedule"]
RATIOS = tuple(key for key, field in Plan.model_fields.items() if field.annotation is str)
"""Keys of a plan whose values are ratios; in arrays, these are texts."""


@dataclass(frozen=True)
class Layouts(Quantities[Ints]):
    """Plans as columns, all of one length or of length 1. `Plan` has the same keys, and says what each means."""

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    async_tp: Ints
    ep: Ints
    overlap_experts: Ints
    zero: Ints
    user_buffers: Ints
    fp8_gather: Ints
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
    shares: Texts = field(default_factory=lambda: np.array([""], object))
    layers: Texts = field(default_factory=lambda: np.array([""], object))

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Layouts:
        rows = [plan.model_dump() for plan in plans]
        return cls(**{f.name: column_of(f.name, [row[f.name] for row in rows]) for f in fields(cls)})

    def __len__(self) -> int:
        return max(len(getattr(self, f.name)) for f in fields(self))

    def __getitem__(self, chosen: NDArray[Any] | slice) -> Layouts:
        """Return the rows that a mask, an array of numbers or a slice chooses. A column of length 1 stays as short."""
        columns, n = {f.name: getattr(self, f.name) for f in fields(self)}, len(self)
        rows = {name: column[chosen] for name, column in columns.items() if len(column) == n}
        some = slice(None if len(next(iter(rows.values()))) else 0)
        return Layouts(**{name: rows[name] if name in rows else column[some] for name, column in columns.items()})

    def plan(self, row: int) -> Plan:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return Plan(**{key: _value(key, column[row if len(column) > 1 else 0]) for key, column in columns.items()})

    @property
    def fixed_stages(self) -> Ints:
        """Stages on each rank that the schedule demands; 0: as many as the plan says."""
        return np.array([SCHEDULES[name].stages_per_rank or 0 for name in SCHEDULE_NAMES])[self.schedule]

    def numbers(self, key: str) -> list[tuple[NDArray[np.bool_], tuple[int, ...]]]:
        """Return each ratio that occurs in the column `key`, with a mask of its plans."""
        column = getattr(self, key)
        return [(column == text, numbers_of(text)) for text in set(column.tolist()) if text]

    @property
    def most_layers(self) -> Ints:
        """Layers of the pipeline rank that has most, where `layers` says which stage has which; else 0."""
        found = np.zeros(len(self) if self.numbers("layers") else 1, np.int64)
        for is_said, _ in self.numbers("layers"):
            for row in np.flatnonzero(np.broadcast_to(is_said, len(found))):
                found[row] = max(self.plan(int(row)).layers_of_ranks, default=0)
        return found

    def is_(self, key: str, *words: object) -> NDArray[np.bool_]:
        """Return True where the column `key` is one of these words."""
        column = getattr(self, key)
        return reduce(np.logical_or, [column == PLAN_WORDS[key].index(word) for word in words])


assert {f.name for f in fields(Layouts)} == set(Plan.model_fields)  # typed again for type checkers alone


def column_of(key: str, values: Sequence[Any]) -> NDArray[Any]:
    if key in RATIOS:
        return np.array(values, object)
    return np.array([PLAN_WORDS[key].index(value) if key in PLAN_WORDS else int(value) for value in values], np.int64)


def _value(key: str, entry: Any) -> object:
    if key in RATIOS:
        return entry
    return PLAN_WORDS[key][int(entry)] if key in PLAN_WORDS else int(entry)
