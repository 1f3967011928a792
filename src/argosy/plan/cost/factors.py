"""Calibration factors: how much longer than predicted each part of a step takes on a cluster, with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from argosy.plan.cost.memory_model import Footprint
from argosy.plan.cost.step_time import StepTime
from argosy.plan.hardware.clusters import Category, Factor

Factors = Mapping[Category, Factor]
CostT = TypeVar("CostT", StepTime, Footprint)

Parts = Mapping[Category, tuple[str, ...]]

OF_TIME: Parts = {
    "compute": ("ideal", "matmul", "attention", "pointwise", "host", "recompute", "offload", "bubble"),
    "network": ("tensor", "context", "experts", "pipeline", "gradients"),
    "optimizer": ("optimizer",),
    "rest": ("other",),
}
"""Factor -> the categories of a step's time that it multiplies."""
OF_MEMORY: Parts = {"memory": ("activations", "logits", "gathered", "agreement", "workspace", "reserve")}
"""Factor -> the categories of memory that it multiplies; weights, gradients and optimizer state are known exactly."""
RUN_STD = 0.05
"""Standard deviation of the logarithm of measured over predicted, from run to run and plan to plan on one machine."""


def calibrated(cost: CostT, factors: Factors) -> CostT:
    """Return the prediction multiplied by the factors."""
    parts = OF_TIME if isinstance(cost, StepTime) else OF_MEMORY
    scaled = {
        name: getattr(cost, name) * factor.value
        for category, factor in factors.items()
        for name in parts.get(category, ())
    }
    return replace(cost, **scaled)


def slowed(factors: Factors, times: float, *categories: Category) -> dict[Category, Factor]:
    """Return the factors of a cluster where these parts of a step take `times` times as long."""
    unknown = Factor(value=1.0, std=0.0)
    before = {category: factors.get(category, unknown) for category in categories}
    return {**factors, **{c: f.model_copy(update={"value": f.value * times}) for c, f in before.items()}}


def spread(costs: Mapping[str, float], parts: Parts, factors: Factors, std: float) -> float:
    """Return the standard deviation of the logarithm of a total's error; `costs` are its parts, by category.

    std: the standard deviation of a prediction without factors. A part with a factor errs as the factor does, and all
    such parts in the same direction; each run differs a little from the next.
    """
    unknown = math.sqrt(max(0.0, std**2 - RUN_STD**2))
    of_part = {part: category for category, names in parts.items() for part in names}
    known = {part: _std(factors[of_part[part]]) for part in costs if of_part.get(part) in factors}
    if known:  # parts without a category are exact, so that the others explain all of the error
        known |= {part: 0.0 for part in costs if part not in of_part}
    errors = sum(value * known.get(part, unknown) for part, value in costs.items())
    return math.hypot(RUN_STD, errors / sum(costs.values()))


def _std(factor: Factor) -> float:
    """Return the standard deviation of the factor's logarithm."""
    return factor.std / factor.value
