"""The choice among the plans that a search finds: the plainest of those about as fast as the fastest.

Plans that do not fit: by how much, and the nearest plan that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from argosy.errors import UserError
from argosy.plan.cost.breakdown import OF_MEMORY, spread
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import GIB, Estimate
from argosy.plan.layouts import WORDS, Ints, Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.search import SearchResult, search
from argosy.plan.search.space import Pins


@dataclass(frozen=True)
class MemoryMisfit:
    """The shortfall of memory of a plan that does not fit."""

    needs_bytes: float
    has_bytes: float
    """Most memory that it may need, to fit nine times of ten."""
    largest: str
    """The largest category."""
    largest_bytes: float

    @property
    def excess_bytes(self) -> float:
        """Bytes too many."""
        return self.needs_bytes - self.has_bytes


def misfit(costs: CostModel, plan: Plan) -> MemoryMisfit | None:
    """Return by how much `plan` does not fit; None if it fits."""
    by_category = costs.predict_memory(Layouts.of([plan])).by_category(0)
    needs = sum(by_category.values())
    if needs <= costs.memory_bytes:
        return None
    largest = max(by_category, key=lambda name: by_category[name])
    return MemoryMisfit(needs, costs.memory_bytes, largest, by_category[largest])


def nearest_that_fits(plan: Plan, found: SearchResult) -> int | None:
    """Return the row of `found` that is most like `plan`, the fastest if several are; None if `found` is empty.

    Each doubling of an axis or of the microbatch counts 1, any other key that differs 1/2.
    """
    if not len(found):
        return None
    wanted, plans = Layouts.of([plan]), found.plans
    sizes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "microbatch")
    doublings = sum(np.abs(np.log2(getattr(plans, key) / getattr(wanted, key))) for key in sizes)
    others = [f.name for f in fields(plans) if f.name not in sizes]
    differ = sum((getattr(plans, key) != getattr(wanted, key)) * 0.5 for key in others)
    return int(np.lexsort((found.step_s, np.round(doublings + differ, 6)))[0])


def least_memory_bytes(costs: CostModel, plan: Plan) -> tuple[float, float]:
    """Return the least bytes that a rank of `plan` needs of its device, and of the host for what it keeps there.

    Nine times of ten it needs more.
    """
    on_device = _memory(costs, plan)
    whole = _memory(costs, plan.model_copy(update={"offload": "none"}))
    low = float(on_device.low)
    return low, max(0.0, float(whole.mid) - float(on_device.mid)) * low / float(on_device.mid)


def _memory(costs: CostModel, plan: Plan) -> Estimate:
    parts = costs.predict_memory(Layouts.of([plan])).by_category(0)
    return Estimate.log_normal(sum(parts.values()), spread(parts, OF_MEMORY, costs.factors, costs.memory_std))


def with_memory(costs: CostModel, memory_bytes: float) -> CostModel:
    """Return the cost model of devices with so much memory."""
    return replace(costs, rates=replace(costs.rates, memory_bytes=memory_bytes))


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
