"""Fitting the cost model's constants to measured steps: the most probable ones, given what was assumed beforehand.

Each constant's logarithm is normal around its guess; a measurement's is normal around the prediction, with outliers
(Student's t), plus offsets that it shares with others: all of one source (the software, the cluster, the way of
counting), all of one model.
Levenberg-Marquardt (Marquardt 1963) on reweighted residuals finds the maximum.
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
"""Of the logarithm of a measurement around its source's mean: what no model of this kind will know."""
SHARED_STD = 0.12
"""Of an offset."""
OUTLIER_FREEDOM = 4
"""Degrees of freedom of the t distribution."""
STEPS, STEP_DIFFERENCE = 40, 1e-4


@dataclass(frozen=True)
class ConstantsFit:
    """What was found."""

    constants: Constants
    offsets: dict[str, float]
    """What is shared -> logarithm of measured over predicted, shrunk towards 0."""
    covariance: Floats
    """Of the logarithms of the constants that were fitted, and of the offsets."""


def fit_constants(
    predict: Callable[[Constants], Floats],
    measured: Floats,
    shared: Sequence[tuple[str, ...]],
    start: Constants | None = None,
    free: Sequence[str] | None = None,
    spread: float | None = None,
    begin: Constants | None = None,
) -> ConstantsFit:
    """The constants with which `predict` is nearest to `measured`.

    predict: constants -> one positive figure for each of `measured`; shared: what each has in common with others, such
    as its source and its model; start: what is assumed beforehand (default: the guesses); free: the constants that may
    move (default all); spread: how far they may well be off, a factor (default: as declared for each); begin: where to
    look first (default: start).
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
