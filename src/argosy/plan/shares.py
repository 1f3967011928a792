"""Uneven shares: which rows of a batch are whose, where data-parallel ranks take unlike numbers of microbatches.

A batch is cut into equal portions, as many as the shares add up to, and each rank takes the next of them. So which
samples are in a step does not depend on the shares, and neither does their order.
"""

from __future__ import annotations

from argosy.plan.plan import Plan
from argosy.plan.ratio import lowest, numbers_of


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


def holders_of(plan: Plan) -> int:
    """Return how many may have shares of their own: replicas, or the data-parallel ranks of the only one."""
    if plan.dp_replicate > 1:
        return plan.dp_replicate
    return 1 if plan.shards_parameters or plan.ep > 1 else plan.dp
