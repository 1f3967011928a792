"""Fit the cost model's constants to measured steps: the most probable ones, given what was assumed beforehand.

The logarithm of each constant is normal around its guess. That of a measurement is normal around the prediction, with
outliers (Student's t), plus offsets that it shares with others: those of one source (the software, the cluster, the way
of counting) and those of one model. Levenberg-Marquardt (Marquardt 1963) on reweighted residuals finds the maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.constants import Constants

Floats = NDArray[Any]

ROW_STD = 0.08
"""Standard deviation of the logarithm of a measurement around its source's mean: no model of this kind will know it."""
SHARED_STD = 0.12
"""Standard deviation of a shared offset."""
OUTLIER_FREEDOM = 4
"""Degrees of freedom of the t distribution."""
STEPS, STEP_DIFFERENCE = 40, 1e-4


@dataclass(frozen=True)
class ConstantsFit:
    """The constants of a fit."""

    constants: Constants
    offsets: dict[str, float]
    """Shared key -> logarithm of measured over predicted, shrunk towards 0."""
    covariance: Floats
    """Covariance of the logarithms of the fitted constants, and of the offsets."""


def fit_constants(
    predict: Callable[[Constants], Floats],
    measured: Floats,
    shared: Sequence[tuple[str, ...]],
    start: Constants | None = None,
    free: Sequence[str] | None = None,
    spread: float | None = None,
    begin: Constants | None = None,
) -> ConstantsFit:
    """Return the constants with which `predict` is nearest to `measured`.

    predict: constants -> one positive figure for each of `measured`; shared: the keys that each measurement shares with
    others, such as its source and its model; start: constants assumed beforehand (default: the guesses); free:
    constants that may move (default: all); spread: the factor by which they may be off (default: as declared for each);
    begin: where the search begins (default: start).
    """
    declared = {f.name: f.metadata for f in fields(Constants)}
    start = start or Constants()
    names = list(free or declared)
    center = np.log([getattr(start, name) for name in names])
    width = np.log([spread or declared[name]["spread"] for name in names])
    kinds = sorted({key for keys in shared for key in keys})
    member = np.array([[float(kind in keys) for kind in kinds] for keys in shared])
    logs = np.log(measured)

    def residuals(point: Floats) -> Floats:
        constants = replace(start, **dict(zip(names, np.exp(point[: len(names)]), strict=True)))
        return (np.log(predict(constants)) + member @ point[len(names) :] - logs) / ROW_STD

    scale = np.concatenate([width, np.full(len(kinds), SHARED_STD)])
    origin = np.concatenate([center, np.zeros(len(kinds))])
    point, damping = origin.copy(), 1e-2
    if begin is not None:
        point[: len(names)] = np.log([getattr(begin, name) for name in names])
    miss = residuals(point)
    best = _cost(miss, (point - origin) / scale)
    for _ in range(STEPS):
        slopes = _slopes(residuals, point, miss, len(names), member)
        weights = (OUTLIER_FREEDOM + 1) / (OUTLIER_FREEDOM + miss**2)
        curvature = slopes.T * weights @ slopes + np.diag(scale**-2)
        gradient = slopes.T @ (weights * miss) + (point - origin) / scale**2
        while damping < 1e6:
            trial = point - np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            missed = residuals(trial)
            cost = _cost(missed, (trial - origin) / scale)
            if cost < best:
                break
            damping *= 4
        else:
            break
        gained, point, miss, best, damping = best - cost, trial, missed, cost, damping / 4
        if gained < 1e-3:
            break
    constants = replace(start, **dict(zip(names, np.exp(point[: len(names)]).tolist(), strict=True)))
    offsets = dict(zip(kinds, point[len(names) :].tolist(), strict=True))
    return ConstantsFit(constants, offsets, np.linalg.inv(curvature))


def _cost(miss: Floats, moved: Floats) -> float:
    tail = (OUTLIER_FREEDOM + 1) * np.log1p(miss**2 / OUTLIER_FREEDOM)
    return float(tail.sum() + (moved**2).sum()) / 2


def _slopes(
    residuals: Callable[[Floats], Floats],
    point: Floats,
    miss: Floats,
    constants: int,
    member: Floats,
) -> Floats:
    columns = []
    for index in range(constants):
        moved = point.copy()
        moved[index] += STEP_DIFFERENCE
        columns.append((residuals(moved) - miss) / STEP_DIFFERENCE)
    return np.column_stack([*columns, member / ROW_STD])
