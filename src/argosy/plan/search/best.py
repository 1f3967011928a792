"""The choice among the plans that a search finds: the plainest of those about as fast as the fastest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.formatting import GIB
from argosy.plan.layouts import WORDS, Ints, Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.fitting import misfit
from argosy.plan.search.search import SearchResult, search
from argosy.plan.search.space import Pins

AS_FAST = 0.03
"""Predictions cannot tell plans apart if their steps differ by less (the regret of `benchmarks/planner`)."""
OFFLOADS = tuple(word for word in WORDS["offload"] if word != "none")


def search_to_run(costs: CostModel, pins: Pins, counts: Sequence[int] | None = None) -> SearchResult:
    """Search; if nothing fits an accelerator and `pins` allow it, search again with state in host memory.

    Raises: UserError if no plan is legal.
    """
    found = search(costs, pins, counts)
    if len(found) or "offload" in pins or costs.rates.host_waits:  # the host is the device
        return found
    offloaded = search(costs, {**pins, "offload": OFFLOADS}, counts)
    return offloaded if len(offloaded) else found


def plainest(found: SearchResult) -> int:
    """Return the row of the plan with fewest `features` of those about as fast as the fastest; of these, the fastest.

    `found` must not be empty.
    """
    near = np.flatnonzero(found.step_s <= (1 + AS_FAST) * found.step_s.min())
    order = np.lexsort((found.memory_bytes[near], found.step_s[near], features(found.plans[near])))
    return int(near[order[0]])


def best_to_run(costs: CostModel, pins: Pins) -> tuple[Plan, float] | None:
    """Return the plainest of the plans about as fast as the fastest, and the seconds of its step; None if none is legal
    or fits."""
    try:
        found = search_to_run(costs, pins)
    except UserError:
        return None
    if not len(found):
        return None
    row = plainest(found)
    return found.plans.plan(row), float(found.step_s[row])


def features(plans: Layouts) -> Ints:
    """Return how much each plan uses beside plain data parallelism: each feature makes a run harder to understand."""
    plain_schedule = plans.is_("schedule", "1f1b")
    shared = np.where(plans.dp_shard * plans.cp > 1, np.where(plans.zero == 3, 2, plans.zero > 0), 0)
    used = (
        (plans.pp > 1) * (2 - plain_schedule),
        plans.tp > 1,
        plans.cp > 1,
        plans.ep > 1,
        shared,
        (plans.recompute > 0) * (1 + (plans.recompute_every > 1)),
        ~plans.is_("offload", "none"),
        plans.sum_inside > 1,
        plans.sum_between > 1,
    )
    return np.sum([column.astype(np.int64) for column in used], axis=0)


def why_nothing_fits(costs: CostModel, found: SearchResult) -> str:
    """Explain by how much the leanest plan is too large; `found` is empty."""
    missing = misfit(costs, found.leanest)
    assert missing is not None  # or it would have been found
    return (
        f'nothing fits: the leanest plan, "{found.leanest}", needs {missing.needs_bytes / GIB:.1f} GiB of each device, '
        f"which may need {missing.has_bytes / GIB:.1f} GiB; {missing.largest} takes "
        f"{missing.largest_bytes / GIB:.1f} GiB."
    )
