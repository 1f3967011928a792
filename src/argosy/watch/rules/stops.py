"""The stops of a run, each with its cost; and by component, seen and expected.

A stop is told by its events, the most telling first: what detectors found, and what processes said when they died. A
SIGKILL that nobody explains, a hang, and the loss of all processes at once count in all, and in no component.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from argosy.plan.cost.estimate import Estimate, count, percent, seconds, within
from argosy.plan.cost.reliability import ExpectedStops, FailureRates
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report.explain import count_of_stops, unlike
from argosy.plan.search.auto import UNKNOWN_GPU
from argosy.watch.facts import Event, RunFacts
from argosy.watch.rules.planner import Planner

STOPS = ("worker_died", "killed", "break", "coordinator_lost", "signal")
"""Events that a stop begins with."""


@dataclass(frozen=True)
class Outage:
    """A time in which the run did not train, or trained steps that were lost."""

    began_s: float
    """Seconds since 1970."""
    stood_s: float
    """Seconds until training went on, without those in which nobody ran it."""
    steps_lost: int
    """Steps that were made again."""
    source: str
    """Source of the state: live, memory, disk; empty if the run does not say."""
    deaths: tuple[Event, ...]
    """worker_died, oom_kill and killed, by time."""
    migrated: bool = False
    """True if the run left a node or a plan on purpose."""
    stopped: bool = False
    """True if somebody asked it to stop, or it ended in order and was continued."""

    def cost_s(self, step_s: float) -> float:
        """Return the seconds that it cost, if a step takes so long; NaN: nobody knows yet, after a new start."""
        return self.stood_s + (self.steps_lost * step_s if step_s > 0 else 0.0)


def outages(facts: RunFacts) -> list[Outage]:
    """Return the stops between one start of training and the next, by time.

    Of a stop without an event (all processes were killed at once) the time that it stood is not known: 0.
    """
    starts = facts.starts
    return [
        outage
        for before, after in pairwise(starts)
        if (outage := _between(facts, float(before["time_s"]), float(after["time_s"]))) is not None
    ]


def failures(facts: RunFacts) -> list[Outage]:
    """Return the outages that nobody wanted."""
    return [outage for outage in outages(facts) if not outage.migrated and not outage.stopped]


def _between(facts: RunFacts, first_s: float, last_s: float) -> Outage | None:
    stops = _within(facts.of(*STOPS), first_s, last_s)
    deaths = tuple(_within(facts.of("worker_died", "oom_kill", "killed"), first_s, last_s))
    deaths = tuple(death for death in deaths if death.get("exit_code", -1) != 0)
    recovered = [*_within(facts.of("recovered"), first_s, last_s)][-1:]
    began_s = float(stops[0]["time_s"]) if stops else last_s
    return Outage(
        began_s=began_s,
        stood_s=facts.running_s(began_s, last_s),
        steps_lost=int(recovered[0].get("steps_lost") or 0) if recovered else 0,
        source=str(recovered[0].get("source", "")) if recovered else "",
        deaths=deaths,
        migrated=bool(_within(facts.of("migrated", "rewind"), first_s, last_s)),
        stopped=any(stop["event"] == "signal" for stop in stops) or bool(_within(facts.of("end"), first_s, last_s)),
    )


def _within(events: Sequence[Event], first_s: float, last_s: float) -> list[Event]:
    return [event for event in events if first_s < float(event["time_s"]) <= last_s]


EVENTS = {
    "collective_corrupt": "corruption",
    "gradient_corrupt": "corruption",
    "corruption": "corruption",
    "node_refused": "corruption",
    "disk_failed": "storage",
    "store_unreachable": "storage",
    "oom_kill": "software",
    "mismatch": "software",
    "agent_left": "host",
    "coordinator_lost": "host",
}
"""Event -> the component that it tells of; the most telling first."""
BEFORE_S, AFTER_S = 60.0, 30.0
"""An event so long before a stop, or after its beginning, may tell its cause."""
SAID = {
    "hbm": (r"uncorrectable ecc", r"ecc error", r"double.bit", r"row.remap", r"\bxid\D{0,4}(48|63|64|94|95)\b"),
    "nvlink": (r"nvlink", r"nvswitch", r"\bxid\D{0,4}74\b"),
    "gpu": (
        r"fallen off the bus",
        r"gpu is lost",
        r"devices? is/are busy or unavailable",
        r"no cuda-capable device",
        r"\bxid\D{0,4}(61|62|79|109|119|120|122)\b",
    ),
    "nic": (r"mlx\d", r"ibv_", r"ib_?v?_wc", r"infiniband", r"completion with error", r"\befa\b", r"libfabric"),
    "network": (
        r"no route to host",
        r"network is unreachable",
        r"link (is )?down",
        r"unhandled system error",
        r"connection .*(reset|closed|refused|broke)",
        r"socket timeout",
        r"nccl.*(timeout|remote)",
    ),
    "dram": (r"machine check", r"\bmce\b", r"edac", r"memory failure", r"sigbus"),
    "storage": (
        r"no space left",
        r"input/output error",
        r"stale file handle",
        r"read-only file system",
        r"disk quota",
        r"transport endpoint",
    ),
    "software": (r"exit code \d+, \w+", r"sig(segv|abrt|ill|fpe)", r"out of memory"),
}
"""Component -> what a process says that dies of it (in lower case; NVIDIA's Xid catalogue, libibverbs, errno); the most
telling first."""


def component_of(facts: RunFacts, outage: Outage) -> str | None:
    """Return the component that a stop came from; None if its events do not tell."""
    begin, end = outage.began_s - BEFORE_S, outage.began_s + AFTER_S
    near = {str(each["event"]) for each in facts.of(*EVENTS) if begin <= float(each["time_s"]) <= end}
    told = next((component for event, component in EVENTS.items() if event in near), None)
    words = [found for death in outage.deaths if (found := _said(death)) is not None]
    order = [*(component for component in SAID if component != "network"), "network"]  # others lose their peer
    said = min(words, key=order.index, default=None)
    if told in (None, "host", "software") and said is not None:
        return said
    return told


def _said(death: Event) -> str | None:
    why = str(death.get("why", "")).lower()
    return next((name for name, patterns in SAID.items() if any(re.search(each, why) for each in patterns)), None)


def rates_of(facts: RunFacts, planner: Planner, found: Sequence[Outage]) -> FailureRates | None:
    """Return the rates of a run's failures by the catalogue and by these of its own; None before it has a plan."""
    if facts.plan is None or not facts.wall_s > 0:
        return None
    size, machine = facts.plan.world_size, planner.machine or Cluster.parse(f"1x{UNKNOWN_GPU}")
    causes = [component_of(facts, outage) for outage in found]
    seen = Counter(cause for cause in causes if cause is not None)
    return FailureRates.of(machine, size).after(seen, causes.count(None), facts.device_hours)


@dataclass(frozen=True)
class StopsSoFar:
    """Stops of a run so far, beside those that the catalogue expects."""

    device_hours: float
    expected: tuple[float, float, float]
    """Stops by the catalogue: nine times of ten from the first to the last, and in the middle of the rate."""
    seen: int
    unexplained: int
    """Stops of which nobody knows the component."""
    components: tuple[ExpectedStops, ...]
    mtbf_s: Estimate
    """Seconds between stops from now on, by the catalogue and by what was seen."""
    words: str


def stops_so_far(facts: RunFacts, planner: Planner) -> StopsSoFar | None:
    """Return the expected and the seen stops by component; None for a run that has not trained yet."""
    rates = rates_of(facts, planner, failures(facts))
    if rates is None or facts.plan is None:
        return None
    prior = rates.after({}, 0, 0.0)
    expected = [
        ExpectedStops(each.component, each.expected, each.low, each.high, rates.seen.get(each.component, 0))
        for each in prior.expected(rates.device_hours)
    ]
    in_all = prior.expected_in_all(rates.device_hours)
    mtbf = rates.mtbf_s(facts.plan.world_size)
    return StopsSoFar(
        rates.device_hours,
        in_all,
        rates.stops,
        rates.unexplained,
        tuple(expected),
        mtbf,
        _words(rates, in_all, expected, mtbf),
    )


def _words(
    rates: FailureRates, in_all: tuple[float, float, float], expected: Sequence[ExpectedStops], mtbf: Estimate
) -> str:
    low, mid, high = in_all
    odd = [f"{each.called}: {unlike(each)}" for each in expected if each.seen and unlike(each)]
    share = f", {percent(rates.unexplained / rates.stops)} of them unexplained" if rates.unexplained else ""
    return (
        f"{rates.stops} stop{'s' * (rates.stops != 1)} in {count(rates.device_hours)} device-hours{share}; the "
        f"catalogue expects {count_of_stops(mid)} ({low:.0f} to {high:.0f}). From now on one in {within(mtbf, seconds)}"
        + (", by the run's own stops" if rates.is_measured else "")
        + "."
        + (f" {'; '.join(odd)}." if odd else "")
    )
