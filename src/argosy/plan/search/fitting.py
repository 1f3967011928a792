"""Plans that do not fit: by how much, and the nearest plan that fits."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.factors import OF_MEMORY, spread
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.search import SearchResult


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
