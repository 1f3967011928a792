"""Why a plan takes the time and the memory that it takes: a waterfall, what binds it, what would make it faster.

Intervals are of 90 %: the logarithm of measured over predicted is normal, with the problem's standard deviations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from argosy.plan.cost.constants import Constants
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.memory_model import Footprint
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.step_time import StepTime
from argosy.plan.cost.workload import Numbers
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.search import MORE, Found, Problem, predict_memory, predict_time

INTERVAL_Z = 1.6449
"""Standard deviations from the middle to the ends of an interval of 90 %."""

MEANING = {
    "ideal": "model FLOPs at the data sheet's rate",
    "matmul": "matmuls slower than that: rates never reached, shapes, conversions",
    "attention": "attention slower than that",
    "pointwise": "norms, activations, residuals: as fast as memory is",
    "host": "kernels too small for the host to keep up",
    "recompute": "activations computed again in backward",
    "offload": "waiting for activations on their way to the host's memory and back",
    "tensor": "waiting for tensor-parallel ranks",
    "context": "waiting for context-parallel ranks",
    "experts": "waiting for tokens on their way to experts, and for the busiest of these",
    "pipeline": "waiting for sends between stages",
    "bubble": "pipeline stages with nothing to do, or shorter than the longest",
    "gradients": "waiting for data-parallel ranks: sums of gradients, gathered parameters",
    "optimizer": "the update",
    "other": "what every step costs besides, and stragglers",
    "sites": "waiting for the other sites",
    "failures": "checkpoints, restarts, work done twice",
}
"""Category of a step -> what it is."""

MEMORY_MEANING = {
    "weights": "parameters",
    "gradients": "their sums",
    "optimizer": "its moments",
    "activations": "kept for backward",
    "logits": "and what the loss keeps",
    "gathered": "parameters and gradients of the layers at work (ZeRO 3)",
    "workspace": "kernels' and collectives' buffers",
    "reserve": "held by the allocator without use",
}
"""Category of memory -> what it is."""


@dataclass(frozen=True)
class Sensitivity:
    """What one thing more would do to the same plan."""

    what: str
    change: float
    """Relative change of the step time."""
    note: str = ""


def interval(value: Numbers, std: float) -> Estimate:
    """The 90 % interval of a prediction whose logarithm is off by `std`."""
    return Estimate.within(value, math.exp(INTERVAL_Z * std))


def waterfall(time: StepTime, row: int) -> dict[str, float]:
    """Seconds of plan `row`'s step by category, from ideal to predicted."""
    return {f.name: float(getattr(time, f.name)[row]) for f in fields(time)}


def memory_of(memory: Footprint, row: int) -> dict[str, float]:
    """Bytes by category of plan `row`."""
    return {f.name: float(getattr(memory, f.name)[row]) for f in fields(memory)}


def sensitivities(problem: Problem, plan: Plan, found: Found | None = None) -> list[Sensitivity]:
    """What a tenth more of each would do to the step, the most helpful first.

    found: the search that the plan is the fastest of; it tells what a tenth more memory would bring.
    """
    r, c = problem.rates, problem.constants
    more = 1 + MORE
    tenth = f"+{MORE:.0%}".replace("%", " %")
    trials: dict[str, tuple[Rates, Constants]] = {
        f"{tenth} matmul rate": (replace(r, fp32=r.fp32 * more, half=r.half * more, narrow=r.narrow * more), c),
        f"{tenth} memory bandwidth": (replace(r, memory_bytes_per_s=r.memory_bytes_per_s * more), c),
        f"{tenth} link bandwidth in the node": (replace(r, link_bytes_per_s=r.link_bytes_per_s * more), c),
        f"{tenth} NIC bandwidth": (replace(r, nic_bytes_per_s=r.nic_bytes_per_s * more), c),
        f"{tenth} speed of the host": (r, replace(c, host=c.host / more)),
        f"-{MORE:.0%} latency of collectives".replace("%", " %"): (r, replace(c, latency=c.latency * (1 - MORE))),
    }
    now = _step_s(problem, plan)
    changes = [
        Sensitivity(what, _step_s(replace(problem, rates=rates, constants=constants), plan) / now - 1)
        for what, (rates, constants) in trials.items()
    ]
    if found is not None and math.isfinite(found.roomier_step_s):
        change = min(0.0, found.roomier_step_s / now - 1)
        changes.append(Sensitivity(f"{tenth} memory", change, "by another plan" if change else ""))
    return sorted(changes, key=lambda s: s.change)


def binding(changes: list[Sensitivity]) -> str:
    """What the step time depends on most: the thing of which a tenth more helps most."""
    return changes[0].what.split(" ", 2)[2]


def _step_s(problem: Problem, plan: Plan) -> float:
    return float(np.asarray(predict_time(problem, Layouts.of([plan])).step)[0])


@dataclass(frozen=True)
class Misfit:
    """Why a plan does not fit."""

    needs_bytes: float
    has_bytes: float
    """What it may need, to fit nine times of ten."""
    largest: str
    """The category that takes most."""
    largest_bytes: float

    @property
    def excess_bytes(self) -> float:
        """Too much by so many."""
        return self.needs_bytes - self.has_bytes


def misfit(problem: Problem, plan: Plan) -> Misfit | None:
    """By how much `plan` does not fit; None if it does."""
    by_category = memory_of(predict_memory(problem, Layouts.of([plan])), 0)
    needs = sum(by_category.values())
    if needs <= problem.memory_bytes:
        return None
    largest = max(by_category, key=lambda name: by_category[name])
    return Misfit(needs, problem.memory_bytes, largest, by_category[largest])


def nearest(plan: Plan, found: Found) -> int | None:
    """The row of `found` that is most like `plan`, of those alike the fastest; None if it found nothing.

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
