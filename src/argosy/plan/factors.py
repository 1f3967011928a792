"""Calibration factors: how much longer than predicted each part of a step takes on a cluster, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TypeVar

from argosy.plan.clusters import Category, Factor
from argosy.plan.footprint import Footprint
from argosy.plan.step_time import StepTime

Factors = Mapping[Category, Factor]
CostT = TypeVar("CostT", StepTime, Footprint)

PARTS: dict[Category, tuple[str, ...]] = {
    "compute": ("ideal", "matmul", "attention", "pointwise", "host", "recompute", "bubble"),
    "network": ("tensor", "context", "experts", "pipeline", "gradients"),
    "optimizer": ("optimizer",),
    "rest": ("other",),
    "memory": ("activations", "logits", "gathered", "workspace", "reserve"),
}
"""Factor -> the predicted categories that it multiplies. Weights, gradients and optimizer state are known exactly."""
RUN_STD = 0.05
"""Of the logarithm of measured over predicted, from run to run and plan to plan on one machine."""


def calibrated(cost: CostT, factors: Factors) -> CostT:
    """The prediction times the factors."""
    known = {f.name for f in fields(cost)}
    scaled = {
        name: getattr(cost, name) * factor.value
        for category, factor in factors.items()
        for name in PARTS[category]
        if name in known
    }
    return replace(cost, **scaled)


def spread(parts: Mapping[str, float], factors: Factors, std: float) -> float:
    """Standard deviation of the logarithm of a total's error, `parts` being what the total is made of.

    std: that of a prediction for a cluster without factors. A part with a factor errs as the factor does, and all parts
    in the same direction; each run differs a little from the next.
    """
    unknown = math.sqrt(max(0.0, std**2 - RUN_STD**2))
    of_part = {part: category for category, names in PARTS.items() for part in names}
    known = {part: _std(factors[of_part[part]]) for part in parts if of_part.get(part) in factors}
    if known:  # what has no category is exact, so that the rest explains all of the error
        known |= {part: 0.0 for part in parts if part not in of_part}
    errors = sum(value * known.get(part, unknown) for part, value in parts.items())
    return math.hypot(RUN_STD, errors / sum(parts.values()))


def _std(factor: Factor) -> float:
    """Of its logarithm."""
    return factor.std / factor.value
