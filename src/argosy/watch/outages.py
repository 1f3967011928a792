"""What stopped a run, and what each stop cost: from its events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from argosy.watch.facts import Event, RunFacts

STOPS = ("worker_died", "killed", "break", "coordinator_lost", "signal")
"""Events that a stop begins with."""
SURPRISE = 0.01
"""With so small a chance of as many failures at the catalogue's rate, the run's own rate is believed."""
USUAL_SHAPE = 4.0
"""The catalogue's rate is within a factor of two: published ones of one kind of device differ so much."""
LEAST_FAILURES = 2
"""One failure says too little about a rate: within 20 times, nine times of ten."""


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
    """Where the state came from: live, memory, disk; empty if the run does not say."""
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


@dataclass(frozen=True)
class Rate:
    """What is known of the rate of failures: a gamma distribution of this shape, over so many seconds."""

    shape: float
    exposure_s: float
    is_measured: bool
    """True if it is the run's own, and not the catalogue's."""

    @property
    def mtbf_s(self) -> float:
        """Seconds between failures."""
        return self.exposure_s / self.shape


def failure_rate(failed: int, wall_s: float, usual_s: float | None) -> Rate | None:
    """Return the rate of failures of a run that had `failed` ones in `wall_s`; None if nobody knows.

    usual_s: seconds between failures by the catalogue, if it knows the devices. That holds unless so many failures
    would be a surprise (Poisson); hardware is not the only cause of failures.
    """
    is_surprise = usual_s is None or chance_of(failed, wall_s / usual_s) < SURPRISE
    if failed >= LEAST_FAILURES and is_surprise:
        return Rate(float(failed), wall_s, True)
    return None if usual_s is None else Rate(USUAL_SHAPE, USUAL_SHAPE * usual_s, False)


def chance_of(least: int, mean: float) -> float:
    """Return the chance of at least so many events of a Poisson distribution."""
    below = sum(math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1)) for n in range(least)) if mean > 0 else 1.0
    return max(0.0, 1 - below)


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
