"""Uneven shares: which rows of a batch are whose, where data-parallel ranks take unlike numbers of microbatches.

A batch is cut into equal portions, as many as the shares add up to, and each rank takes the next of them. So which
samples are in a step does not depend on the shares, and neither does their order.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argosy.plan.plan import Plan

RATIO = r"^([1-9]\d*(:[1-9]\d*)*)?$"
"""The form of a ratio; it may be empty."""


@lru_cache(1024)
def numbers_of(ratio: str) -> tuple[int, ...]:
    """Return the numbers of a ratio such as 3:1; none if it is empty."""
    return tuple(map(int, ratio.split(":"))) if ratio else ()


def lowest(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return these numbers in lowest terms: 6 and 2 are as 3 and 1."""
    common = math.gcd(*numbers)
    return tuple(number // common for number in numbers)


def ratio_of(numbers: tuple[int, ...]) -> str:
    """Return these numbers as a ratio in lowest terms; empty if all are alike."""
    return ":".join(map(str, lowest(numbers))) if len(set(numbers)) > 1 else ""


def shares_of_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the portions of a batch that each data-parallel rank takes."""
    numbers = lowest(numbers_of(plan.shares)) or (1,)
    return tuple(number for number in numbers for _ in range(plan.dp // len(numbers)))


def rows_of(plan: Plan, rank: int, batch: int) -> slice:
    """Return the rows of a batch of so many that data-parallel rank `rank` trains on."""
    shares = shares_of_ranks(plan)
    portion = batch // plan.portions
    first = sum(shares[:rank]) * portion
    return slice(first, first + shares[rank] * portion)


def microbatches_of(plan: Plan, rank: int, batch: int) -> int:
    """Return how many microbatches of a batch of so many rows data-parallel rank `rank` runs."""
    rows = rows_of(plan, rank, batch)
    return (rows.stop - rows.start) // plan.microbatch
