"""Numbers by step, summed up in as many points as a picture has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.watch.columns import STEP, Columns, Floats
from argosy.watch.metrics_table import Preview
from argosy.watch.reader import RunReader

MOST_POINTS = 5000
MOST_KEYS = 64
POINTS = 1000
"""Points of a series, by default."""
MOST_BAD = 1000
SHOWN_AS_BAD = ("loss", "grad_norm")
"""Numbers that each step has: where they are missing, they were not finite."""
NORMS = "norms."


@dataclass(frozen=True)
class Buckets:
    """Rows of a table in groups of neighbours."""

    rows: slice
    begins: npt.NDArray[np.intp]
    """Where each group begins, counted from the first of `rows`."""

    @classmethod
    def of(cls, table: Columns, first: float | None, last: float | None, points: int) -> Buckets:
        """Return at most `points` groups of the rows of these steps, each of an equal stretch of steps."""
        rows = table.between(first, last)
        steps = table[STEP][rows]
        if len(steps) <= points:
            return cls(rows, np.arange(len(steps)))
        edges = np.linspace(steps[0], steps[-1] + 1, points + 1)[:-1]
        return cls(rows, np.unique(np.searchsorted(steps, edges)))

    def mean(self, values: Floats) -> Floats:
        """Return the mean of each group's numbers that are there; NaN if none is."""
        here = values[self.rows]
        if len(self.begins) == len(here):
            return here
        known = np.isfinite(here)
        sums = np.add.reduceat(np.where(known, here, 0.0), self.begins)
        counts = np.add.reduceat(known.astype(float), self.begins)
        return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)

    def least(self, values: Floats) -> Floats:
        """Return the least of each group."""
        return self._of(np.fmin, values)

    def most(self, values: Floats) -> Floats:
        """Return the most of each group."""
        return self._of(np.fmax, values)

    def _of(self, function: np.ufunc, values: Floats) -> Floats:
        here = values[self.rows]
        return here if len(self.begins) == len(here) else function.reduceat(here, self.begins)


def series(
    reader: RunReader | Preview,
    keys: Sequence[str],
    first: float | None = None,
    last: float | None = None,
    points: int = POINTS,
) -> dict[str, Any]:
    """Return mean, least and most of the steps behind each of at most `points` points, for these keys.

    A key that the run does not have is left out. `is_preview`: the points are made of some steps, not of all. `bad`:
    steps whose loss or gradient norm was not finite, if asked for.
    """
    known = set(reader.keys())
    asked = [key for key in keys[:MOST_KEYS] if key in known]
    steps = reader.steps
    for key in asked:
        steps[key]  # what is not in memory yet is read, before rows are counted
    buckets = Buckets.of(steps, first, last, points)
    answer: dict[str, Any] = {
        "step": np.round(buckets.mean(steps[STEP])),
        "keys": {key: _summed_up(buckets, steps[key]) for key in asked if not key.startswith(NORMS)},
        "first": steps[STEP][0] if len(steps) else None,
        "last": steps[STEP][-1] if len(steps) else None,
        "is_preview": isinstance(reader, Preview),
        "bad": _bad_steps(steps, [key for key in asked if key in SHOWN_AS_BAD], buckets.rows),
    }
    if norms := [key for key in asked if key.startswith(NORMS)]:
        answer["norms"] = _norms(reader.norms, norms, first, last, points)
    return answer


def _summed_up(buckets: Buckets, values: Floats) -> dict[str, Floats]:
    return {"mean": buckets.mean(values), "min": buckets.least(values), "max": buckets.most(values)}


def _norms(table: Columns, keys: list[str], first: float | None, last: float | None, points: int) -> dict[str, Any]:
    """Norms have steps of their own, since only those have them that are due."""
    buckets = Buckets.of(table, first, last, points)
    found = {key: _summed_up(buckets, table[key.removeprefix(NORMS)]) for key in keys}
    return {"step": np.round(buckets.mean(table[STEP])), "keys": found}


def _bad_steps(steps: Columns, keys: list[str], rows: slice) -> Floats:
    bad = np.zeros(rows.stop - rows.start, bool)
    for key in keys:
        bad |= ~np.isfinite(steps[key][rows])
    return steps[STEP][rows][bad][:MOST_BAD]
