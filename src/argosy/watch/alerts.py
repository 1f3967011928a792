"""Alerts: what a person should know now. Each begins, may go on, and ends; each of these is said once.

Checks look at the facts and say of their subjects what is wrong, and what is right again; between the two (less than
enough, more than little) they say nothing. An alert ends only when all was right for a while, so that it does not
flap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from argosy.config.observe import AlertKind, AlertsConfig
from argosy.plan.cost.estimate import percent, seconds
from argosy.watch.facts import Event, RunFacts, median
from argosy.watch.rules.learning import spikes, warmup_key
from argosy.watch.rules.ranks import agent_of, node_of

STALL_STEPS, STALL_LONGEST = 20.0, 3.0
"""A run stalls if no step ends for so many usual ones, and for so many times the longest of the last ones: evaluations
and saves are part of those."""
PACE_STEPS = 50
"""Steps whose pace a stall is judged by."""
CLEARED_BY = 1.5
"""A limit that was passed must be left behind by this factor."""
DOUBT_S = 600.0
"""A node is in doubt until nothing was found on it for so long, or a new world began."""
UNVERIFIED_S = 1800.0
INTERVALS = 3.0
FINDINGS = {
    "straggler": "Look at the machine; Advice says what it costs.",
    "slow_link": "Look at the network between the nodes.",
    "suspect": "Its numbers were found wrong: its machine is checked, and is best taken out of the run.",
    "node_refused": "It computes wrongly: have it repaired.",
    "node_slow": "It is much slower than the others: look at clocks and at other programs.",
    "oom_kill": "Its memory is too small for its processes.",
    "memory_low": "Its memory runs out: end other programs, or use fewer processes there.",
    "disk_failed": "Its disk fails: have it replaced.",
    "disk_slow": "Its disk is slow: look for other programs that write.",
    "limit_near": "Raise the limit, or end other programs there.",
    "clock_jump": "Let the machine keep its time (chrony, ntp).",
    "hang": "The ranks are replaced; if it comes back, look at the machine.",
    "frozen": "The ranks are replaced; if it comes back, look at the machine.",
    "stopped": "The ranks are replaced; somebody has stopped them (SIGSTOP).",
    "stuck_loader": "Look at the storage of the data.",
    "mismatch": "The ranks are replaced; if it comes back, code of yours communicates on some ranks only.",
    "corruption": "Replicas differ: have the machine checked.",
    "gradient_corrupt": "A gradient was wrong: have the machine checked.",
    "collective_corrupt": "A sum was wrong: have network and machine checked.",
}
"""Findings of detectors that put a node in doubt -> what to do."""


@dataclass(frozen=True)
class AlertCondition:
    """The finding of one check of the facts about one subject."""

    is_wrong: bool
    """False: it is right again."""
    why: str
    do: str = ""
    subject: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[RunFacts, AlertsConfig], Iterable[AlertCondition]]


def newest_step(facts: RunFacts) -> int:
    """Return the run's newest step; -1 before the first."""
    return int(facts.column("step", slice(-1, None))[0]) if len(facts) else -1


def conditions(facts: RunFacts, settings: AlertsConfig) -> Iterator[tuple[AlertKind, AlertCondition]]:
    """Yield what the facts say of all alerts that the settings ask for."""
    for alert in settings.on:
        yield from ((alert, condition) for condition in CHECKS[alert](facts, settings))


def spike(facts: RunFacts, settings: AlertsConfig) -> Iterator[AlertCondition]:
    """Tell of a loss or a gradient norm far above those before it."""
    bad = [event for event in facts.of("bad_step") if event.get("reason") != "not_finite"]
    applied = spikes(facts)
    newest = max([int(event["step"]) for event in bad[-1:]] + list(applied)[-1:], default=None)
    if newest is None:
        return
    if newest_step(facts) - newest < settings.spike_steps:
        seen = [event for event in bad if int(event["step"]) == newest]
        if seen:
            what = f"loss {seen[0].get('loss')}, gradient norm {seen[0].get('grad_norm')}"
            done = f"; its samples: {seen[0].get('outcome', '')}"
        else:
            what, done = f"loss {applied[newest][0]:.4g}", ", and it was applied"
        do = "Nothing, if it stays at one. If they repeat: lower optimizer.lr, or look at the samples."
        yield AlertCondition(True, f"step {newest} spiked: {what}{done}", do, evidence={"step": newest})
    else:
        yield AlertCondition(False, f"{settings.spike_steps} good steps since step {newest}")


def nan(facts: RunFacts, settings: AlertsConfig) -> Iterator[AlertCondition]:
    """Tell of a loss or a gradient norm that is not finite."""
    lost = [int(event["step"]) for event in facts.of("bad_step") if event.get("reason") == "not_finite"]
    loss = facts.column("loss", slice(max(0, len(facts) - 4 * settings.spike_steps), None))
    steps = facts.column("step", slice(max(0, len(facts) - 4 * settings.spike_steps), None))
    lost += steps[~np.isfinite(loss)].astype(int).tolist()
    if not lost:
        return
    newest = max(lost)
    if newest_step(facts) - newest < settings.spike_steps:
        do = "Lower optimizer.lr; with fp16 or fp8 try bf16. The events name its samples. In a new run, raise "
        do += f"{warmup_key(facts)}."
        yield AlertCondition(True, f"step {newest} was not finite", do, evidence={"steps": sorted(set(lost))[-10:]})
    else:
        yield AlertCondition(False, f"{settings.spike_steps} finite steps since step {newest}")


def stall(facts: RunFacts, settings: AlertsConfig) -> Iterator[AlertCondition]:
    """Tell that no step has ended for long, by the run's own pace."""
    if facts.state not in ("training", "silent"):
        if facts.has_ended:
            yield AlertCondition(False, "the run has ended")
        return
    last_s, limit_s = _pace(facts, settings)
    silent_s = facts.now_s - last_s
    if not np.isfinite(silent_s):
        return
    if silent_s > limit_s:
        do = "See what each rank waits for: `argosy stacks RUN`. Hanging ranks are replaced after resilience.hang_s."
        evidence = {"silent_s": round(silent_s, 1), "limit_s": round(limit_s, 1)}
        why = (
            f"no step has ended for {seconds(silent_s)}; a usual one takes {seconds(facts.step_s)}"
            if len(facts)
            else (f"no step has ended in {seconds(silent_s)} since the start")
        )
        yield AlertCondition(True, why, do, evidence=evidence)
    else:
        yield AlertCondition(False, f"step {newest_step(facts)} has ended")


def dead(facts: RunFacts, settings: AlertsConfig) -> Iterator[AlertCondition]:
    """Tell that a run failed, or that nothing of it lives that would write."""
    if facts.state == "failed":
        ends = facts.of("finish", "replan_failed")
        why = str(ends[-1].get("why", "")) if ends else ""
        yield AlertCondition(
            True, f"the run has failed{f': {why}' if why else ''}", "Look at its logs; the same command goes on."
        )
    elif facts.state == "dead":
        do = "The same command goes on from the newest checkpoint."
        yield AlertCondition(True, "its processes are gone, and no event says why", do)
    elif facts.state == "silent":
        silent_s = facts.now_s - facts.last_line_s
        do = "Its machine or its launcher is gone: the same command goes on from the newest checkpoint."
        yield AlertCondition(True, f"nothing was written for {seconds(silent_s)}, and no end", do)
    else:
        yield AlertCondition(False, "the run goes on" if facts.state == "training" else f"the run has {facts.state}")


def disk_filling(facts: RunFacts, settings: AlertsConfig) -> Iterator[AlertCondition]:
    """Tell that a disk is nearly full, or will be soon at the rate at which it fills."""
    found = {_node(event): event for event in facts.of("disk_full")}
    full = {node: event for node, event in found.items() if facts.now_s - float(event["time_s"]) < DOUBT_S}
    for node, event in full.items():
        yield AlertCondition(True, str(event.get("why", "")), _DISK, node)
    said = {str(event.get("subject", "")) for event in facts.of("alert") if event.get("alert") == "disk_filling"}
    for node in sorted((found.keys() | said) - full.keys() - {disk.node for disk in facts.disks}):
        # No line will tell of it: the node has left, or no node has this name.
        yield AlertCondition(False, "nothing tells of it any more", subject=node)
    for disk in facts.disks:
        free_gb = float(disk.free_bytes[-1]) / 1e9
        left_h = _hours_left(disk.time_s, disk.free_bytes)
        soon = f", and at the present rate it is full in {seconds(3600 * left_h)}" if np.isfinite(left_h) else ""
        evidence = {"free_gb": round(free_gb, 2), "hours_left": round(left_h, 2) if np.isfinite(left_h) else None}
        why = f"{free_gb:.1f} GB are free on the disk of {disk.node}{soon}"
        if free_gb < settings.disk_free_gb or left_h < settings.disk_hours:
            yield AlertCondition(True, why, _DISK, disk.node, evidence)
        elif free_gb > CLEARED_BY * settings.disk_free_gb and left_h > CLEARED_BY * settings.disk_hours:
            yield AlertCondition(False, why, subject=disk.node)


_DISK = "Delete old checkpoints or other files, or lower checkpoint.keep_last; saves fail on a full disk."


def node_in_doubt(facts: RunFacts, settings: AlertsConfig) -> Iterator[AlertCondition]:
    """Tell what detectors found wrong with ranks or nodes."""
    worlds = [float(event["time_s"]) for event in facts.of("generation")[-1:]]
    newest = {f"{event['event']} {_subject(facts, event)}": event for event in facts.of(*FINDINGS)}
    for event in newest.values():
        kind, subject, at_s = str(event["event"]), _subject(facts, event), float(event["time_s"])
        named = f"{kind} {subject}".strip()
        is_new_world = bool(worlds) and worlds[0] > at_s
        if facts.now_s - at_s < DOUBT_S and not is_new_world and not facts.has_ended:
            why = str(event.get("why") or f"{kind} was found")
            where = "" if subject in why or not subject else f" ({subject})"
            evidence = dict(event.get("evidence") or {}) | {"ranks": list(event.get("ranks") or [])[:64]}
            yield AlertCondition(True, f"{why}{where}", FINDINGS[kind], named, evidence)
        else:
            yield AlertCondition(False, f"nothing more was found ({named})", subject=named)


def low_goodput(facts: RunFacts, settings: AlertsConfig) -> Iterator[AlertCondition]:
    """Tell that little of the last time went into steps that count."""
    window_s = 60 * settings.goodput_minutes
    if facts.has_ended:
        yield AlertCondition(False, "the run has ended")
    if facts.state != "training" or not facts.now_s - facts.continued_s >= window_s:
        return
    times, took = facts.column("time_s"), facts.column("step_time_s")
    first = int(np.searchsorted(times, facts.now_s - window_s))
    if not len(times) or not np.isfinite(times[-1]):
        return
    # The step at hand counts too, up to a usual one: it may be longer than the window.
    usual_s = facts.step_s if facts.step_s > 0 else median(took)
    at_hand_s = float(np.nanmin([facts.now_s - float(times[-1]), usual_s]))
    share = min(1.0, (float(np.nansum(took[first:])) + max(0.0, at_hand_s)) / window_s)
    why = f"{percent(share)} of the last {settings.goodput_minutes:g} minutes went into steps that count"
    if share < settings.goodput:
        do = "Advice and the events say what took the rest: stops, steps made again, checkpoints, evaluation."
        yield AlertCondition(True, why, do, evidence={"goodput": round(share, 4)})
    elif share > min(1.0, 1.2 * settings.goodput):
        yield AlertCondition(False, why)


def checkpoint_unverified(facts: RunFacts, settings: AlertsConfig) -> Iterator[AlertCondition]:
    """Tell that for long no checkpoint was read back and found whole."""
    run = facts.run
    if facts.has_ended:
        yield AlertCondition(False, "the run has ended")
    if run is None or facts.state != "training" or not (run.checkpoint.every_steps or run.checkpoint.every_minutes):
        return
    if facts.plan is not None and facts.plan.has_servers:  # they save, and their worker does not
        return
    whole = [float(event["time_s"]) for event in (*facts.of("verified")[-1:], *facts.of("resume")[-1:])]
    since_s = float(np.fmax(max(whole, default=float("nan")), facts.continued_s))
    limit_s = 60 * settings.unverified_minutes or max(UNVERIFIED_S, INTERVALS * _save_interval_s(facts))
    age_s = facts.now_s - since_s
    if age_s > limit_s:
        what = "since the start" if not whole else "since the last one"
        do = "Look at the disk and at events save_failed and damaged_checkpoint: a failure now loses all since then."
        why = f"no checkpoint was found whole in {seconds(age_s)}, {what}"
        yield AlertCondition(True, why, do, evidence={"age_s": round(age_s, 1)})
    elif age_s <= limit_s:
        yield AlertCondition(False, "a checkpoint was read back and is whole")


CHECKS: dict[AlertKind, Check] = {
    "spike": spike,
    "nan": nan,
    "stall": stall,
    "dead": dead,
    "disk_filling": disk_filling,
    "node_in_doubt": node_in_doubt,
    "low_goodput": low_goodput,
    "checkpoint_unverified": checkpoint_unverified,
}
"""Alert -> its check."""


def _pace(facts: RunFacts, settings: AlertsConfig) -> tuple[float, float]:
    """Return when the newest step ended, and how long the next may take."""
    start_s = max([float(start["time_s"]) for start in facts.starts[-1:]], default=float("nan"))
    first_s = facts.run.resilience.first_step_s if facts.run is not None else 600.0
    if not len(facts):
        return start_s, first_s
    times = facts.column("time_s", slice(-PACE_STEPS, None))
    since = times[~(times < start_s) & np.isfinite(times)]  # a pause before the newest start is no step
    longest = float(np.diff(since).max(initial=0.0))
    usual = facts.step_s if facts.step_s > 0 else median(facts.column("step_time_s"))
    last_s = float(np.fmax(facts.last_line_s, start_s))
    return last_s, max(settings.stall_s, STALL_STEPS * usual, STALL_LONGEST * longest, 0.0 if len(since) else first_s)


def _save_interval_s(facts: RunFacts) -> float:
    assert facts.run is not None
    by_time = 60 * facts.run.checkpoint.every_minutes
    by_steps = facts.run.checkpoint.every_steps * (facts.step_s if facts.step_s > 0 else 0.0)
    return min(each for each in (by_time, by_steps) if each > 0) if by_time or by_steps else 0.0


def _hours_left(time_s: np.ndarray, free_bytes: np.ndarray) -> float:
    """Return the hours until a disk is full at the rate of the last lines; infinite if it does not fill.

    Saves write much at once and old checkpoints are deleted, so that the line is fitted by the median of slopes between
    points half the window apart (Theil 1950), and wants ten minutes.
    """
    if len(time_s) < 6 or time_s[-1] - time_s[0] < 600:
        return float("inf")
    half = len(time_s) // 2
    slopes = (free_bytes[half:] - free_bytes[: len(free_bytes) - half]) / (time_s[half:] - time_s[: len(time_s) - half])
    slope = float(np.median(slopes))
    return float(free_bytes[-1]) / -slope / 3600 if slope < 0 else float("inf")


def _subject(facts: RunFacts, event: Event) -> str:
    """Return what a finding is about: ranks, or the node of the agent that found it."""
    ranks = [int(rank) for rank in event.get("ranks") or ([event["rank"]] if event.get("rank") is not None else [])]
    if not ranks:
        return _node(event)
    named = ", ".join(map(str, ranks[:4])) + (" and more" if len(ranks) > 4 else "")
    node = node_of(facts, ranks[0])
    return f"rank {named}{f' on {node}' if node else ''}"


def _node(event: Event) -> str:
    return str(event.get("node") or agent_of(event))


CALM_S = 30.0
"""All must be right for so long before an alert ends: a node that comes and goes is one alert."""
ALERT_MEMORY = 256
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
    """The reason, with its figures; when it ends, what is right again."""
    do: str
    """The remedy."""
    time_s: float
    """Time of this message, seconds since 1970."""
    since_s: float
    """Time at which it began."""
    run: str
    step: int | None = None
    """The run's newest step."""
    subject: str = ""
    """The node or disk that it is about, if there can be several."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Alerts:
    """The alerts of one run, from look to look."""

    def __init__(self, settings: AlertsConfig, state: dict[str, Any] | None = None):
        """`state`: what an earlier process has left in `state`, so that nothing is said twice."""
        self._settings = settings
        self.state: dict[str, Any] = state if state is not None else {}
        """Alert and subject -> what was said of it; JSON."""

    def look(self, facts: RunFacts) -> list[Alert]:
        """Return what is new: alerts that begin, that have gone on for long, and that end."""
        return list(self._look(facts))

    def _look(self, facts: RunFacts) -> Iterator[Alert]:
        for alert, condition in conditions(facts, self._settings):
            key = f"{alert} {condition.subject}".strip()
            before = self.state.get(key)
            if condition.is_wrong:
                yield from self._wrong(key, before, alert, condition, facts)
            elif before is not None:
                right_since_s = before.setdefault("right_since_s", facts.now_s)
                if facts.now_s - right_since_s >= CALM_S or facts.has_ended:
                    del self.state[key]
                    yield _alert(alert, condition, "ends", facts, before["since_s"])

    def _wrong(
        self, key: str, before: dict[str, Any] | None, alert: AlertKind, condition: AlertCondition, facts: RunFacts
    ) -> Iterator[Alert]:
        if before is None:
            self.state[key] = {"since_s": facts.now_s, "has_gone_on": False}
            yield _alert(alert, condition, "begins", facts, facts.now_s)
            return
        before.pop("right_since_s", None)
        if not before["has_gone_on"] and facts.now_s - before["since_s"] >= 60 * self._settings.goes_on_minutes:
            before["has_gone_on"] = True
            yield _alert(alert, condition, "goes_on", facts, before["since_s"])


def standing(facts: RunFacts) -> list[Alert]:
    """Return the alerts of a run now: those in its events, and what is wrong at this moment.

    Newest first.
    """
    settings = facts.run.observe.alerts if facts.run is not None else AlertsConfig()
    told = [alert for event in facts.of("alert")[-ALERT_MEMORY:] if (alert := _of_event(event)) is not None]
    last = {(each.alert, each.subject): each for each in told}
    now = [
        each for each in Alerts(settings).look(facts) if last.get((each.alert, each.subject), _ENDED).state == "ends"
    ]
    return sorted((*told, *now), key=lambda each: -each.time_s)


def _alert(alert: AlertKind, condition: AlertCondition, phase: Phase, facts: RunFacts, since_s: float) -> Alert:
    return Alert(
        alert=alert,
        state=phase,
        severity="critical" if alert in CRITICAL else "warning",
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


_ALERT = TypeAdapter(Alert)


def _of_event(event: Event) -> Alert | None:
    """Return the alert that an event of the run tells of; None if it is not one of ours."""
    try:
        return _ALERT.validate_python({name: event[name] for name in Alert.__dataclass_fields__ if name in event})
    except ValidationError:
        return None
