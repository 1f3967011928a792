"""Learn an engine's constants on one's own devices from a few measurements of serving.

Before any row is seen, the logarithm of each of `SHIFTED` is normal around the population's constant. That of a
measurement is normal around the prediction, with heavy tails (Student's t). Gauss-Newton finds the most probable shifts;
few rows move them less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.serving_constants import ServingConstants

Floats = NDArray[np.float64]

SHIFTED = {
    "compute": 0.4, "overhead": 0.5, "bandwidth": 0.1, "cache": 0.4, "matmul": 0.4, "half_tokens": 0.5,
    "experts": 0.4, "attention": 0.4, "link": 0.3, "sum_s": 0.4, "sequence_s": 0.7, "request_s": 0.7, "arrival_s": 0.7, "burst": 0.7,
}  # fmt: skip
"""Constants that an engine on a device may have of its own, and the standard deviations of their logarithms."""
ROW_STD, FREEDOM = 0.05, 4
"""Standard deviation of a measurement around a calibrated prediction, and degrees of freedom of the t distribution."""
ROUNDS, DIFFERENCE, LONGEST_MOVE = 12, 1e-4, 0.7


def learn_serving(
    predict: Callable[[ServingConstants], Floats], measured: Floats, start: ServingConstants
) -> Mapping[str, float]:
    """Return the factor on each constant of `SHIFTED` with which predictions are nearest to the measurements.

    predict: constants -> a positive figure for each of `measured`; start: the population's, or the engine's.
    """
    names, std = tuple(SHIFTED), np.array(list(SHIFTED.values()))
    logs, wanted = np.zeros(len(names)), np.log(measured)
    for _ in range(ROUNDS):
        constants = shifted(start, dict(zip(names, np.exp(logs).tolist(), strict=True)))
        base = np.log(predict(constants))
        slopes = np.column_stack(
            [(np.log(predict(shifted(constants, {name: np.exp(DIFFERENCE)}))) - base) / DIFFERENCE for name in names]
        )
        miss = wanted - base
        weight = (FREEDOM + 1) / (FREEDOM + (miss / ROW_STD) ** 2) / ROW_STD**2
        curvature = slopes.T * weight @ slopes + np.diag(std**-2)
        move = np.linalg.solve(curvature, slopes.T @ (weight * miss) - logs / std**2)
        logs = logs + np.clip(move, -LONGEST_MOVE, LONGEST_MOVE)
        if np.abs(move).max() < 1e-3:
            break
    return dict(zip(names, np.exp(logs).tolist(), strict=True))


def shifted(constants: ServingConstants, factors: Mapping[str, float]) -> ServingConstants:
    """Return the constants, some of them multiplied by factors."""
    return replace(constants, **{name: getattr(constants, name) * factor for name, factor in factors.items()})
