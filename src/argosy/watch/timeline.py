"""A run by its events: its state; its wall time, split into training, waiting and recovering; the cost of each fault;
each event in words.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from argosy.errors import STOP_SIGNALS, counted
from argosy.watch.columns import Floats
from argosy.watch.linefile import Event

State = Literal["training", "finished", "stopped", "failed", "silent", "dead"]
ENDED_RUN_STATES: tuple[State, ...] = ("finished", "stopped", "failed", "dead")
"""States in which nothing is trained any more."""
SILENT_AFTER_S = 120.0
"""A run that shows no sign of life for so long is silent, or for SILENT_STEPS of its steps if that is longer."""
SILENT_STEPS = 20
STARTING_S = 900.0
"""Until its first step after a start, it may be compiling."""
BEFORE_START = ("settled", "resume", "recovered")
"""Events of a world that has not started to train: no signs of life of the one before, which may have been killed."""
BEGINNINGS = ("start", "generation", "agent_came", "coordinator_started", "worker_started")
STOPPED_BY_SIGNAL = tuple(128 + number for number in STOP_SIGNALS)


@dataclass(frozen=True)
class RunStatus:
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
) -> RunStatus:
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
            return RunStatus("stopped", f"{_signal(asked)} stopped it before its state was saved", True)
        return RunStatus("dead", "its processes are gone, and no event says why", True)
    quiet_s, allowed_s = now_s - alive_s, SILENT_AFTER_S
    if step_s is None or alive_s - begun_s < STARTING_S:
        allowed_s = STARTING_S if step_s is None else max(allowed_s, STARTING_S - (alive_s - begun_s))
    allowed_s = max(allowed_s, SILENT_STEPS * (step_s or 0.0))
    if quiet_s > allowed_s:
        return RunStatus("silent", f"no sign of life for {_duration(quiet_s)}, and no event says that it ended")
    return RunStatus("training")


def _ended(finish: dict[str, Any], end: dict[str, Any], report: dict[str, Any] | None) -> RunStatus:
    code, why = finish.get("exit_code", 0), str(finish.get("why", ""))
    if code in STOPPED_BY_SIGNAL:
        return RunStatus("stopped", why)
    if code:
        return RunStatus("failed", why)
    finished = end.get("finished", finish.get("finished", (report or {}).get("status") == "finished"))
    if finished:
        return RunStatus("finished")
    paused = end.get("paused_at")
    by = f"paused at step {paused}, as train.pause_at says" if paused else "a signal stopped it"
    return RunStatus("stopped", f"{by}; its state is saved")


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


Phase = Literal["startup", "training", "recovery", "stopped"]
"""startup: from the first process to the first step; recovery: from a break to the next step; stopped: nobody runs."""

CAUSES = ("worker_died", "killed", "stopped", "frozen", "hang", "stuck_loader", "mismatch", "fault", "agent_left")
"""Events that explain a break that follows them."""
CAUSE_S = 120.0
"""An event explains a break if it is no older."""
WENT_BACK = ("rewind", "state_taken", "left_out")
"""Events of a run that may go back by itself, from `step` to `to_step`."""


def steps_gone_back(event: Mapping[str, Any]) -> int:
    """Return the steps that are made again after one of WENT_BACK."""
    step, to_step = event.get("step"), event.get("to_step")
    return max(0, step - to_step) if isinstance(step, int) and isinstance(to_step, int) else 0


DevicePrice = tuple[float, str]
"""The price of an hour of a device, and its currency."""


def _price_in(start: Mapping[str, Any]) -> DevicePrice | None:
    price, currency = start.get("price_per_device_h"), start.get("currency")
    return (float(price), currency) if isinstance(price, int | float) and isinstance(currency, str) else None


@dataclass
class PhaseSpan:
    """Time in which a run was in one phase."""

    phase: Phase
    begin_s: float
    end_s: float
    devices: int
    """Processes of the world, or of the last one."""
    price: DevicePrice | None = None
    """The price that its start gives; None if nobody knew it."""

    @property
    def seconds(self) -> float:
        return max(0.0, self.end_s - self.begin_s)


@dataclass
class RunTimeline:
    """The phases of a run, in order, and what its breaks cost."""

    stretches: list[PhaseSpan] = field(default_factory=list)
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
    def running_s(self) -> float:
        """The part of it in which the run held its devices."""
        return self.wall_s - self.seconds("stopped")

    @property
    def device_hours(self) -> float:
        """Devices times hours in which the run held them."""
        return sum(s.seconds * s.devices for s in self.stretches if s.phase != "stopped") / 3600

    def goodput(self, useful_s: float) -> float | None:
        """Return the share of `running_s` that went into steps that count, of so many seconds; None before any."""
        useful_s = min(useful_s, self.seconds("training"))  # clocks may differ by a little
        return useful_s / self.running_s if self.running_s > 0 else None

    def money(self, now: DevicePrice) -> float:
        """Return the cost of the devices, each world's at its own price; at `now` if it has none in that currency."""
        held = (s for s in self.stretches if s.phase != "stopped")
        own = ((s, s.price if s.price and s.price[1] == now[1] else now) for s in held)
        return sum(s.seconds / 3600 * s.devices * per_hour for s, (per_hour, _) in own)


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
        self._price: DevicePrice | None = None
        self._has_agents = False
        self._break: int | None = None
        self._cause: tuple[int, float] | None = None
        self._lost_steps = 0

    def take(self, index: int, event: Mapping[str, Any]) -> None:
        kind, time_s, process = event["event"], float(event["time_s"]), event.get("process", "rank-0")
        if kind in CAUSES and (self._cause is None or time_s - self._cause[1] > CAUSE_S):
            self._cause = index, time_s
        if kind == "generation" and "size" in event:
            self._devices, self._has_agents = event["size"], True
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
        elif kind in WENT_BACK:
            self._lose(index, {"steps_lost": steps_gone_back(event)})
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
        self._last_s = max(self._last_s, 0.0 if kind in BEFORE_START else time_s)

    def close(self, alive_s: float) -> None:
        """End the last phase, with the last sign of life."""
        if self._phase != "stopped":
            self._enter("stopped", max(alive_s, self._last_s))

    def _begin(self, time_s: float) -> None:
        """Begin, or begin again; a run that did not say that it had ended ended with its last sign of life."""
        if self._phase != "stopped":
            before = int(np.searchsorted(self._signs_s, time_s))
            sign_s = float(self._signs_s[before - 1]) if before else 0.0
            self._enter("stopped", min(time_s, max(self._last_s, sign_s)))
        self._enter("startup", time_s)

    def _start(self, time_s: float, event: Mapping[str, Any]) -> None:
        if event["event"] == "start" and self._phase == "training" and not self._has_agents:  # torchrun, killed
            self._begin(time_s)
        if isinstance(event.get("world_size"), int):
            self._devices = event["world_size"]
        self._price = _price_in(event)
        if self._break is not None and self._phase == "recovery":
            cost_s = time_s - self._since_s + self._lost_steps * self._step_s
            self._found.costs_s[self._break] = self._found.costs_s.get(self._break, 0.0) + cost_s
            self._break = None
        self._enter("training", time_s)

    def _lose(self, index: int, event: Mapping[str, Any]) -> None:
        steps = event.get("steps_lost", 0)
        if steps > 0:
            self._lost_steps = steps
            self._found.lost_s += steps * self._step_s
            if self._break is None:  # the run had died as a whole
                self._found.costs_s[index] = steps * self._step_s

    def _enter(self, phase: Phase, time_s: float) -> None:
        if self._since_s:
            time_s = max(time_s, self._since_s)
            self._found.stretches.append(PhaseSpan(self._phase, self._since_s, time_s, self._devices, self._price))
        self._phase, self._since_s = phase, time_s


def shown_events(events: list[Event], found: RunTimeline, kinds: Iterable[str] | None) -> Iterator[dict[str, Any]]:
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
    kind = event["event"].replace("_", " ")
    parts = [kind]
    if "rank" in event and event["event"] != "fault":
        parts.append(f"rank {event['rank']}")
    if "step" in event and event["event"] in OF_A_STATE:
        parts.append(f"after {counted(event['step'], 'step')}")
    elif "step" in event:
        parts.append(str(event["step"]) if kind.endswith(" step") else f"step {event['step']}")  # bad step 1865
    parts += [event[name] for name in ("site", "node") if name in event]
    facts = [str(event[name]) for name in TELLING if event.get(name)]
    if "steps_lost" in event:
        facts.append(f"{counted(event['steps_lost'], 'step')} lost")
    if isinstance(event.get("seconds"), int | float):
        facts.append(f"{event['seconds']:.3g} s")
    text = " ".join(parts) + (": " + ", ".join(facts) if facts else "")
    return text if len(text) <= LONGEST_WORDS else text[: LONGEST_WORDS - 1] + "…"


GOOD_STYLE, NOTE_STYLE, BAD_STYLE = "green", "yellow", "red"
EVENT_WORDS: dict[str, tuple[str, Callable[[Event], str]]] = {
    "start": ("", lambda e: f"training goes on at step {e['step']}" if e["step"] else "training begins"),
    "recovered": (
        GOOD_STYLE,
        lambda e: f"recovered at step {e['step']} ({e['source']}), {counted(e['steps_lost'], 'step')} lost",
    ),
    "resume": (GOOD_STYLE, lambda e: f"goes on from the checkpoint of step {e['step']}"),
    "save": (GOOD_STYLE, lambda e: f"saved after {counted(e['step'], 'step')}"),
    "save_failed": (BAD_STYLE, lambda e: f"saving failed: {e['error']}"),
    "writer_died": (NOTE_STYLE, lambda e: f"the process that writes checkpoints died: {e['why']}"),
    "drain_failed": (NOTE_STYLE, lambda e: f"copying a checkpoint away failed: {e['error']}"),
    "damaged_checkpoint": (BAD_STYLE, lambda e: f"a checkpoint is damaged: {e['problem']}"),
    "worker_died": (BAD_STYLE, lambda e: f"worker {_of(e, 'rank')} died: {e['why']}"),
    "killed": (NOTE_STYLE, lambda e: f"worker {_of(e, 'rank')} was killed: {e['why']}"),
    "generation": ("", lambda e: f"{_processes(e['size'])} world {e['generation']}"),
    "replan": (NOTE_STYLE, lambda e: f"another plan: {e['plan']}"),
    "rebalanced": (NOTE_STYLE, lambda e: f"shares of microbatches {e['shares'] or 'even'} from step {e['step']} on"),
    "migrated": (NOTE_STYLE, lambda e: f"migrated ({e['because']}): {e['why']}"),
    "node_refused": (BAD_STYLE, lambda e: f"node {e['node']} is refused: {e['why']}"),
    "agent_left": (NOTE_STYLE, lambda e: f"node {e['node']} left: {e['why']}"),
    "coordinator_lost": (NOTE_STYLE, lambda e: f"the coordinator was lost: {e['why']}"),
    "bad_step": (NOTE_STYLE, lambda e: f"step {e['step']} was bad ({e['reason']}): {e['outcome']}"),
    "transient": (NOTE_STYLE, lambda e: f"step {e['step']} looked bad, and was fine when it was repeated"),
    "rewind": (NOTE_STYLE, lambda e: f"went back from step {e['step']} to {e['to_step']}"),
    "corruption": (BAD_STYLE, lambda e: f"replicas differ at step {e['step']}: {e['outcome']}"),
    "gradient_corrupt": (BAD_STYLE, lambda e: f"rank {e['rank']} computed a wrong gradient at step {e['step']}"),
    "collective_corrupt": (BAD_STYLE, lambda e: f"a sum of gradients was wrong at step {e['step']}"),
    "bad_shard": (NOTE_STYLE, lambda e: f"damaged data at step {e['step']}: {e['outcome']}"),
    "fault": (NOTE_STYLE, lambda e: f"a fault was injected: {e['fault']}"),
    "length": ("", lambda e: f"{e['steps']} steps fit in the time"),
    "signal": (NOTE_STYLE, lambda e: f"asked to stop by signal {e['number']}"),
    "profile": ("", lambda e: f"profiled steps {e['steps'][0]} to {e['steps'][1]}"),
    "alert": (BAD_STYLE, lambda e: f"{e['alert']}: {e['why']}"),
}
"""Kind of event -> style (as rich names it), and its words. A kind that is not here is shown if it is a finding."""


def _processes(count: int) -> str:
    return "1 process forms" if count == 1 else f"{count} processes form"


def in_words(event: Event) -> tuple[str, str] | None:
    """Return words and style of an event; None for one that is of no interest here, or says less than it should."""
    kind = event.get("event", "")
    try:
        if kind in EVENT_WORDS:
            style, words = EVENT_WORDS[kind]
            return words(event), style
        if "action" in event and "why" in event:  # a finding
            return str(event["why"]), NOTE_STYLE
    except (KeyError, IndexError, TypeError):  # another version wrote it
        pass
    return None


def _of(event: Event, key: str) -> str:
    value = event.get(key)
    return "" if value is None else str(value)
