"""Expected stops of a run by component, and remedies: spares, burn-in; in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from argosy.plan.cost.estimate import percent
from argosy.plan.cost.reliability import (
    REPAIR_H,
    BurnIn,
    ExpectedStops,
    FailureRates,
    burn_in,
    node_stops_per_h,
    spare_nodes,
)
from argosy.plan.hardware.clusters import Cluster

LEAST_STOPS = 0.005
"""A component that is expected to stop a run more rarely is not shown, if it did not."""


@dataclass(frozen=True)
class Reliability:
    """Expected stops of a run, and remedies."""

    stops: tuple[float, float, float]
    """Stops in the whole run: nine times of ten from the first to the last, and in the middle of the rate."""
    components: tuple[ExpectedStops, ...]
    """The same by component; likelier ones first."""
    corruptions: ExpectedStops
    """Silent corruptions that are noticed."""
    spare_nodes: tuple[int, int, int]
    """Spare nodes to hold, so that none is missing in 95 of 100 cases if a repair takes `REPAIR_H`: at the low end, the
    middle and the high end of the rate of stops."""
    burn_in: BurnIn


def reliability(cluster: Cluster, devices: int, device_hours: float, rates: FailureRates | None = None) -> Reliability:
    """Return what stops a run of so many device-hours on so many devices of the cluster.

    rates: what is known of its failures; default: what the catalogue says.
    """
    rates = rates or FailureRates.of(cluster, devices)
    of_nodes = node_stops_per_h(cluster, rates)
    repair_h = min(float(REPAIR_H.mid), device_hours / devices)  # a node that fails in a short run is not back in it
    low, mid, high = (spare_nodes(float(each), repair_h) for each in (of_nodes.low, of_nodes.mid, of_nodes.high))
    components = rates.expected(device_hours)
    return Reliability(
        stops=rates.expected_in_all(device_hours),
        components=tuple(components),
        corruptions=next(each for each in components if each.component == "corruption"),
        spare_nodes=(low, mid, high),
        burn_in=burn_in(cluster),
    )


def spares_in_words(found: Reliability) -> str:
    low, mid, high = found.spare_nodes
    ends = f" ({low} to {high})" if low != high else ""
    return f"hold {mid}{ends} spare node{'s' * (mid != 1)}, if a repair takes {float(REPAIR_H.mid):.0f} h"


def stops_in_words(found: Reliability) -> str:
    """Return the stops of the whole run, and how many of them are silent corruptions, in a sentence."""
    low, mid, high = found.stops
    silent = found.corruptions
    return (
        f"{count_of_stops(mid)} stops ({low:.0f} to {high:.0f}), of them silent corruptions that are "
        f"noticed {count_of_stops(silent.expected)} ({silent.low:.0f} to {silent.high:.0f})"
    )


def burn_in_in_words(found: BurnIn) -> str:
    return (
        f"a burn-in of {found.hours:.0f} h leaves out {percent(found.left_out)} of the nodes and saves "
        f"{percent(found.saved)} of the stops"
    )


def count_of_stops(count: float) -> str:
    """Return a number of stops that need not be whole."""
    if count < 0.001:
        return "under 0.001" if count > 0 else "0"
    return f"{count:.0f}" if count >= 10 else f"{count:.2g}" if count >= 0.01 else f"{count:.3f}"


def stops_table(components: Sequence[ExpectedStops]) -> Table:
    """Return expected stops by component, beside those that were seen if somebody looked."""
    looked = any(each.seen is not None for each in components)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("component")
    for name in ("expected", "nine times of ten", *("seen",) * looked):
        table.add_column(name, justify="right")
    if looked:
        table.add_column("")
    for each in shown_stops(components):
        seen = (str(each.seen or 0), unlike(each)) if looked else ()
        table.add_row(each.called, count_of_stops(each.expected), f"{each.low:.0f} to {each.high:.0f}", *seen)
    return table


def shown_stops(components: Sequence[ExpectedStops]) -> list[ExpectedStops]:
    return [each for each in components if each.expected >= LEAST_STOPS or each.seen]


def unlike(stops: ExpectedStops) -> str:
    """Return whether more or fewer were seen than nine times of ten."""
    seen = stops.seen or 0
    return "more than expected" if seen > stops.high else "fewer than expected" if seen < stops.low else ""
