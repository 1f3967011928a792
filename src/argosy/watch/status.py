"""A run in under 2 kB: its state, loss and health, what was expected beside what is measured, what changed, and what to
do next. `argosy status` prints it, and the report and the page's head say the same.
"""

from __future__ import annotations

import json
import math
import shlex
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from argosy.config.section import DURATION, TIME_UNITS
from argosy.engines.record import LaunchedJob
from argosy.errors import ArgosyWarning, UserError
from argosy.observe.panel import duration
from argosy.observe.report import Report
from argosy.observe.terminal import printable
from argosy.plan.cost.estimate import count, seconds
from argosy.watch.alerts import Alert
from argosy.watch.columns import Floats
from argosy.watch.conclusions import Conclusions, conclusions_of
from argosy.watch.linefile import Event, tells_of_the_run
from argosy.watch.overview import line
from argosy.watch.reader import RunReader
from argosy.watch.rules.planner import Advice
from argosy.watch.steps import ends, memory
from argosy.watch.timeline import in_words, words

TREND_STEPS = 50
"""The mean loss of so many last steps is compared with that of as many before them, or of halves of a shorter run."""
LEAST_TREND = 6
TREND_Z = 3.0
"""A loss falls or rises if both means differ by so many standard errors of their difference."""
MOST_CHANGES, MOST_ALERTS = 5, 3
LONGEST_SENTENCE = 160
"""Characters of a sentence that comes from the run's folder."""
MOST_STATUS_BYTES = 1999
"""Limit of a status as JSON: in one that is longer, texts are cut, and fewer alerts and events named."""

Trend = Literal["falls", "flat", "rises", "unknown"]
Health = Literal["good", "warning", "critical"]


class LossStatus(BaseModel):
    """The training loss."""

    now: float | None = None
    """The newest step's; null if it was not finite, or there is none."""
    mean: float | None = None
    """Over the last steps: 50, or half of a shorter run."""
    before: float | None = None
    """Over as many steps before them."""
    trend: Trend = "unknown"
    validation: float | None = None
    """The newest evaluation's."""
    accuracy: float | None = None
    """Its share of pairs that a reward model tells apart."""


class Expected(BaseModel):
    """A figure as it was planned and as it is."""

    planned: list[float] | None = None
    """Low, middle and high: nine times of ten it lies between the first and the last. Of steps: of the whole batch."""
    measured: float | None = None


class ForecastStatus(BaseModel):
    """The end, by the pace so far; low, middle and high of each."""

    left_s: list[float]
    end_s: list[float]
    """Seconds since 1970."""
    cost: list[float] | None = None
    """The whole run's."""
    currency: str = ""


class AlertStatus(BaseModel):
    """An alert that stands."""

    alert: str
    severity: str
    since_s: float
    why: str
    subject: str = ""
    evidence: dict[str, Any] = {}


class RunChange(BaseModel):
    """An event of the run."""

    time_s: float
    event: str
    words: str


class NextAction(BaseModel):
    """The next action for a person, or a script for them."""

    rule: str
    """The reason: a state, an alert or a rule of advice; `none` if nothing does."""
    do: str
    command: str
    """To be typed as it is; for `none`, the command that looks again."""
    plan: str = ""
    """The plan that the planner would take instead, if that is what is advised."""


class RunSummary(BaseModel):
    """`argosy status RUN --json`. Texts come from the run's folder: they are data, whatever they say."""

    run: str
    folder: str
    state: str
    """training, silent, finished, stopped, failed or dead."""
    why: str = ""
    time_s: float
    """Time of this status, seconds since 1970."""
    step: int | None = None
    """Steps that are done."""
    steps: int | None = None
    """Steps to make; null while a run in minutes does not know."""
    tokens: int | None = None
    tokens_per_s: float | None = None
    plan: str | None = None
    devices: int | None = None
    loss: LossStatus = LossStatus()
    health: Health = "good"
    step_s: Expected = Expected()
    memory_bytes: Expected = Expected()
    """The memory of the rank that needs most."""
    cost_so_far: float | None = None
    forecast: ForecastStatus | None = None
    alerts: list[AlertStatus] = []
    """Those that stand, the newest first; at most 3, or 1 where texts are long."""
    changes: list[RunChange] = []
    """Events since `--since`, or the last ones; the newest 5, or fewer where texts are long."""
    more_changes: int = 0
    """Events before these, since `--since`."""
    event: str = ""
    """The newest event: `--since` takes it, so that the next call tells what is new."""
    next: NextAction


def status_of(reader: RunReader, since: str = "") -> RunSummary:
    """Return the status of a run as of the reader's last `refresh`.

    since: tell what changed after it: an `event` of an earlier status, a duration before now such as 10m, or a kind of
    event, of which the last one counts. Raises: UserError if it is none of these.
    """
    found, shown = conclusions_of(reader), line(reader.folder.name, reader)
    facts, predicted, now_s = found.facts, reader.prediction, time.time()
    events = [event for event in reader.events if tells_of_the_run(event["process"]) and in_words(event) is not None]
    since_s = since_time_s(reader.events, since, now_s)
    new = [event for event in events if event["time_s"] > since_s]
    alerts = standing_of(found.alerts)
    measured = memory(reader)["measured_total"]
    summary = RunSummary(
        run=_short(shown["name"]),
        folder=str(reader.folder),
        state=reader.state,
        why=_short(reader.why),
        time_s=round(now_s, 3),
        **{key: shown[key] for key in ("step", "steps", "tokens", "devices")},
        tokens_per_s=_rounded(shown["tokens_per_s"]),
        plan=shown["plan"] and _short(shown["plan"]),
        loss=_loss(reader, shown["validation_loss"], shown["validation_accuracy"]),
        health=_health(reader.state, alerts, found.advice),
        step_s=Expected(
            planned=_ends(predicted.step_s) if predicted and facts.has_whole_batch else None,
            measured=_rounded(
                (reader.report or {}).get("step_time_s", facts.step_s if facts.step_s > 0 else reader.recent_step_s)
            ),
        ),
        memory_bytes=Expected(
            planned=_ends(predicted.memory_bytes) if predicted else None, measured=_rounded(measured)
        ),
        cost_so_far=_rounded(shown["cost"]),
        forecast=_forecast(found),
        alerts=[_alert(each) for each in alerts[:MOST_ALERTS]],
        changes=[_change(event) for event in new[-MOST_CHANGES:]],
        more_changes=max(0, len(new) - MOST_CHANGES) if since else 0,
        event=f"{reader.events[-1]['time_s']:.3f}" if reader.events else "",
        next=next_action(reader, alerts, found.advice),
    )
    return _fitted(summary, since)


def _fitted(summary: RunSummary, since: str) -> RunSummary:
    """Return the summary with its texts as short, and lists as few, as its JSON needs for `MOST_STATUS_BYTES`."""
    for longest, most in ((LONGEST_SENTENCE, MOST_CHANGES), (80, MOST_CHANGES), (40, MOST_ALERTS), (20, 1)):
        alerts = [
            alert.model_copy(
                update={
                    "why": _short(alert.why, longest),
                    "subject": _short(alert.subject, longest),
                    "evidence": {_short(key, longest): value for key, value in alert.evidence.items()},
                }
            )
            for alert in summary.alerts[:most]
        ]
        changes = summary.changes[-most:]
        fitted = summary.model_copy(
            update={
                "run": _short(summary.run, longest),
                "why": _short(summary.why, longest),
                "alerts": alerts,
                "more_changes": summary.more_changes + (len(summary.changes) - len(changes) if since else 0),
                "changes": [each.model_copy(update={"words": _short(each.words, longest)}) for each in changes],
                "next": summary.next.model_copy(update={"do": _short(summary.next.do, longest)}),
            }
        )
        if len(json.dumps(fitted.model_dump())) <= MOST_STATUS_BYTES:
            break
    return fitted


def since_time_s(events: Iterable[Event], since: str, now_s: float) -> float:
    """Return the time that `since` names, seconds since 1970; before all events if it is empty.

    Raises: UserError if it names none.
    """
    if not since:
        return -math.inf
    if ago := DURATION.fullmatch(since):
        return now_s - float(ago[1]) * TIME_UNITS[ago[2].lower()]
    try:
        time_s = float(since)
    except ValueError:
        times = [event["time_s"] for event in events if event["event"] == since]
        if not times:
            raise UserError(
                f"--since {since}: the run has no such event. Give the `event` of an earlier status, a kind of event "
                "(docs/events.md), or a duration such as 10m."
            ) from None
        return float(max(times))
    if not math.isfinite(time_s):
        raise UserError(f"--since {since}: a time is needed, such as the `event` of an earlier status, or 10m.")
    return time_s


def _loss(reader: RunReader, validation: float | None, accuracy: float | None) -> LossStatus:
    losses = reader.steps["loss"]
    recent = losses[np.abs(losses) <= np.finfo(np.float32).max][-2 * TREND_STEPS :]  # of greater ones no mean is known
    now = float(losses[-1]) if len(losses) else math.nan
    half = len(recent) // 2
    before, last = recent[:half], recent[half:]
    means = (_rounded(last.mean()), _rounded(before.mean())) if half else (None, None)
    return LossStatus(
        now=_rounded(now),
        mean=means[0],
        before=means[1],
        trend=_trend(before, last),
        validation=_rounded(validation),
        accuracy=_rounded(accuracy),
    )


def _trend(before: Floats, last: Floats) -> Trend:
    if len(before) < LEAST_TREND:
        return "unknown"
    error = math.sqrt(before.var(ddof=1) / len(before) + last.var(ddof=1) / len(last))
    change = float(last.mean() - before.mean())
    if abs(change) <= TREND_Z * error:
        return "flat"
    return "falls" if change < 0 else "rises"


def standing_of(alerts: Iterable[Alert]) -> list[Alert]:
    """Return the newest message of each alert, of those that have not ended."""
    newest: dict[tuple[str, str], Alert] = {}
    for alert in alerts:  # the newest first
        newest.setdefault((alert.alert, alert.subject), alert)
    return [alert for alert in newest.values() if alert.state != "ends"]


def _health(state: str, alerts: list[Alert], advice: Iterable[Advice]) -> Health:
    if state in ("failed", "dead") or any(alert.severity == "critical" for alert in alerts):
        return "critical"
    goes_on = state not in ("finished", "stopped")  # of what is over, nobody can follow the advice any more
    if state == "silent" or alerts or (goes_on and any(each.severity == "warning" for each in advice)):
        return "warning"
    return "good"


def next_action(reader: RunReader, alerts: list[Alert], advice: Iterable[Advice]) -> NextAction:
    """Return what is to be done now: by the run's state, else its gravest alert, else the advice that counts most."""
    folder = shlex.quote(str(reader.folder))
    again = _resume(reader)
    uses = {"pretrain": "generate", "reward": "evaluate"}  # as `argosy train` says at its end
    use = uses.get(reader.run.train.objective, "chat") if reader.run is not None else "generate"
    states = {
        "finished": ("It is done: try it.", f"argosy {use} {folder}"),
        "stopped": ("The same command goes on from what is saved.", again),
        "dead": ("Its processes are gone. The same command goes on from what is saved.", again),
        "failed": ("Mend what the reason says; then the same command goes on.", again),
        "silent": ("See what each rank waits for.", f"argosy stacks {folder}"),
    }
    pause_at = reader.run.train.pause_at if reader.run is not None else 0
    if 0 < pause_at <= reader.last_line.get("step", -1) + 1:
        states["stopped"] = "It paused, as train.pause_at says. Go on without that key.", f"{again} --train.pause-at 0"
    if reader.state in states:
        do, command = states[reader.state]
        return NextAction(rule=reader.state, do=do, command=command)
    for alert in sorted(alerts, key=lambda each: each.severity != "critical"):
        look = "stacks" if alert.alert == "stall" else "logs"
        return NextAction(rule=alert.alert, do=_short(alert.do), command=f"argosy {look} {folder}")
    for each in advice:
        if each.severity == "warning" or each.plan:
            command = f"{again} --plan {shlex.quote(each.plan)}" if each.plan else f"argosy watch {folder} --terminal"
            return NextAction(rule=each.rule, do=_short(each.do), command=command, plan=each.plan)
    return NextAction(rule="none", do="Nothing: it goes well.", command=f"argosy status {folder}")


def _resume(reader: RunReader) -> str:
    """Return the command by which the run goes on."""
    job, on = LaunchedJob.load(reader.folder), []
    if job is not None:
        from argosy.engines.ssh import Ssh  # brings all that starts a job, which few summaries need

        places = ["--hosts", job.id] if job.engine == Ssh.name else ["--nodes", str(job.nodes)] if job.nodes > 1 else []
        on = ["--on", job.engine, *(job.options if job.is_mine and job.options else places)]
    command = "launch" if on else "train"
    return shlex.join(["argosy", command, str(reader.folder / "run.toml"), *on, "--run-dir", str(reader.folder)])


def _forecast(found: Conclusions) -> ForecastStatus | None:
    if (told := found.forecast) is None:
        return None
    cost = None if told.cost is None else _ends(told.cost)
    return ForecastStatus(left_s=_ends(told.left_s), end_s=_ends(told.end_s, 1), cost=cost, currency=told.currency)


def _alert(alert: Alert) -> AlertStatus:
    evidence = {_short(key, 40): value for key, value in alert.evidence.items() if isinstance(value, int | float)}
    return AlertStatus(
        alert=alert.alert,
        severity=alert.severity,
        since_s=alert.since_s,
        why=_short(alert.why),
        subject=_short(alert.subject),
        evidence=dict(list(evidence.items())[:4]),
    )


def _change(event: Event) -> RunChange:
    told = in_words(event)
    return RunChange(time_s=event["time_s"], event=event["event"], words=_short(told[0] if told else words(event)))


def _short(text: str, longest: int = LONGEST_SENTENCE) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a number with so many significant digits; None for what is not finite: JSON has no such number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def _ends(estimate: Any, decimals: int | None = None) -> list[float]:
    return [float(f"{each:.4g}") if decimals is None else round(each, decimals) for each in ends(estimate)]


def in_text(status: RunSummary) -> Iterator[str]:
    """Yield the lines that say a status to a person."""
    of = "" if status.steps is None else f" of {status.steps}"
    where = "no step yet" if status.step is None else f"step {status.step}{of}"
    health = "" if status.health == "good" else f"   {status.health}"
    yield f"{status.run}: {status.state}, {where}{health}" + (f"   ({status.why})" if status.why else "")
    yield from (f"  {name:9}{text}" for name, text in _facts(status) if text)
    for alert in status.alerts:
        subject = f" {alert.subject}:" if alert.subject else ""
        yield f"  alert    {alert.alert} for {duration(status.time_s - alert.since_s)}:{subject} {alert.why}"
    for change in status.changes:
        yield f"  event    {duration(max(0.0, status.time_s - change.time_s))} ago: {change.words}"
    yield f"next: {status.next.do}"
    yield f"  {status.next.command}"


def _facts(status: RunSummary) -> Iterator[tuple[str, str]]:
    loss = status.loss
    if loss.now is not None or loss.mean is not None:
        last = "not finite" if loss.now is None else f"{loss.now:.4g}"
        trend = "" if loss.trend == "unknown" else f", {loss.trend} ({loss.before:.4g} to {loss.mean:.4g})"
        validation = "" if loss.validation is None else f", validation {loss.validation:.4g}"
        accuracy = "" if loss.accuracy is None else f", {loss.accuracy:.1%} of pairs"
        yield "loss", f"{last}{trend}{validation}{accuracy}"
    yield "step", _beside(status.step_s, seconds)
    yield "memory", _beside(status.memory_bytes, lambda value: f"{float(value) / 1e6:,.0f} MB")
    if status.tokens is not None:
        rate = f", {count(status.tokens_per_s)} a second" if status.tokens_per_s else ""
        yield "tokens", f"{count(status.tokens)}{rate}"
    if (told := status.forecast) is not None:
        low, mid, high = told.left_s
        cost = "" if told.cost is None else f"; {told.cost[1]:,.2f} {told.currency} in all"
        yield "left", f"{seconds(mid)} ({seconds(low)} to {seconds(high)}){cost}"
    if status.plan:
        yield "plan", status.plan


def _beside(figure: Expected, write: Any) -> str:
    planned = f"planned {write(figure.planned[1])}" if figure.planned else ""
    measured = write(figure.measured) if figure.measured is not None else ""
    return ", ".join(part for part in (measured, planned) if part)


def ending_in_words(run_dir: Path, report: Report) -> str:
    """Return the status of a run that has finished, without what to do next, and its report."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ArgosyWarning)  # this command has shown them
            status = status_of(RunReader.read(run_dir))
        what_next = ("next:", f"  {status.next.command}")
        head = [line for line in in_text(status) if not line.startswith(what_next)]
    except Exception as problem:  # whatever the folder holds: the run is done, and its report is what counts
        head = [f"no status: {type(problem).__name__}: {problem}"[:200]]
    return "\n".join([*map(printable, head), report.in_words()])
