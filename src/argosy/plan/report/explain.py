"""The reasons of a plan's time and memory: the categories, the rate that binds it, the changes that would help."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from argosy.plan.cost.constants import Constants
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.rates import Rates
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.search import MORE, SearchResult

MEANING = {
    "ideal": "model FLOPs at the data sheet's rate",
    "matmul": "matmuls slower than that: rates never reached, shapes, conversions",
    "attention": "attention slower than that",
    "pointwise": "norms, activations, residuals: as fast as memory",
    "host": "kernels too small for the host to keep up",
    "recompute": "activations computed again in backward",
    "offload": "waiting for activations that go to the host's memory and back",
    "tensor": "waiting for tensor-parallel ranks",
    "context": "waiting for context-parallel ranks",
    "experts": "waiting for tokens sent to experts, and for the busiest expert",
    "pipeline": "waiting for sends between stages",
    "bubble": "idle pipeline stages, and stages shorter than the longest",
    "gradients": "waiting for data-parallel ranks: sums of gradients, gathered parameters",
    "optimizer": "the update",
    "other": "fixed costs of a step, and stragglers",
    "sites": "waiting for the other sites",
    "failures": "checkpoints, restarts, work done twice",
}
"""Category of a step -> its meaning."""

MEMORY_MEANING = {
    "weights": "parameters",
    "gradients": "sums of gradients",
    "optimizer": "moments of the optimizer",
    "activations": "kept for backward",
    "logits": "logits, and what the loss keeps",
    "gathered": "parameters and gradients of the layers at work (ZeRO 3)",
    "agreement": "residuals of compressed sums, outer state of sites",
    "workspace": "kernels' and collectives' buffers",
    "reserve": "held unused by the allocator",
}
"""Category of memory -> its meaning."""


@dataclass(frozen=True)
class Sensitivity:
    """The effect of a little more of one thing on the same plan."""

    what: str
    change: float
    """Relative change of the step time."""
    note: str = ""


def sensitivities(costs: CostModel, plan: Plan, found: SearchResult | None = None) -> list[Sensitivity]:
    """Return the effect of a tenth more of each on the step, the most helpful first.

    found: the search in which the plan is the fastest; it tells what a tenth more memory would bring.
    """
    r, c = costs.rates, costs.constants
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
    now = _step_s(costs, plan)
    changes = [
        Sensitivity(what, _step_s(replace(costs, rates=rates, constants=constants), plan) / now - 1)
        for what, (rates, constants) in trials.items()
    ]
    if found is not None and math.isfinite(found.roomier_step_s):
        change = min(0.0, found.roomier_step_s / now - 1)
        changes.append(Sensitivity(f"{tenth} memory", change, "by another plan" if change else ""))
    return sorted(changes, key=lambda s: s.change)


def binding(changes: list[Sensitivity]) -> str:
    """Return what the step time depends on most: the thing of which a tenth more helps most."""
    return changes[0].what.split(" ", 2)[2]


def _step_s(costs: CostModel, plan: Plan) -> float:
    return float(np.asarray(costs.predict_time(Layouts.of([plan])).total)[0])
