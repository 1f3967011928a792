"""A run's wall time, split by its events: training, waiting, recovering; and what each fault cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from argosy.observe.heartbeat import BESIDE
from argosy.watch.columns import Floats
from argosy.watch.linefile import Event
from argosy.watch.reader import RunReader
from argosy.watch.run_files import BEGINNINGS

Phase = Literal["startup", "training", "recovery", "stopped"]
"""startup: from the first process to the first step; recovery: from a break to the next step; stopped: nobody runs."""

CAUSES = ("worker_died", "killed", "stopped", "frozen", "hang", "stuck_loader", "mismatch", "fault", "agent_left")
"""Events that explain a break that follows them."""
CAUSE_S = 120.0
"""An event explains a break if it is no older."""


@dataclass
class Stretch:
    """Time in which a run was in one phase."""

    phase: Phase
    begin_s: float
    end_s: float
    devices: int
    """Processes of the world, or of the last one."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return max(0.0, self.end_s - self.begin_s)


@dataclass
class RunTimeline:
    """The phases of a run, in order, and what its breaks cost."""

    stretches: list[Stretch] = field(default_factory=list)
    costs_s: dict[int, float] = field(default_factory=dict)
    """Index of an event -> seconds that it cost: standstill, and work that was done again."""
    causes: dict[int, int] = field(default_factory=dict)
    """Index of a break -> index of the event that explains it."""
    lost_s: float = 0.0
    """Seconds of steps that were lost and run again."""

    def seconds(self, phase: Phase) -> float:
        """Return how long the run was in `phase`."""
        return sum(stretch.seconds for stretch in self.stretches if stretch.phase == phase)

    @property
    def wall_s(self) -> float:
        """From the first event to the last sign of life."""
        return sum(stretch.seconds for stretch in self.stretches)

    @property
    def device_hours(self) -> float:
        """Devices times hours in which the run held them."""
        return sum(s.seconds * s.devices for s in self.stretches if s.phase != "stopped") / 3600


def timeline(
    events: Sequence[Mapping[str, Any]], alive_s: float, step_s: float | None, signs_s: Floats | None = None
) -> RunTimeline:
    """Return the timeline that these events make up.

    events: in the order of time. alive_s: the last sign of life. step_s: of a usual step, to value steps that were
    lost. signs_s: other signs of life (times of steps, rising), which tell when a run ended that could not say so.
    """
    found = RunTimeline()
    walk = _Walk(found, step_s or 0.0, np.empty(0) if signs_s is None else signs_s)
    for index, event in enumerate(events):
        walk.take(index, event)
    walk.close(alive_s)
    return found


class _Walk:
    """The state on the way along the events."""

    def __init__(self, found: RunTimeline, step_s: float, signs_s: Floats):
        self._found, self._step_s, self._signs_s = found, step_s, signs_s
        self._phase: Phase = "stopped"
        self._since_s = 0.0
        self._last_s = 0.0
        self._devices = 1
        self._break: int | None = None
        self._cause: tuple[int, float] | None = None
        self._lost_steps = 0

    def take(self, index: int, event: Mapping[str, Any]) -> None:
        """Go on by one event."""
        kind, time_s, process = event["event"], float(event["time_s"]), event.get("process", "rank-0")
        if kind in CAUSES and (self._cause is None or time_s - self._cause[1] > CAUSE_S):
            self._cause = index, time_s
        if kind == "generation" and isinstance(event.get("size"), int):
            self._devices = event["size"]
        is_new = kind == "coordinator_started" and not event.get("replaces")
        if is_new or (self._phase == "stopped" and kind in BEGINNINGS):
            self._begin(time_s)
        if kind == "break" and self._phase == "training":
            self._enter("recovery", time_s)
            self._break, self._lost_steps = index, 0
            if self._cause is not None and time_s - self._cause[1] <= CAUSE_S:
                self._found.causes[index] = self._cause[0]
            self._cause = None
        elif kind == "recovered":
            self._lose(index, event)
        elif kind == "server_died" and self._phase == "training":
            self._enter("recovery", time_s)
            self._break, self._lost_steps = index, 0
        elif kind == "servers_begin":
            self._lose(index, event)
            self._start(time_s, event)
        elif kind == "start" and process == "rank-0":
            self._start(time_s, event)
        elif kind in ("finish", "end") and process in ("coordinator", "rank-0", "server-1"):
            self._enter("stopped", time_s)
        elif kind in ("save", "node_checked") and isinstance(event.get("seconds"), int | float):
            self._found.costs_s[index] = float(event["seconds"])
        self._last_s = max(self._last_s, time_s)

    def close(self, alive_s: float) -> None:
        """End the last phase, with the last sign of life."""
        if self._phase != "stopped":
            self._enter("stopped", max(alive_s, self._last_s))

    def _begin(self, time_s: float) -> None:
        """The run begins, or begins again; if it did not say that it had ended, it ended with its last sign of life."""
        if self._phase != "stopped":
            before = int(np.searchsorted(self._signs_s, time_s))
            sign_s = float(self._signs_s[before - 1]) if before else 0.0
            self._enter("stopped", min(time_s, max(self._last_s, sign_s)))
        self._enter("startup", time_s)

    def _start(self, time_s: float, event: Mapping[str, Any]) -> None:
        if isinstance(event.get("world_size"), int):
            self._devices = event["world_size"]
        if self._break is not None and self._phase == "recovery":
            cost_s = time_s - self._since_s + self._lost_steps * self._step_s
            self._found.costs_s[self._break] = self._found.costs_s.get(self._break, 0.0) + cost_s
            self._break = None
        self._enter("training", time_s)

    def _lose(self, index: int, event: Mapping[str, Any]) -> None:
        steps = event.get("steps_lost")
        if isinstance(steps, int) and steps > 0:
            self._lost_steps = steps
            self._found.lost_s += steps * self._step_s
            if self._break is None:  # the run had died as a whole
                self._found.costs_s[index] = steps * self._step_s

    def _enter(self, phase: Phase, time_s: float) -> None:
        if self._since_s:
            time_s = max(time_s, self._since_s)
            self._found.stretches.append(Stretch(self._phase, self._since_s, time_s, self._devices))
        self._phase, self._since_s = phase, time_s


def run_timeline(reader: RunReader) -> RunTimeline:
    """Return the timeline of a run."""
    times = reader.steps["time_s"]
    return timeline(reader.events, reader.alive_s, reader.recent_step_s, times[np.isfinite(times)])


def goodput(reader: RunReader, found: RunTimeline) -> dict[str, Any]:
    """Return where a run's wall time went, in seconds; the parts add up to it.

    useful: steps that count. evaluate, checkpoint, check: beside steps. lost: steps that were run again. other: what
    is left of the training. `goodput` is the share of the useful part, None if there was no time yet.
    """
    training = found.seconds("training")
    parts = {"useful": useful_s(reader)}
    parts |= {name: float(np.nansum(reader.steps[f"seconds.{name}"])) for name in sorted(BESIDE)}
    parts["lost"] = min(found.lost_s, max(0.0, training - sum(parts.values())))
    if (inside := sum(parts.values())) > training:  # a step that began before its world said so, or clocks that differ
        parts = {name: seconds * training / inside for name, seconds in parts.items()}
    parts["other"] = training - sum(parts.values())
    parts |= {phase: found.seconds(phase) for phase in ("startup", "recovery", "stopped")}
    wall_s = found.wall_s
    return {
        "wall_s": wall_s,
        "parts": {name: round(max(0.0, seconds), 3) for name, seconds in parts.items()},
        "goodput": parts["useful"] / wall_s if wall_s > 0 else None,
    }


def useful_s(reader: RunReader) -> float:
    """Return the seconds of the steps that count."""
    return float(np.nansum(reader.steps["step_time_s"]))


def shown_events(
    events: list[Event], found: RunTimeline, kinds: Iterable[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield events with what each cost (`cost_s`, seconds) and what it says in a line (`words`)."""
    wanted = None if kinds is None else set(kinds)
    for index, event in enumerate(events):
        if wanted is None or event["event"] in wanted:
            shown = {**event, "words": words(event)}
            if index in found.costs_s:
                shown["cost_s"] = round(found.costs_s[index], 3)
            if index in found.causes:
                shown["cause"] = words(events[found.causes[index]])
            yield shown


TELLING = ("why", "error", "problem", "fault", "plan", "checkpoint", "because", "source", "outcome")
"""Facts that say most of an event by themselves."""
OF_A_STATE = (
    *("save", "save_failed", "verified", "prune", "drained", "drain_failed"),
    *("start", "end", "resume", "fetched", "recovered"),
)
"""Events whose `step` is that of a state: so many steps were done. That of the others is the number of one step."""
LONGEST_WORDS = 200


def words(event: Event) -> str:
    """Return one line of text about an event."""
    kind = event["event"].replace("_", " ")
    parts = [kind]
    if isinstance(event.get("rank"), int) and event["event"] != "fault":
        parts.append(f"rank {event['rank']}")
    if isinstance(event.get("step"), int) and event["event"] in OF_A_STATE:
        parts.append(f"after {event['step']} steps")
    elif isinstance(event.get("step"), int):
        parts.append(str(event["step"]) if kind.endswith(" step") else f"step {event['step']}")  # bad step 1865
    if isinstance(event.get("site"), str):
        parts.append(event["site"])
    if isinstance(event.get("node"), str):
        parts.append(event["node"])
    facts = [str(event[name]) for name in TELLING if event.get(name)]
    if isinstance(event.get("steps_lost"), int):
        facts.append(f"{event['steps_lost']} steps lost")
    if isinstance(event.get("seconds"), int | float):
        facts.append(f"{event['seconds']:.3g} s")
    text = " ".join(parts) + (": " + ", ".join(facts) if facts else "")
    return text if len(text) <= LONGEST_WORDS else text[: LONGEST_WORDS - 1] + "…"
