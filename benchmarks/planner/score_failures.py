"""How true predictions of failures are, on figures that others have published.

    python benchmarks/planner/score_failures.py [--json]

Each run is predicted by a catalogue that was fitted without any row of its source. Llama 3's stops must lie in the
interval of 90 %; effective training time is compared in points. The last table holds rates of single components, which
nothing was fitted to, against the catalogue's.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from fit_failures import FailureRow, fit, read

from argosy.plan.cost.economy import RESTART_S, CheckpointCost, checkpoint_cost, effective_share, goodput
from argosy.plan.cost.estimate import Estimate, propagate
from argosy.plan.cost.reliability import COMPONENTS, FailureCatalogue, FailureRates, device_hours_per_stop
from argosy.plan.hardware.clusters import Cluster

RUNS = Path(__file__).parent / "effective_time.csv"
LLAMA, LLAMA_STOPS, LLAMA_HOURS = "arXiv:2407.21783 (Llama 3)", 419, 54 * 24.0
STATE_BYTES = 14
"""Bytes of a checkpoint for each parameter: bf16 weights, fp32 weights and two moments."""


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    rows = read()
    scores = {"stops": [stops(rows, ""), stops(rows, "Meta")], "effective": effective(rows), "rates": rates(rows)}
    if options.parse_args(argv).json:
        print(json.dumps(scores, indent=2))
    else:
        print(in_words(scores))
    return 0


def without(rows: list[FailureRow], source: str, also: str = "") -> FailureCatalogue:
    """Return the catalogue without a source, and without fleets that have `also` in their name."""
    publishers = (also, "OPT-175B") if also else ()
    return fit([row for row in rows if row.source != source and not any(each in row.fleet for each in publishers)])


def stops(rows: list[FailureRow], also: str) -> dict[str, Any]:
    """Return Llama 3's stops as predicted without its source, or without all fleets of its publisher."""
    known, cluster = without(rows, LLAMA, also), Cluster.parse("h100-16384")
    found = FailureRates.of(cluster, known=known)
    hours = cluster.devices * LLAMA_HOURS
    low, mid, high = found.expected_in_all(hours)
    seen = _llama_by_component(rows)
    of_each = [
        {"component": each.component, "expected": round(each.expected, 1), "low": each.low, "high": each.high}
        | {"seen": seen.get(each.component)}
        for each in found.expected(hours)
    ]
    return {
        "left_out": "all fleets of Meta" if also else LLAMA,
        "fleets": len(
            {row.fleet for row in rows if row.use == "total" and f"{row.source}: {row.fleet}" in known.sources}
        ),
        "low": low,
        "expected": round(mid, 1),
        "high": high,
        "seen": LLAMA_STOPS,
        "inside": bool(low <= LLAMA_STOPS <= high),
        "components": of_each,
    }


def _llama_by_component(rows: list[FailureRow]) -> dict[str, float]:
    """Return Llama 3's stops by component, where its table tells components apart; the GPU's with NVLink's."""
    seen: dict[str, float] = {}
    for row in rows:
        if row.source == LLAMA and row.use == "share" and len(row.components) <= 2:
            seen[row.components[0]] = seen.get(row.components[0], 0.0) + (row.count or 0.0)
    return seen


def effective(rows: list[FailureRow]) -> list[dict[str, Any]]:
    with RUNS.open() as file:
        return [_effective(line, without(rows, line["source"])) for line in csv.DictReader(file)]


def _effective(line: dict[str, str], known: FailureCatalogue) -> dict[str, Any]:
    """Return a run's effective training time as predicted, with the times of saving and restarting that it published;
    those that it did not are the planner's own."""
    devices = int(line["devices"])
    cluster = Cluster.parse(f"{devices}x{line['of']}")
    hours = device_hours_per_stop(cluster, known=known)
    mtbf = Estimate(*(3600 * each / devices for each in (hours.low, hours.mid, hours.high)))
    restart = RESTART_S
    if line["restart_s"]:
        mid, high = float(line["restart_s"]), float(line["restart_high_s"])
        restart = Estimate(mid * mid / high, mid, high)
    shares = _shares(line, cluster, mtbf, restart)
    own = Estimate.exactly(float(line["mtbf_s"])) if line["mtbf_s"] else None
    published, points = float(line["published"]), 100 * (shares[1] - float(line["published"]))
    is_bound = line["is_bound"] == "yes"
    return {
        "run": line["run"],
        "devices": devices,
        "predicted_pct": [round(100 * each, 1) for each in shares],
        "published_pct": round(100 * published, 1),
        "is_lower_bound": is_bound,
        "points": round(points, 1),
        "within_3_points": bool(points >= -3 if is_bound else abs(points) <= 3),
        "with_own_rate_pct": round(100 * _shares(line, cluster, own, restart)[1], 1) if own else None,
    }


def _shares(line: dict[str, str], cluster: Cluster, mtbf: Estimate, restart: Estimate) -> list[float]:
    """Return the effective training time at the low end, in the middle, and at the high end."""
    if line["interval_s"]:
        interval_s, stall_s = float(line["interval_s"]), float(line["stall_s"])
        cost = CheckpointCost(stall_s, stall_s)
        found = propagate(lambda m, r: 1 / effective_share(interval_s, cost, r, m) - 1, mtbf, restart)
        return [1 / (1 + float(each)) for each in (found.high, found.mid, found.low)]
    cost = checkpoint_cost(cluster, STATE_BYTES * float(line["parameters"]))
    share = goodput(cluster, cost, restart_s=restart, mtbf=mtbf).effective
    return [float(share.low), float(share.mid), float(share.high)]


def rates(rows: list[FailureRow]) -> list[dict[str, Any]]:
    """Return published rates of some components beside the catalogue's."""
    known, found = fit(rows), []
    for row in (row for row in rows if row.use == "check" and row.hours_per_stop):
        share = sum(known.shares[name] for name in row.components)
        wide = math.hypot(known.std, math.sqrt((1 - share) / share / (known.concentration + 1)))
        hours = Estimate.log_normal(known.hours_per_stop / share, wide)
        published = float(row.hours_per_stop or np.nan)
        found.append(
            {"source": row.source, "fleet": row.fleet, "components": [COMPONENTS[name] for name in row.components]}
            | {"published_h": published, "catalogue_h": [round(float(h)) for h in (hours.low, hours.mid, hours.high)]}
            | {"inside": bool(hours.low <= published <= hours.high)}
        )
    return found


def in_words(scores: dict[str, Any]) -> str:
    lines = []
    for score in scores["stops"]:
        lines += [
            f"Llama 3 405B, 16,384 H100, 54 days, without {score['left_out']} ({score['fleets']} fleets left): "
            f"{score['expected']:.0f} stops expected ({score['low']:.0f} to {score['high']:.0f}), {score['seen']} "
            f"seen: {'inside' if score['inside'] else 'OUTSIDE'}.",
            "",
            "| component | expected | nine times of ten | seen |",
            "|---|---|---|---|",
            *(
                f"| {COMPONENTS[each['component']]} | {each['expected']:.1f} | {each['low']:.0f} to "
                f"{each['high']:.0f} | {'-' if each['seen'] is None else round(each['seen'])} |"
                for each in score["components"]
            ),
            "",
        ]
    lines += ["| run | devices | effective time, predicted | published | points |", "|---|---|---|---|---|"]
    for each in scores["effective"]:
        low, mid, high = each["predicted_pct"]
        more = "more than " if each["is_lower_bound"] else ""
        verdict = "" if each["within_3_points"] else " (missed)"
        if each["with_own_rate_pct"] is not None:
            verdict += f"; with the rate that it published {each['with_own_rate_pct']} %"
        lines.append(
            f"| {each['run']} | {each['devices']} | {mid} % ({low} to {high}) | {more}{each['published_pct']} % | "
            f"{each['points']:+}{verdict} |"
        )
    lines += [
        "",
        "| published, fitted to nothing | components | device-hours a failure | catalogue |",
        "|---|---|---|---|",
    ]
    for each in scores["rates"]:
        low, mid, high = each["catalogue_h"]
        lines.append(
            f"| {each['source']}: {each['fleet']} | {', '.join(each['components'])} | {each['published_h']:,.0f} | "
            f"{mid:,} ({low:,} to {high:,}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
