"""What has become of a run, told from its last events and the time of its last sign of life."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from argosy.errors import STOP_SIGNALS

State = Literal["training", "finished", "stopped", "failed", "silent", "dead"]

SILENT_AFTER_S = 120.0
"""A run that shows no sign of life for so long is silent, or for SILENT_STEPS of its steps if that is longer."""
SILENT_STEPS = 20
STARTING_S = 900.0
"""Until its first step after a start, it may be compiling."""
BEGINNINGS = ("start", "generation", "agent_came", "coordinator_started", "worker_started")
STOPPED_BY_SIGNAL = tuple(128 + number for number in STOP_SIGNALS)


@dataclass(frozen=True)
class Condition:
    """The state of a run, and why."""

    state: State
    why: str = ""
    is_gone: bool = False
    """True if its processes ended without a word."""


def condition(
    events: Iterable[dict[str, Any]],
    report: dict[str, Any] | None,
    alive_s: float,
    now_s: float,
    step_s: float | None,
    is_gone: Callable[[], bool] = lambda: False,
) -> Condition:
    """Return the state of a run.

    events: in the order of time; at least the last ones of rank 0, agents and coordinator. alive_s: its last sign of
    life, and now_s the time, in seconds since 1970. step_s: of its last steps; None if there is none. is_gone: returns
    True if the processes that held the run are known to be gone; asked of a run that has not said that it ended.
    """
    begun_s, ended_s = -1.0, -1.0
    finish: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    end: dict[str, Any] = {}
    for event in events:
        if event["event"] in BEGINNINGS:
            begun_s = event["time_s"]
        elif event["event"] == "signal":
            asked = event
        elif event["event"] == "finish":
            finish, ended_s = event, event["time_s"]
        elif event["event"] == "end" and event.get("process") == "rank-0":
            end, ended_s = event, event["time_s"]
    if ended_s >= begun_s and (finish or end):
        return _ended(finish if finish.get("time_s", -1.0) >= begun_s else {}, end, report)
    if begun_s < 0 and report:
        return _ended({}, {}, report)
    if is_gone():
        if asked and asked["time_s"] >= begun_s:
            return Condition("stopped", f"{_signal(asked)} stopped it before its state was saved", True)
        return Condition("dead", "its processes are gone, and no event says why", True)
    quiet_s, allowed_s = now_s - alive_s, SILENT_AFTER_S
    if step_s is None or alive_s - begun_s < STARTING_S:
        allowed_s = STARTING_S if step_s is None else max(allowed_s, STARTING_S - (alive_s - begun_s))
    allowed_s = max(allowed_s, SILENT_STEPS * (step_s or 0.0))
    if quiet_s > allowed_s:
        return Condition("silent", f"no sign of life for {_duration(quiet_s)}, and no event says that it ended")
    return Condition("training")


def _ended(finish: dict[str, Any], end: dict[str, Any], report: dict[str, Any] | None) -> Condition:
    code, why = finish.get("exit_code", 0), str(finish.get("why", ""))
    if code in STOPPED_BY_SIGNAL:
        return Condition("stopped", why)
    if code:
        return Condition("failed", why)
    finished = end.get("finished", finish.get("finished", (report or {}).get("status") == "finished"))
    if finished:
        return Condition("finished")
    paused = end.get("paused_at")
    by = f"paused at step {paused}, as train.pause_at says" if paused else "a signal stopped it"
    return Condition("stopped", f"{by}; its state is saved")


def _signal(event: dict[str, Any]) -> str:
    try:
        return signal.Signals(event["number"]).name
    except (KeyError, ValueError):
        return "a signal"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
