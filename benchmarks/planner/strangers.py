"""How far predictions are off for a stranger: nobody who shares recipes, code or devices with him was learnt from.

Publishers of one lineage share software and recipes: what was read of one helps to predict the others. So each row is
predicted by constants that were fitted without any row of its lineage and without any of its device's generation, and
is itself read without what sources say elsewhere (`rows.read(recipes=False)`). Half the width of its interval comes
from the errors on other lineages, each of which was predicted in the same way and without the row's lineage too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rows import Row

from argosy.plan.cost.constants import Constants

Floats = NDArray[np.float64]
Fit = Callable[[NDArray[np.bool_]], Constants]
"""A mask of the published rows -> the constants that fit them."""
Predict = Callable[[Sequence[Row], Constants], Floats]
"""Rows -> log(predicted / measured) of each."""

LINEAGES = {
    "NVIDIA": ("Narayanan", "Korthikanti", "NVIDIA", "yanring"),
    "users of Megatron": ("VIA-Research", "bigscience", "BLOOM", "GLM", "OPT", "Dash"),
    "FSDP": ("pytorch", "mosaicml", "foundation-model", "LLaMA"),
    "Google": ("AI-Hypercomputer", "PaLM"),
    "DeepSeek": ("DeepSeek",),
}
"""Publishers that share code or recipes, by how their names begin; any other publisher stands alone."""
GENERATIONS = {
    "Volta": ("V100",),
    "Ampere": ("A100", "A800"),
    "Hopper": ("H100", "H200", "H800", "GH200"),
    "Blackwell": ("B200", "B300", "GB200", "GB300"),
    "CDNA": ("MI",),
    "TPU": ("TPU",),
}
"""Generations of devices, by how their names begin; any other device stands alone."""


def lineage(row: Row) -> str:
    """Return the lineage of a row's publisher."""
    return next((name for name, starts in LINEAGES.items() if row.family.startswith(starts)), row.family)


def generation(row: Row) -> str:
    """Return the generation of a row's device."""
    return next((name for name, starts in GENERATIONS.items() if row.device.startswith(starts)), row.device)


class Strangers:
    """Predictions of rows by constants that know neither their lineage nor their generation."""

    def __init__(self, published: Sequence[Row], fit: Fit, predict: Predict):
        self._lineages = np.array([lineage(row) for row in published])
        self._generations = np.array([generation(row) for row in published])
        self._fit, self._predict = fit, predict
        self._fits: dict[bytes, Constants] = {}

    def knows(self, family: str) -> bool:
        """Return True if rows of this lineage were published."""
        return bool((self._lineages == family).any())

    def errors(self, rows: Sequence[Row], without: str = "") -> Floats:
        """Return log(predicted / measured) of each row; `without` names one more lineage to know nothing of."""
        found = np.zeros(len(rows))
        places: dict[tuple[str, str], list[int]] = {}
        for index, row in enumerate(rows):
            places.setdefault((lineage(row), generation(row)), []).append(index)
        for (family, device), here in places.items():
            out = np.isin(self._lineages, [family, without]) | (self._generations == device)
            found[here] = self._predict([rows[i] for i in here], self._constants(~out))
        return found

    def _constants(self, chosen: NDArray[np.bool_]) -> Constants:
        key = chosen.tobytes()
        if key not in self._fits:
            self._fits[key] = self._fit(chosen)
        return self._fits[key]

    def width(self, others: Sequence[Row], without: str = "") -> float:
        """Return half the 90 % interval, in logarithms, that errors on `others` tell, all of another lineage."""
        return weighted_quantile(np.abs(self.errors(others, without)), publisher_weights(others), 0.9)


def publisher_weights(rows: Sequence[Row]) -> Floats:
    """Return a weight for each row: n rows of one publisher count as the square root of n.

    They are neither independent (n would count) nor one measurement (1 would): they share their publisher's ways.
    """
    families = [row.family for row in rows]
    return np.array([families.count(family) ** -0.5 for family in families])


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """Return the smallest value such that values up to it have this share of the weight."""
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, share * sums[-1])])
