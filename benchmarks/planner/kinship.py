"""The errors of some rows predicted from those of others: rows that have something in common err alike.

The logarithm of measured over predicted is taken to be a sum of independent normal effects, each shared by all rows of
a publisher that have certain keys in common, of the cost model's constants being off, and of each row's own noise, with
outliers (Student's t). The known rows then give the expected error of the others (kriging; Rasmussen &
Williams 2006, equation 2.23).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rows import Row

Floats = NDArray[np.float64]

EFFECTS: dict[tuple[str, ...], float] = {
    ("family",): 0.10,
    ("family", "section"): 0.06,
    ("family", "device"): 0.05,
    ("family", "model"): 0.10,
    ("family", "model", "device"): 0.06,
    ("family", "job"): 0.06,
    ("source", "section"): 0.04,
    ("source", "device"): 0.04,
}
"""Standard deviations of the effects that rows share if they have these keys in common."""
NOISE = 0.04
"""Standard deviation of a row's own noise."""
FREEDOM, ROUNDS = 4, 10
"""Degrees of freedom of the t distribution, and rounds in which its weights are found."""


def expected_errors(rows: Sequence[Row], slopes: Floats, errors: Floats, known: NDArray[np.bool_]) -> Floats:
    """Return the expected logarithm of measured over predicted of each row, from that of the known rows in `errors`.

    slopes: for each row, the change by one standard deviation of each constant (rows x constants).
    """
    alike = slopes @ slopes.T
    for keys, deviation in EFFECTS.items():
        values = np.array(["|".join(str(getattr(row, key)) for key in keys) for row in rows])
        alike = alike + deviation**2 * (values[:, None] == values[None])
    to_known, among_known = alike[:, known], alike[np.ix_(known, known)]
    weights = np.ones(int(known.sum()))
    expected = np.zeros(len(rows))
    for _ in range(ROUNDS):
        expected = to_known @ np.linalg.solve(among_known + np.diag(NOISE**2 / weights), errors[known])
        miss = (errors[known] - expected[known]) / NOISE
        weights = (FREEDOM + 1) / (FREEDOM + miss**2)
    return expected
