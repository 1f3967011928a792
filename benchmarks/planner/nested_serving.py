"""How true predictions of serving are if nothing that was chosen has seen the rows that are scored.

    python benchmarks/planner/nested_serving.py [--by publisher|engine|generation] [--json]

Each group is left out in turn (outer). The rest is dealt to three folds of whole groups, each left out of a fit to the
others (inner). The variant of `VARIANTS` with the least inner error is fitted to the rest and predicts the group, with
intervals as wide as inner errors are. What no inner row has (a port that one publisher measured alone) cannot be chosen
so.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from score_serving import METRICS, PUBLISHED, figures, generation, in_words, width
from serving_fit import ServingFit, fit, row_weights
from serving_rows import ServingRow, ServingTable, held_out, read
from strangers import weighted_quantile

from argosy.plan.cost.inference import ServingOptions

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
FOLDS = 3
MOST_ALIKE = 5
"""Rows of a source, engine, device, model and metric that inner fits are fitted to; all are predicted."""
KEYS: Mapping[str, Callable[[ServingRow], str]] = {
    "publisher": lambda row: row.publisher, "engine": lambda row: row.engine.name, "generation": generation
}  # fmt: skip


def _without_kernels(rows: Sequence[ServingRow]) -> list[ServingRow]:
    """Return the rows as if no release had kernels of its own for a maker's devices.

    Options that a source sets itself stay: graphs that it went without, the longest pass.
    """
    plain = [ServingOptions(0.0 if row.options.gaps else row.options.eager, chunk=row.options.chunk) for row in rows]
    return [replace(row, options=options) for row, options in zip(rows, plain, strict=True)]


VARIANTS: Mapping[str, Callable[[Sequence[ServingRow]], Sequence[ServingRow]]] = {
    "as it is": lambda rows: rows,
    "no kernels of a release": _without_kernels,
}
"""Models that could have been chosen: how each reads rows."""


def main() -> None:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--by", choices=tuple(KEYS), default="publisher")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    result = nested([row for row in read(PUBLISHED)[0] if not held_out(row)], KEYS[chosen.by])
    print(json.dumps(result, indent=1) if chosen.json else in_words(result["figures"]) + "\n" + words(result["chosen"]))


def nested(rows: Sequence[ServingRow], key: Callable[[ServingRow], str]) -> dict[str, Any]:
    """Return the figures of rows whose group was left out of all choices, and what was chosen how often."""
    of = np.array([key(row) for row in rows])
    metrics = np.array([row.metric for row in rows])
    errors, std, taken = np.zeros(len(rows)), np.zeros(len(rows)), Counter[str]()
    for name in sorted(set(of)):
        out = of == name
        folds = _dealt(of[~out])
        tried = {label: _Inner(ServingTable(reads(rows)), out, folds) for label, reads in VARIANTS.items()}
        label = min(tried, key=lambda each: tried[each].error)
        best = tried[label]
        widths = best.widths()
        errors[out], std[out] = best.outer(), [widths[metric] for metric in metrics[out]]
        taken[label] += 1
    return {"figures": {"all": figures(metrics, errors, std)}, "chosen": dict(taken.most_common())}


class _Inner:
    """Errors of a variant on the folds of what is not left out."""

    def __init__(self, table: ServingTable, out: Mask, folds: Floats):
        self._out, self._table = table.take(out), table.take(~out)
        self._folds, self._weights, few = folds, row_weights(self._table.rows), _few_alike(self._table.rows)
        self._errors = np.zeros(len(self._table))
        for fold in range(FOLDS):
            here = folds == fold
            if here.any() and not here.all():
                self._errors[here] = _errors(fit(self._table.take(~here & few)), self._table.take(here))

    @property
    def error(self) -> float:
        """Mean of the metrics' median absolute errors, in logarithms; n rows of a group count as their root."""
        return float(
            np.mean([weighted_quantile(np.abs(self._errors[m]), self._weights[m], 0.5) for m in self._parts()])
        )

    def widths(self) -> dict[str, float]:
        """Return the deviation of intervals by metric."""
        found = {}
        for here in self._parts():
            found[str(self._table.metric[here][0])] = width(self._errors[here], self._table.take(here).rows)
        return {name: found.get(name, max(found.values())) for name in METRICS}

    def outer(self) -> Floats:
        """Return the errors of the group that was left out."""
        return _errors(fit(self._table), self._out)

    def _parts(self) -> list[Mask]:
        return [here for here in (self._table.metric == name for name in METRICS) if here.any()]


def _errors(found: ServingFit, table: ServingTable) -> Floats:
    return np.asarray(np.log(table.predict(found.of(table.rows)) / table.measured))


def _few_alike(rows: Sequence[ServingRow]) -> Mask:
    """Return a mask of `MOST_ALIKE` rows at most of each group, evenly."""
    groups = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.publisher, row.engine.label, row.device.name, row.model, row.metric].append(index)
    found = np.zeros(len(rows), bool)
    for places in groups.values():
        found[np.array(places)[np.linspace(0, len(places) - 1, min(MOST_ALIKE, len(places))).astype(int)]] = True
    return found


def _dealt(of: NDArray[np.str_]) -> Floats:
    """Return the fold of each row: groups, the largest first, each to the fold with the fewest rows."""
    folds, sizes = np.zeros(len(of)), np.zeros(FOLDS)
    for name, count in Counter(of.tolist()).most_common():
        fold = int(np.argmin(sizes))
        sizes[fold] += count**0.5
        folds[of == name] = fold
    return folds


def words(chosen: Mapping[str, int]) -> str:
    """Return what was chosen how often, a line each."""
    return "\n".join(f"  {count}: {name}" for name, count in chosen.items())


if __name__ == "__main__":
    main()
