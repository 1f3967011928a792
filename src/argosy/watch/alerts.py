"""Alerts: what a person should know now. Each begins, may go on, and ends; each of these is said once.

`conditions` says what is wrong. An alert ends only when all was right for a while, so that it does not flap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from argosy.config.observe import AlertKind, AlertsConfig
from argosy.watch.conditions import LOOKS, Condition, conditions, newest_step
from argosy.watch.facts import Event, Facts

CALM_S = 30.0
"""All must be right for so long before an alert ends: a node that comes and goes is one alert."""
REMEMBERED = 256
"""Alerts that an evaluation of one moment looks back at, in events."""
CRITICAL = ("nan", "dead", "disk_filling")

Phase = Literal["begins", "goes_on", "ends"]


@dataclass(frozen=True)
class Alert:
    """One thing that a person is told."""

    alert: AlertKind
    state: Phase
    severity: Literal["warning", "critical"]
    why: str
    """What is wrong, with its figures; when it ends, what is right again."""
    do: str
    """What to do about it."""
    time_s: float
    """When it is said, seconds since 1970."""
    since_s: float
    """When it began."""
    run: str
    step: int | None = None
    """The run's newest step."""
    subject: str = ""
    """What it is about, if there can be several: a node, a disk."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


class Alerts:
    """The alerts of one run, from look to look."""

    def __init__(self, settings: AlertsConfig, state: dict[str, Any] | None = None):
        """`state`: what an earlier process has left in `state`, so that nothing is said twice."""
        self._settings = settings
        self.state: dict[str, Any] = state if state is not None else {}
        """Alert and subject -> what was said of it; JSON."""

    def look(self, facts: Facts) -> list[Alert]:
        """Return what is new: alerts that begin, that have gone on for long, and that end."""
        return list(self._look(facts))

    def _look(self, facts: Facts) -> Iterator[Alert]:
        for condition in conditions(facts, self._settings):
            key = f"{condition.alert} {condition.subject}".strip()
            before = self.state.get(key)
            if condition.is_wrong:
                yield from self._wrong(key, before, condition, facts)
            elif before is not None:
                right_since_s = before.setdefault("right_since_s", facts.now_s)
                if facts.now_s - right_since_s >= CALM_S or facts.has_ended:
                    del self.state[key]
                    yield _alert(condition, "ends", facts, before["since_s"])

    def _wrong(self, key: str, before: dict[str, Any] | None, condition: Condition, facts: Facts) -> Iterator[Alert]:
        if before is None:
            self.state[key] = {"since_s": facts.now_s, "has_gone_on": False}
            yield _alert(condition, "begins", facts, facts.now_s)
            return
        before.pop("right_since_s", None)
        if not before["has_gone_on"] and facts.now_s - before["since_s"] >= 60 * self._settings.goes_on_minutes:
            before["has_gone_on"] = True
            yield _alert(condition, "goes_on", facts, before["since_s"])


def standing(facts: Facts, settings: AlertsConfig | None = None) -> list[Alert]:
    """Return the alerts of a run for somebody who looks now: those in its events, and what is wrong at this moment.

    Newest first.
    """
    if settings is None:
        settings = facts.run.observe.alerts if facts.run is not None else AlertsConfig()
    told = [alert for event in facts.of("alert")[-REMEMBERED:] if (alert := _of_event(event)) is not None]
    last = {(each.alert, each.subject): each for each in told}
    now = [
        each for each in Alerts(settings).look(facts) if last.get((each.alert, each.subject), _ENDED).state == "ends"
    ]
    return sorted((*told, *now), key=lambda each: -each.time_s)


def _alert(condition: Condition, phase: Phase, facts: Facts, since_s: float) -> Alert:
    return Alert(
        alert=condition.alert,
        state=phase,
        severity="critical" if condition.alert in CRITICAL else "warning",
        why=condition.why,
        do=condition.do if phase != "ends" else "",
        time_s=round(facts.now_s, 3),
        since_s=round(since_s, 3),
        run=facts.run.name if facts.run is not None else "",
        step=newest_step(facts) if len(facts) else None,
        subject=condition.subject,
        evidence=condition.evidence,
    )


_ENDED = Alert("stall", "ends", "warning", "", "", 0.0, 0.0, "")


def _of_event(event: Event) -> Alert | None:
    """Return the alert that an event of the run tells of; None if it is not one of ours."""
    names = {name: event[name] for name in Alert.__dataclass_fields__ if name in event}
    if names.get("alert") not in LOOKS or names.get("state") not in ("begins", "goes_on", "ends"):
        return None
    try:
        return Alert(**names)
    except TypeError:
        return None
