"""Fit the cost model's constants to measured steps: the most probable ones, given what was assumed beforehand.

The logarithm of each constant is normal around its guess. That of a measurement is normal around the prediction, with
outliers (Student's t), plus offsets that it shares with others: those of one source (the software, the cluster, the way
of counting) and those of one model. SciPy's least squares finds the maximum, by Levenberg-Marquardt's steps in a trust
region (Branch, Coleman & Li 1999).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from argosy.plan.cost.constants import Constants

Floats = NDArray[Any]

ROW_STD = 0.08
"""Standard deviation of the logarithm of a measurement around its source's mean: no model of this kind will know it."""
SHARED_STD = 0.12
"""Standard deviation of a shared offset."""
OUTLIER_FREEDOM = 4
"""Degrees of freedom of the t distribution."""
STEP_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class ConstantsFit:
    """The constants of a fit."""

    constants: Constants
    offsets: dict[str, float]
    """Shared key -> logarithm of measured over predicted, shrunk towards 0."""


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
    kinds = sorted({key for keys in shared for key in keys})
    member = np.array([[float(kind in keys) for kind in kinds] for keys in shared])
    width = np.log([spread or declared[name]["spread"] for name in names])
    scale = np.concatenate([width, np.full(len(kinds), SHARED_STD)])
    origin = np.concatenate([_logs(start, names), np.zeros(len(kinds))])
    logs = np.log(measured)

    def constants_at(point: Floats) -> Constants:
        return replace(start, **dict(zip(names, np.exp(point[: len(names)]).tolist(), strict=True)))

    def residuals(point: Floats) -> Floats:
        missed = (np.log(predict(constants_at(point))) + member @ point[len(names) :] - logs) / ROW_STD
        return np.concatenate([missed, (point - origin) / scale])

    def slopes(point: Floats) -> Floats:
        here, steps = residuals(point), STEP_DIFFERENCE * np.eye(len(point))[: len(names)]
        of_constants = [(residuals(point + step) - here) / STEP_DIFFERENCE for step in steps]
        of_offsets = np.vstack([member / ROW_STD, np.diag(1 / scale)[:, len(names) :]])
        return np.column_stack([*of_constants, of_offsets])

    def loss(squares: Floats) -> Floats:
        """Student's t of the measurements, squares of what was assumed: values, first and second derivatives."""
        rows, freedom = squares[: len(logs)], OUTLIER_FREEDOM
        found = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        found[0, : len(logs)] = (freedom + 1) * np.log1p(rows / freedom)
        found[1, : len(logs)] = (freedom + 1) / (freedom + rows)
        found[2, : len(logs)] = -(freedom + 1) / (freedom + rows) ** 2
        return found

    first = np.concatenate([_logs(begin or start, names), np.zeros(len(kinds))])
    found = least_squares(residuals, first, slopes, loss=loss, x_scale=scale, ftol=1e-6).x
    return ConstantsFit(constants_at(found), dict(zip(kinds, found[len(names) :].tolist(), strict=True)))


def _logs(constants: Constants, names: Sequence[str]) -> Floats:
    return np.log([getattr(constants, name) for name in names])
