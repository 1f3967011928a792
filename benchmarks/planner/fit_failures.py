"""Fit the catalogue of failures to what others have published: how often, of what, and how unlike nodes are.

    python benchmarks/planner/fit_failures.py        writes src/argosy/plan/cost/failures.toml

The rows are in `failures.csv`, each with its source. Rows of use "total" say how often something stopped a job, those
of use "share" what it was, as far as their source tells components apart; those of use "check" are fitted to nothing.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import optimize, stats

from argosy.files import atomic_write
from argosy.plan.cost.estimate import INTERVAL_Z
from argosy.plan.cost.reliability import CATALOGUE, COMPONENTS, FailureCatalogue

FILE = Path(__file__).parent / "failures.csv"
WORST_NODES, THEIR_SHARE = 3 / 63, 0.5
"""The worst nodes, and their share of what took nodes out: 224 jobs on 63 nodes of B200 (arXiv:2605.09370)."""
GROUPS = (("gpu", "hbm", "nvlink"), ("nic", "network"), ("host", "dram", "psu", "storage", "software", "corruption"))
"""Components that nearly all sources tell apart: how unlike fleets are is told by these."""
PSEUDO_COUNTS = 0.02
"""Share of the fleets' weight that all components have in common, so that none is impossible."""
INDIFFERENT = 0.3
"""Share of a count of several components that is dealt out evenly among them: maximum likelihood alone gives all of it
to the one that is told apart elsewhere."""
ROUNDS = 500


@dataclass(frozen=True)
class FailureRow:
    """A published figure about failures."""

    source: str
    fleet: str
    devices: tuple[str, ...]
    use: str
    components: tuple[str, ...]
    count: float | None
    hours_per_stop: float | None
    """Device-hours between failures of these components."""


def read(path: Path = FILE) -> list[FailureRow]:
    with path.open() as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> FailureRow:
    count = float(line["count"]) if line["count"] else None
    hours = float(line["hours_per_stop"]) if line["hours_per_stop"] else None
    if hours is None and line["device_hours"] and count:
        hours = float(line["device_hours"]) / count
    named = tuple(COMPONENTS) if line["components"] == "all" else tuple(line["components"].split("|"))
    return FailureRow(
        line["source"], line["fleet"], tuple(line["devices"].split("|")), line["use"], named, count, hours
    )


def fit(rows: Sequence[FailureRow]) -> FailureCatalogue:
    """Return the catalogue that these rows say."""
    totals = [row for row in rows if row.use == "total" and row.hours_per_stop]
    hours, std = _new_fleet([math.log(row.hours_per_stop or 1.0) for row in totals])
    shares, concentration = _shares([row for row in rows if row.use == "share"])
    used = [row for row in rows if row.use in ("total", "share")]
    return FailureCatalogue(
        hours_per_stop=hours,
        std=std,
        fleets=len(totals),
        concentration=concentration,
        node_shape=_node_shape(),
        shares=shares,
        kinds=tuple(sorted({kind for row in totals for kind in row.devices})),
        sources=tuple(dict.fromkeys(f"{row.source}: {row.fleet}" for row in used)),
    )


def _new_fleet(logs: Sequence[float]) -> tuple[float, float]:
    """Return the median of a fleet that nobody has seen, and the log-normal spread with as wide an interval of 90 %.

    Student's t for a new one of n alike (Gelman et al. 2013, section 3.2): fleets differ far more than their counts'
    own noise.
    """
    many = len(logs)
    wide = stats.t.ppf(0.95, many - 1) * float(np.std(logs, ddof=1)) * math.sqrt(1 + 1 / many)
    return math.exp(float(np.mean(logs))), wide / INTERVAL_Z


def _shares(rows: Sequence[FailureRow]) -> tuple[dict[str, float], float]:
    """Return each component's share of failures, and the Dirichlet concentration of the shares of a new fleet.

    A count of several components is dealt out by their shares (expectation maximisation), a part of it evenly. Each
    fleet counts alike, however many failures it saw: they differ by more than by chance.
    """
    names = list(COMPONENTS)
    fleets: dict[str, list[FailureRow]] = defaultdict(list)
    for row in rows:
        fleets[row.fleet].append(row)
    share = np.full(len(names), 1 / len(names))
    told = np.zeros((len(fleets), len(names)))
    for _ in range(ROUNDS):
        told = np.array([_dealt(each, names, share) for each in fleets.values()])
        share = (1 - PSEUDO_COUNTS) * told.mean(axis=0) + PSEUDO_COUNTS / len(names)
    of_group = np.array(
        [[told[i, [names.index(n) for n in group]].sum() for group in GROUPS] for i in range(len(told))]
    )
    mean, var = of_group.mean(axis=0), of_group.var(axis=0, ddof=1)
    concentration = max(1.0, float((mean * (1 - mean)).sum() / var.sum()) - 1)
    return {name: float(value) for name, value in zip(names, share, strict=True)}, concentration


def _dealt(rows: Sequence[FailureRow], names: list[str], share: np.ndarray) -> np.ndarray:
    """Return the share of each component among a fleet's failures."""
    counts = np.zeros(len(names))
    for row in rows:
        at = [names.index(name) for name in row.components]
        dealt = (1 - INDIFFERENT) * share[at] / share[at].sum() + INDIFFERENT / len(at)
        counts[at] += (row.count or 0.0) * dealt
    return counts / counts.sum()


def _node_shape() -> float:
    """Return the shape of the gamma distribution of nodes' rates in which the worst nodes have their share."""

    def share_of_worst(shape: float) -> float:
        return float(stats.gamma.sf(stats.gamma.isf(WORST_NODES, shape), shape + 1))

    return float(optimize.brentq(lambda shape: share_of_worst(shape) - THEIR_SHARE, 0.01, 10.0))


def in_toml(found: FailureCatalogue) -> str:
    lines = [
        "# What stops training jobs, and how often: `benchmarks/planner/fit_failures.py` writes this file from the",
        "# published figures in `benchmarks/planner/failures.csv`, which name their sources row by row.",
        f"hours_per_stop = {found.hours_per_stop:.0f}  # of one device, from any cause: the median of fleets",
        f"std = {found.std:.3f}  # of its logarithm, for a fleet that nobody has seen",
        f"fleets = {found.fleets}  # that say so",
        f"concentration = {found.concentration:.2f}  # Dirichlet, of the shares in such a fleet",
        f"node_shape = {found.node_shape:.3f}  # gamma, of the rates of nodes",
        f"kinds = [{', '.join(map(_quoted, found.kinds))}]  # devices of those fleets",
        "sources = [",
        *(f"    {_quoted(source)}," for source in found.sources),
        "]",
        "",
        "[shares]",
        *(f"{name} = {value:.4f}" for name, value in found.shares.items()),
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', "'") + '"'


if __name__ == "__main__":
    with atomic_write(CATALOGUE) as out:
        out.write(in_toml(fit(read())).encode())
    print(f"{CATALOGUE} written")
