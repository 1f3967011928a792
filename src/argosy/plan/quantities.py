"""A plan's arithmetic: ratios and divisors, and the quantities that follow from its keys.

These are written with +, *, // and comparisons, and no `if`, so that they serve one plan (`plan.plan`) and columns of
plans (`plan.layouts`) alike; and columns of jobs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, Generic, TypeVar

RATIO = re.compile(r"([1-9][0-9]*(:[1-9][0-9]*)*)?")
"""The form of a ratio; it may be empty."""


def checked(text: str) -> str:
    """Return `text` if it is a ratio. Raises: ValueError."""
    if not RATIO.fullmatch(text):
        raise ValueError("must be whole numbers from 1 on, joined by colons, such as 3:1")
    return text


@lru_cache(1024)
def numbers_of(ratio: str) -> tuple[int, ...]:
    """Return the numbers of a ratio such as 3:1; none if it is empty."""
    return tuple(map(int, ratio.split(":"))) if ratio else ()


def lowest(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return these numbers in lowest terms: 6 and 2 are as 3 and 1."""
    common = math.gcd(*numbers)
    return tuple(number // common for number in numbers)


def ratio_of(numbers: tuple[int, ...]) -> str:
    """Return the numbers of some holders as a ratio in lowest terms, with one for each block of holders that are alike.

    Blocks have one size: those of 6, 6, 2, 2 are 3:1. Empty if all are alike.
    """
    if len(set(numbers)) < 2:
        return ""
    blocks = (size for size in range(len(numbers), 0, -1) if len(numbers) % size == 0)
    block = next(b for b in blocks if all(len(set(numbers[i : i + b])) == 1 for i in range(0, len(numbers), b)))
    return ":".join(map(str, lowest(numbers[::block])))


@cache
def divisors(number: int) -> list[int]:
    """Return all divisors, sorted."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def factorizations(number: int, factors: int) -> list[tuple[int, ...]]:
    """Return all ways to write `number` as a product of that many factors, in order."""
    if factors == 1:
        return [(number,)]
    return [(first, *rest) for first in divisors(number) for rest in factorizations(number // first, factors - 1)]


def neighbours(size: int, good: list[int]) -> list[int]:
    """Return the sorted `good` sizes next to `size`: the largest up to it, and the smallest from it on."""
    below, above = [n for n in good if n <= size], [n for n in good if n >= size]
    return sorted({*below[-1:], *above[:1]})


def around(size: int, good: list[int]) -> str:
    """Return the neighbours of a size, as a message names them."""
    return " or ".join(map(str, neighbours(size, good)))


NumberT = TypeVar("NumberT")
"""int of a `Plan`, an array of `Layouts`."""


class Quantities(Generic[NumberT]):
    """Quantities of a plan, or of each of many. `numbers` and `fixed_stages` are what differs between these two."""

    @property
    def dp(self: Any) -> NumberT:
        """Data-parallel ranks; each reads other samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self: Any) -> NumberT:
        """Processes that the plan needs."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages_here(self: Any) -> NumberT:
        """Pipeline stages on each rank; 1 without a pipeline."""
        fixed = self.fixed_stages
        return 1 + (self.pp > 1) * (fixed + (fixed == 0) * self.stages_per_rank - 1)

    @property
    def stages(self: Any) -> NumberT:
        return self.pp * self.stages_here

    @property
    def shares_state(self: Any) -> NumberT:
        """Ranks that share one copy of the state (the n of ZeRO); 1 for stage 0."""
        return 1 + (self.zero > 0) * (self.dp_shard * self.cp - 1)

    @property
    def replicas(self: Any) -> NumberT:
        """Replicas of the state: with stage 0 all ranks that share a model otherwise."""
        return self.dp * self.cp // self.shares_state

    @property
    def shares_experts(self: Any) -> NumberT:
        """Ranks that share one copy of the state of experts, each of which `ep` of the ranks do not have."""
        return 1 + (self.zero > 0) * (self.dp_shard * self.cp // self.ep - 1)

    @property
    def expert_replicas(self: Any) -> NumberT:
        """Replicas of the state of experts."""
        return self.dp * self.cp // self.ep // self.shares_experts

    @property
    def shards_parameters(self: Any) -> Any:
        """True if FSDP2 splits the parameters; a rank alone has nothing to share."""
        return (self.zero == 3) & (self.dp_shard * self.cp > 1)

    @property
    def has_own_gradients(self: Any) -> Any:
        """True if each data-parallel rank has the whole gradient of its own samples before any sum."""
        return (self.cp == 1) & (self.ep == 1) & (self.shards_parameters ^ True)

    @property
    def portions(self: Any) -> NumberT:
        """Equal portions that a batch is dealt out in; with `shares`, a data-parallel rank takes several."""
        found = self.dp
        for is_said, numbers in self.numbers("shares"):
            block = self.dp // len(numbers)
            found = found + is_said * (sum(lowest(numbers)) * (block + (block == 0)) - found)
        return found

    @property
    def most_portions(self: Any) -> NumberT:
        """Portions of the data-parallel rank that takes most."""
        found = self.dp // self.dp
        for is_said, numbers in self.numbers("shares"):
            found = found + is_said * (max(lowest(numbers)) - 1)
        return found

    def microbatches(self: Any, global_batch: int) -> NumberT:
        """Return the microbatches that a data-parallel rank runs in a step; with `shares`, the rank that runs most."""
        return global_batch // (self.portions * self.microbatch) * self.most_portions


ItemT = TypeVar("ItemT")


def evenly(items: Sequence[ItemT], most: int) -> list[ItemT]:
    """Return at most so many, evenly from the first to the last."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


StackT = TypeVar("StackT")


def stack(jobs: list[StackT]) -> StackT:
    """Return the jobs as one, each field an array with an element for each job; None where none has it."""
    import numpy as np

    def together(values: list[Any]) -> Any:
        if all(value is None for value in values):
            return None
        if isinstance(values[0], tuple):  # of groups, those that a job lacks have a share of nothing
            groups = max(values, key=len)
            rows = [[*value, *((1.0, *[0.0] * (len(group) - 1)) for group in groups[len(value) :])] for value in values]
            return tuple(tuple(column) for column in np.array(rows, float).transpose(1, 2, 0)) if groups else ()
        return np.array(values, float)

    kind = type(jobs[0])
    return kind(**{f.name: together([getattr(job, f.name) for job in jobs]) for f in fields(kind)})  # type: ignore[arg-type]
