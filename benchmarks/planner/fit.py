"""ConstantsFit the cost model's constants to all published runs, and say how far predictions are off elsewhere.

    python benchmarks/planner/fit.py

It writes src/argosy/plan/cost/fitted.toml: the constants, and the spread of errors on publishers that were left
out.
"""

from __future__ import annotations

import numpy as np
from rows import read
from score import PUBLISHED, SECTIONS, Model, errors, fitted

from argosy.files import atomic_write
from argosy.plan.cost.constants import FITTED

NORMAL_90 = 1.645
"""Standard deviations that hold nine tenths of a normal distribution."""


def main() -> None:
    """Run the command."""
    rows, _ = read(PUBLISHED)
    constants = fitted(Model(rows), np.ones(len(rows), bool))
    log_error, _ = errors(rows, rows)
    sections = np.array([row.section for row in rows])
    lines = [f"# Written by benchmarks/planner/fit.py from {len(rows)} rows of benchmarks/planner/published.csv.", ""]
    lines += ["[constants]", *(f"{name} = {value:.4g}" for name, value in vars(constants).items()), "", "[spread]"]
    for section in SECTIONS:
        worst = np.quantile(np.abs(log_error[sections == section]), 0.9)
        lines.append(f"{section} = {worst / NORMAL_90:.3g}")
    with atomic_write(FITTED) as file:
        file.write(("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
