"""Conclusions about a run: its facts, gathered from what was read of its folder; advice by rules that state their
evidence, the forecast and the alerts, drawn anew only when the folder tells more.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from argosy.observe.events import from_the_end
from argosy.observe.records import Record
from argosy.watch.alerts import Alert, standing
from argosy.watch.columns import Floats, rows_of
from argosy.watch.facts import RECENT, DeviceSeen, DiskSeen, RankTable, RunFacts
from argosy.watch.forecast import Forecast, forecast
from argosy.watch.metrics_table import FIRST_KEYS
from argosy.watch.reader import RunReader
from argosy.watch.rules import learning, ranks, reliability, times
from argosy.watch.rules.planner import Advice, Planner, Rule
from argosy.watch.rules.ranks import slow_ranks
from argosy.watch.rules.stops import StopsSoFar, stops_so_far
from argosy.watch.timeline import ENDED_RUN_STATES

READ_NODES = 64
"""Up to this many nodes, all lines about the last steps are read; beyond, the newest line of each, from memory."""
MOST_CONCLUSION_LINES = 60
DISK_S = 3600.0
"""The free space of disks is looked at over so long."""
OWN_STEPS = 50
"""Steps whose own work is compared between ranks."""
KNOWN = 4000
"""Last lines of a longer run that keys other than `FIRST_KEYS` are read from: all of them would be gigabytes."""
FRESH_S = 600.0
"""A node's line that is so much older than the newest one tells nothing of now."""


def facts_of(reader: RunReader, now_s: float | None = None) -> RunFacts:
    """Return the facts of the run as of the reader's last `refresh`.

    now_s: seconds since 1970; default: now, or of a run that has ended, when it last said something.
    """
    if now_s is None:
        now_s = reader.alive_s if reader.state in ENDED_RUN_STATES and reader.alive_s else time.time()
    first_step = float(reader.steps["step"][-RECENT:][:1].max(initial=0.0))
    lines = dict(_lines(reader, first_step))
    power_w, power_source = _power(lines)
    return RunFacts(
        now_s=now_s,
        state=reader.state,
        run=reader.run,
        plan=reader.plan,
        prediction=reader.prediction,
        report=reader.report,
        steps=reader.steps if len(reader.steps) <= KNOWN else _Newest(reader),
        evaluations=reader.evaluations,
        events=reader.events,
        ranks=_ranks(lines),
        devices=tuple(_devices(lines)),
        disks=tuple(_disks(reader, now_s)),
        power_w=power_w,
        power_source=power_source,
        folder=str(reader.folder),
    )


class _Newest:
    """The columns of a long run: `FIRST_KEYS` of all steps; of other keys the last values, NaN before."""

    def __init__(self, reader: RunReader):
        # All stay as long as they are now: conclusions are drawn when they are asked for, and the run may have grown.
        self._of_all = {key: reader.steps[key] for key in FIRST_KEYS}
        self._path = reader.folder / "metrics.jsonl"

    @cached_property
    def _last(self) -> dict[str, Floats]:
        lines = (line for line in from_the_end(self._path) if "loss" in line)
        return rows_of(list(islice(lines, KNOWN))[::-1])

    def __getitem__(self, key: str) -> Floats:
        if key in FIRST_KEYS:
            return self._of_all[key]
        steps = self._of_all["step"]
        column = np.full(len(steps), np.nan)
        if key in self._last:
            at = np.minimum(np.searchsorted(steps, self._last["step"]), len(steps) - 1)
            is_there = steps[at] == self._last["step"]
            column[at[is_there]] = self._last[key][is_there]
        return column

    def keys(self) -> list[str]:
        return list({**dict.fromkeys(FIRST_KEYS), **dict.fromkeys(self._last)})


def _lines(reader: RunReader, first_step: float) -> Iterator[tuple[str, list[Record]]]:
    """Yield each node's lines about the last steps; nodes that have fallen silent are left out."""
    newest_s = max((series.last.get("time_s", 0.0) for series in reader.nodes.values()), default=0.0)
    for node, series in reader.nodes.items():
        if not series.last or series.last["time_s"] < newest_s - FRESH_S:
            continue
        few = len(reader.nodes) <= READ_NODES
        lines = (
            reader.node_records(node, first_step, most=MOST_CONCLUSION_LINES)[0][-MOST_CONCLUSION_LINES:] if few else []
        )
        yield node, lines or [series.last]


def _ranks(lines: dict[str, list[Record]]) -> RankTable | None:
    newest = max((line.get("generation", 0) for each in lines.values() for line in each), default=-1)
    of_node = {
        node: current
        for node, each in lines.items()
        if (current := [line for line in each if line.get("generation", 0) == newest and line.get("ranks")])
    }
    # Of all lines: a rank that has died is in none of the last ones.
    places = sorted({rank: node for node, each in of_node.items() for line in each for rank in line["ranks"]}.items())
    if not places:
        return None
    numbers = np.array([rank for rank, _ in places])
    told = {step for each in of_node.values() for line in each for step, _ in line.get("own", ())}
    steps = np.array(sorted(told)[-OWN_STEPS:], dtype=np.int64)
    own_s = np.full((len(steps), len(numbers)), np.nan)
    microbatches = np.ones_like(own_s)
    row_of = {int(step): row for row, step in enumerate(steps)}
    for each in of_node.values():
        for line in each:
            at = _places(line, numbers)
            told_from = dict(line.get("microbatches", ()))
            many = np.ones(len(at))
            for step, values in line.get("own", ()):
                many = np.array(told_from[step], dtype=float) if len(told_from.get(step, ())) == len(at) else many
                if step in row_of and len(values) == len(at):
                    own_s[row_of[step], at] = values
                    microbatches[row_of[step], at] = np.maximum(many, 1.0)
    seconds, memory = _means(of_node, numbers)
    return RankTable(numbers, tuple(node for _, node in places), steps, own_s, seconds, memory, microbatches)


def _places(line: Record, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.searchsorted(numbers, np.array(line["ranks"], dtype=np.int64))


def _means(of_node: dict[str, list[Record]], numbers: NDArray[np.int64]) -> tuple[dict[str, Floats], Floats | None]:
    """Return the mean seconds of each category, and the peak memory, by rank, of the newest line of each node."""
    seconds: dict[str, Floats] = {}
    memory = np.full(len(numbers), np.nan)
    for each in of_node.values():
        line = next((line for line in reversed(each) if line.get("seconds")), each[-1])  # some end no step
        at = _places(line, numbers)
        for category, values in line.get("seconds", {}).items():
            if len(values) == len(at):
                seconds.setdefault(category, np.full(len(numbers), np.nan))[at] = values
        if len(line.get("memory_bytes", ())) == len(at):
            memory[at] = line["memory_bytes"]
    return seconds, memory if np.isfinite(memory).any() else None


def _devices(lines: dict[str, list[Record]]) -> Iterator[DeviceSeen]:
    """Yield each device, with its means over the lines."""
    for node, each in lines.items():
        for number, device in enumerate(each[-1].get("devices", ())):
            same = [line["devices"][number] for line in each if len(line.get("devices", ())) > number]
            yield DeviceSeen(
                node=node,
                ranks=tuple(device.get("ranks", ())),
                name=str(device.get("name", "")),
                **{key: _mean(same, key) for key in ("utilisation", "temperature_c", "clock_mhz", "power_w")},
            )


def _disks(reader: RunReader, now_s: float) -> Iterator[DiskSeen]:
    for node, series in reader.nodes.items():
        few = len(reader.nodes) <= READ_NODES
        lines = series.records(now_s - DISK_S, now_s, MOST_CONCLUSION_LINES)[0] if few else [series.last]
        recent = [line for line in lines if line and line["time_s"] >= now_s - DISK_S]
        free = [(line["time_s"], line.get("host", {}).get("disk_free_bytes")) for line in recent]
        found = np.array([pair for pair in free if isinstance(pair[1], int | float)], dtype=float)
        if len(found):
            yield DiskSeen(node, found[:, 0], found[:, 1])


def _power(lines: dict[str, list[Record]]) -> tuple[float | None, str]:
    """Return the mean power of all nodes over their lines, W, and where it is from.

    By their totals: of many lines only some are read, and between two of them the run may have been stopped.
    """
    total, sources = 0.0, set()
    for each in lines.values():
        told = [line for line in each if {"total_joules", "total_device_s"} <= line.get("energy", {}).keys()]
        ends = [[told[n]["energy"][key] for n in (0, -1)] for key in ("total_joules", "total_device_s")] if told else []
        joules, device_s = (last - first for first, last in ends) if ends else (0.0, 0.0)
        if device_s <= 0:  # a single line does not say how long it is about
            power = [device.get("power_w") for device in each[-1].get("devices", ())]
            if not power or not all(isinstance(watts, int | float) for watts in power):
                return None, ""
            total += float(sum(power))
            sources.add("nvml")
            continue
        total += joules / device_s * next((len(line["ranks"]) for line in reversed(told) if line.get("ranks")), 0)
        sources |= {str(line["energy"].get("source", "")) for line in told}
    if not sources or total <= 0:
        return None, ""
    return total, "estimate" if "estimate" in sources else sorted(sources)[0]


def _mean(devices: list[Record], key: str) -> float | None:
    values = [float(device[key]) for device in devices if isinstance(device.get(key), int | float)]
    return float(np.mean(values)) if values else None


ADVICE_RULES: tuple[Rule, ...] = (
    ranks.straggler,
    ranks.slow_link,
    ranks.throttled_device,
    reliability.lost_ranks,
    learning.bad_steps,
    learning.growing_gradients,
    learning.learning_rate_ended,
    learning.overfits,
    learning.skewed_experts,
    times.memory_near_limit,
    times.waiting_for_data,
    times.exposed_communication,
    times.pipeline_bubble,
    times.memory_left_over,
    times.recompiles,
    times.slower_than_planned,
    times.idle_devices,
    times.evaluation_share,
    reliability.checkpoint_stalls,
    reliability.checkpoint_interval,
    reliability.low_goodput,
    times.faster_plan,
)
"""All rules. Of those that name the same better plan, the first says it: it knows why."""


def advise(facts: RunFacts, planner: Planner | None = None) -> tuple[Advice, ...]:
    """Return what all rules say, warnings first, and of these what costs most first."""
    planner = planner or Planner(facts)
    said: list[Advice] = []
    for rule in ADVICE_RULES:
        advice = rule(facts, planner)
        if advice is not None and not _is_said(advice, said):
            said.append(advice)
    return tuple(sorted(said, key=lambda each: (each.severity != "warning", -(each.gain_share or 0.0))))


def _is_said(advice: Advice, said: Sequence[Advice]) -> bool:
    """Return True if another rule has said the same with its reason."""
    names = {each.rule for each in said}
    if advice.plan and advice.severity == "info":
        return any(each.plan == advice.plan for each in said)
    if advice.rule == "checkpoint_interval":
        return "checkpoint_stalls" in names
    # A slow rank makes the others wait, and makes steps longer than planned.
    return advice.rule in ("exposed_communication", "slower_than_planned") and "straggler" in names


CONCLUSIONS_OLD_S = 5.0
"""Conclusions of a run that goes on are drawn anew after so long."""


class Conclusions:
    """The conclusions about a run as of its reader's last `refresh`, each drawn when it is first asked for."""

    def __init__(self, reader: RunReader):
        self.made_s = time.monotonic()
        self.version = _version(reader)
        self.facts = facts_of(reader)
        self._planner = Planner(self.facts)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Advice on the run, the most important first."""
        return advise(self.facts, self._planner)

    @cached_property
    def slow_ranks(self) -> tuple[dict[int, float], tuple[int, int]]:
        """Rank -> how many times its peers' time it takes, for ranks that are slow now; and the steps that tell."""
        slow, table = slow_ranks(self.facts), self.facts.ranks
        return slow, (int(table.steps[0]), int(table.steps[-1])) if slow and table is not None else (0, 0)

    @cached_property
    def forecast(self) -> Forecast | None:
        """The forecast of the run's end and cost; None if it has ended, or it is too early to tell."""
        return forecast(self.facts, self._planner)

    @cached_property
    def stops(self) -> StopsSoFar | None:
        """The stops so far by component, beside those to be expected; None for a run that has not trained yet."""
        return stops_so_far(self.facts, self._planner)

    @cached_property
    def alerts(self) -> list[Alert]:
        """The alerts that its events tell of, and those that hold now, the newest first."""
        return standing(self.facts)


_NEWEST: WeakKeyDictionary[RunReader, Conclusions] = WeakKeyDictionary()


def conclusions_of(reader: RunReader) -> Conclusions:
    """Return the conclusions about the reader's run; they are drawn anew if it has said more, or time tells more."""
    found = _NEWEST.get(reader)
    is_fresh = found is not None and time.monotonic() - found.made_s < CONCLUSIONS_OLD_S
    is_final = found is not None and found.facts.has_ended and found.version == _version(reader)
    if found is None or not (is_fresh or is_final):
        found = _NEWEST[reader] = Conclusions(reader)
    return found


def _version(reader: RunReader) -> Hashable:
    return len(reader.steps), len(reader.events), reader.alive_s, reader.state, str(reader.plan)
