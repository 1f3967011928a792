"""Figures by category, as the memory model and the step model give them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from argosy.plan.workload import Numbers


@dataclass(frozen=True)
class Breakdown:
    """Figures by category, for one plan or as columns for many plans; the categories add up to a total."""

    @property
    def total(self) -> Numbers:
        """The sum of all categories."""
        return sum((getattr(self, f.name) for f in fields(self)), np.zeros(1))

    def by_category(self, row: int = 0) -> dict[str, float]:
        """Return category -> figure, for the plan in this row."""
        return {f.name: float(getattr(self, f.name)[row]) for f in fields(self)}

    def rows(self, chosen: NDArray[Any]) -> Self:
        """Return the figures of the plans that a mask or an array of row numbers chooses."""
        return replace(self, **{f.name: getattr(self, f.name)[chosen] for f in fields(self)})
