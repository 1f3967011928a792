"""Fit the constants of serving to published measurements, and say how far predictions are off elsewhere.

    python benchmarks/planner/fit_serving.py

It writes src/argosy/plan/cost/serving.toml. A fifth of the published groups of (publisher, device, model) is never
fitted to (`serving_rows.held_out`). The spread of errors is that of publishers of whom nothing was learnt
("strangers"), of other devices and models of publishers that were learnt from ("known"), and of predictions of either
that five rows of the same engine and device corrected ("calibrated", "calibrated_known"), each such that 1.645 of it
hold nine of ten errors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from score_serving import (
    KNOWN_WIDTH,
    METRICS,
    PUBLISHED,
    calibrated_errors,
    errors_without,
    maker,
    width,
    without_publishers,
)
from serving_fit import ServingFit, fit
from serving_rows import ServingRow, ServingTable, held_out, read

from argosy.files import atomic_write
from argosy.plan.cost.serving_constants import SERVING_FILE

Floats = NDArray[np.float64]
FOLDS, FEW = 5, 5
"""Folds of groups, and rows that calibrate."""
DRAWS = range(1, 6)
"""Seeds of the draws of those rows whose mean spread is taken: five rows are luck. Scores are of another draw."""


def main() -> None:
    """Run the command."""
    rows, skipped = read(PUBLISHED)
    table = ServingTable([row for row in rows if not held_out(row)])
    found = fit(table)
    kinds: Mapping[str, Callable[[ServingRow], str]] = {"strangers": _publisher, "known": _fold}
    spread = {}
    for kind, key in kinds.items():
        errors = errors_without(table, key, table, offsets=kind == "known")
        spread[kind] = _widths(table, errors)
    everywhere = np.ones(len(table), bool)
    starts = {
        "calibrated": (without_publishers(table, found.of(table.rows), everywhere), 1.0),
        "calibrated_known": (found.of(table.rows), KNOWN_WIDTH),
    }
    for kind, (constants, share) in starts.items():
        drawn = []
        for seed in DRAWS:
            errors, chosen = calibrated_errors(table, constants, FEW, np.full(len(table), share), seed)
            drawn.append(_widths_of_makers(table.take(chosen), errors[chosen]))
        names = set.intersection(*(set(widths) for widths in drawn))
        spread[kind] = {name: float(np.mean([widths[name] for widths in drawn])) for name in drawn[0] if name in names}
    with atomic_write(SERVING_FILE) as file:
        file.write(_toml(found, spread, len(table), len(rows), len(skipped)).encode())


def _publisher(row: ServingRow) -> str:
    return row.publisher


def _fold(row: ServingRow) -> str:
    return str(zlib.crc32(f"fold|{row.publisher}|{row.device.name}|{row.model}".encode()) % FOLDS)


def _widths(table: ServingTable, errors: Floats) -> dict[str, float]:
    parts = {metric: table.metric == metric for metric in METRICS}
    return {name: width(errors[here], table.take(here).rows) for name, here in parts.items() if sum(here) >= FEW}


def _widths_of_makers(table: ServingTable, errors: Floats) -> dict[str, float]:
    makers = np.array([maker(row) for row in table.rows])
    found: dict[str, float] = {}
    for name in dict.fromkeys(makers):
        here = makers == name
        widths = _widths(table.take(here), errors[here])
        found |= {f"{metric}_{name}": std for metric, std in widths.items()}
    return found


def _toml(found: ServingFit, spread: Mapping[str, Mapping[str, float]], used: int, all_rows: int, left: int) -> str:
    lines = [
        f"# Written by benchmarks/planner/fit_serving.py from {used} of {all_rows} rows of",
        f"# benchmarks/planner/inference.csv (a fifth of the groups is held out; {left} more cannot be read).",
        "",
        "[constants]",
        *(f"{name} = {np.exp(log):.4g}" for name, log in found.constants.items()),
    ]
    for group in dict.fromkeys(group for group, _ in found.shifts if not group.startswith("server of ")):
        lines += ["", f'[shifts."{group}"]']
        lines += [f"{name} = {np.exp(log):.4g}" for (of, name), log in found.shifts.items() if of == group]
    for kind, widths in spread.items():
        lines += ["", f"[spread.{kind}]", *(f"{name} = {std:.3g}" for name, std in widths.items())]
    lines += ["", "[publishers]", *(f'"{name}" = {log:.3g}' for name, log in found.publishers.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
