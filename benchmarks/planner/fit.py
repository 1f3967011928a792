"""Fit the cost model's constants to all published runs, and say how far predictions are off elsewhere.

    python benchmarks/planner/fit.py

It writes src/argosy/plan/cost/fitted.toml: the constants, and the spread of errors: for times that of strangers
(`strangers.py`), for whom the planner is; for memory that of publishers that were left out, because what a system keeps
in which format is known of Argosy, and is most of memory.
"""

from __future__ import annotations

import numpy as np
from rows import read
from score import PUBLISHED, SECTIONS, Model, errors, fitted, strangers_to

from argosy.files import atomic_write
from argosy.plan.cost.constants import FITTED
from argosy.plan.cost.estimate import INTERVAL_Z


def main() -> None:
    """Run the command."""
    rows, _ = read(PUBLISHED)
    constants = fitted(Model(rows), np.ones(len(rows), bool))
    told, _ = read(PUBLISHED, recipes=False)
    strangers = strangers_to(rows)
    log_error, _ = errors(rows, rows)
    of_memory = np.array([row.section == "memory" for row in rows])
    worst = {name: strangers.width([row for row in told if row.section == name]) for name in ("dense_time", "moe_time")}
    worst["memory"] = float(np.quantile(np.abs(log_error[of_memory]), 0.9))
    lines = [f"# Written by benchmarks/planner/fit.py from {len(rows)} rows of benchmarks/planner/published.csv.", ""]
    lines += ["[constants]", *(f"{name} = {value:.4g}" for name, value in vars(constants).items()), "", "[spread]"]
    lines += [f"{section} = {worst[section] / INTERVAL_Z:.3g}" for section in SECTIONS]
    with atomic_write(FITTED) as file:
        file.write(("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
