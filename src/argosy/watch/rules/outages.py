"""The stops of a run, each with its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from argosy.watch.facts import Event, RunFacts

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
