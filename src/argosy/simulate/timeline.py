"""The timeline of a step's operations on given devices, drawn from rates and links."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from argosy.plan.cost.collectives import Group, all_reduce_s, all_to_all_s, gather_s, send_s
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.estimate import first_of
from argosy.plan.cost.fabric import Fabric
from argosy.plan.cost.network import group_of
from argosy.plan.cost.rates import Rates
from argosy.plan.hardware.clusters import Cluster
from argosy.simulate.record import Category, Change, Event, Operation, SendEvent, StepPlace, Trace, WaitEvent

COMPUTE = "compute"
"""The track of what the device itself does; each axis has one of its own."""


class Durations:
    """Seconds of operations and messages on a cluster.

    An operation takes as long as its arithmetic or its memory traffic, whichever is longer (the roofline: Williams et
    al. 2009): matmuls at the rate that large ones reach, everything at the specified bandwidth, and nothing to start.
    Messages take what `plan.cost.collectives` says. It is a best case, good for seeing what waits for what.
    """

    def __init__(self, cluster: Cluster, fabric: Fabric | None = None) -> None:
        """`fabric`: the cluster's network with the plan placed on it, if its topology is known."""
        self._rates, self._constants = replace(Rates.of(cluster), fabric=fabric), Constants()

    def of_work(self, work: Operation) -> float:
        half = work.dtype in (torch.bfloat16, torch.float16)
        rates = self._rates
        peak = rates.half * rates.achieved_half if half else rates.fp32 * rates.achieved_fp32
        return float(max(work.flops / peak, work.moved_bytes / rates.memory_bytes_per_s))

    def of_message(self, sent: SendEvent) -> float:
        """Seconds of a collective once all of its ranks have begun."""
        group, size = self._group(sent), sent.message_bytes
        if sent.kind in ("send", "recv"):
            return first_of(send_s(size, group))
        if sent.kind == "all_reduce":
            return first_of(all_reduce_s(size, group))
        return first_of(all_to_all_s(size, group) if sent.kind == "all_to_all" else gather_s(size, group))

    def wires_of(self, sent: SendEvent) -> tuple[str, ...]:
        """Return what a message passes: one of two that pass the same wire waits; axes have wires of their own where
        the topology is not known, or nothing leaves the node."""
        passed = [f"wire {wire}" for wire, passes in self._group(sent).wires if np.any(np.asarray(passes) > 0)]
        return tuple(passed) or (sent.axis,)

    def _group(self, sent: SendEvent) -> Group:
        return group_of(sent.ranks, sent.stride, self._rates, self._constants)


@dataclass(frozen=True)
class Span:
    """Something that takes time."""

    name: str
    track: str
    start_s: float
    duration_s: float
    where: StepPlace


@dataclass
class StepTimeline:
    """One rank's step: the device works through its operations in order, messages travel beside it."""

    spans: list[Span] = field(default_factory=list)
    memory: list[tuple[float, dict[Category, int]]] = field(default_factory=list)
    """Bytes by category, whenever the place in the step changes."""
    waited_s: dict[str, float] = field(default_factory=dict)
    """Seconds that the device waited for the messages of each axis."""
    compute_s: float = 0.0
    """Seconds that it worked."""
    step_s: float = 0.0
    """Time at which everything has ended."""


def draw(traces: Mapping[int, Trace], cluster: Cluster, fabric: Fabric | None = None) -> dict[int, StepTimeline]:
    """Return the timelines of ranks, by rank, on `cluster`, with `fabric` for its network if its topology is known.

    A message between two of these ranks arrives when the other has sent it, and a collective of several of them begins
    when the last has begun it; any other peer is taken to be as far as this rank. So a pipeline's bubble shows if all
    its stages are here.
    """
    begun: Begun = {}
    players = {
        rank: _Player(rank, trace, Durations(cluster, fabric), set(traces), begun) for rank, trace in traces.items()
    }
    posts: Posts = {}
    waiting = dict.fromkeys(players, True)
    while any(waiting.values()):
        moved = False
        for rank, player in players.items():
            if waiting[rank]:
                moved |= player.play(posts)
                waiting[rank] = not player.done
        assert moved or not any(waiting.values()), "each of these ranks waits for another"
    return {rank: player.timeline for rank, player in players.items()}


Line = tuple[int, int, str]
"""From a rank to a rank, along an axis: messages arrive in the order in which they are sent."""
Posts = dict[Line, list[float]]
"""Time at which each message of a line has arrived."""
Begun = dict[tuple[tuple[int, ...], str, int], dict[int, float]]
"""Ranks, axis and number of a collective -> when each of these ranks has begun it."""


class _Player:
    """Runs through one rank's events until it needs what another has not sent yet."""

    def __init__(self, rank: int, trace: Trace, durations: Durations, ranks: set[int], begun: Begun) -> None:
        self.timeline = StepTimeline()
        self.done = False
        self._rank, self._durations, self._ranks, self._begun = rank, durations, ranks, begun
        self._met: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._now = 0.0
        self._free: dict[str, float] = {}
        self._ends: list[tuple[str, float | tuple[Line, int]]] = []  # axis, and when, or which message
        self._expected: Counter[Line] = Counter()
        self._levels = dict(trace.before)
        self._events: Iterator[Event] = iter(trace.events)
        self._next = next(self._events, None)
        self._where: StepPlace | None = None

    def play(self, posts: Posts) -> bool:
        """Go on; return True if that was possible."""
        moved = False
        while self._next is not None and self._take(self._next, posts):
            self._next = next(self._events, None)
            moved = True
        if self._next is None and not self.done:
            self.done = moved = True
            self.timeline.step_s = max([self._now, *self._free.values()])
        return moved

    def _take(self, event: Event, posts: Posts) -> bool:
        if isinstance(event, Operation) and event.after is not None:
            self._work_beside(event, event.after)
        elif isinstance(event, Operation):
            duration = self._durations.of_work(event)
            self._span(event.name.removeprefix("aten."), COMPUTE, self._now, duration, event.where)
            self._now += duration
            self.timeline.compute_s += duration
        elif isinstance(event, SendEvent):
            return self._send(event, posts)
        elif isinstance(event, WaitEvent):
            return self._wait(event, posts)
        elif isinstance(event, Change):
            self._levels[event.memory.category] = self._levels.get(event.memory.category, 0) + event.bytes
            if event.where != self._where:
                self._where = event.where
                self.timeline.memory.append((self._now, dict(self._levels)))
        return True

    def _send(self, sent: SendEvent, posts: Posts) -> bool:
        if sent.kind == "recv" and sent.peer in self._ranks:
            line = (sent.peer, self._rank, sent.axis)
            self._ends.append((sent.axis, (line, self._expected[line])))
            self._expected[line] += 1
            return True
        wires = self._durations.wires_of(sent)
        free = max(self._free.get(wire, 0.0) for wire in (sent.axis, *wires))
        begin = max(self._now, free) if sent.kind != "recv" else self._now
        if sent.after is not None:
            begin = max(begin, self._arrival(sent.after)[1])
        if sent.peer is None and len(peers := self._peers(sent)) > 1:
            begins = self._begun.setdefault((peers, sent.axis, self._met[peers, sent.axis]), {})
            begins[self._rank] = begin
            if len(begins) < len(peers):
                return False
            self._met[peers, sent.axis] += 1
            begin = max(begins.values())
        duration = self._durations.of_message(sent)
        if sent.kind != "recv":
            self._free |= dict.fromkeys((sent.axis, *wires), begin + duration)
            self._span(f"{sent.kind} {sent.axis}", sent.axis, begin, duration, sent.where)
        if sent.kind == "send" and sent.peer in self._ranks:
            posts.setdefault((self._rank, sent.peer, sent.axis), []).append(begin + duration)
        self._ends.append((sent.axis, begin + duration))
        return True

    def _peers(self, sent: SendEvent) -> tuple[int, ...]:
        """Return those of these ranks that are in a collective's group."""
        first = self._rank - self._rank // sent.stride % sent.ranks * sent.stride
        return tuple(sorted(self._ranks & set(range(first, first + sent.ranks * sent.stride, sent.stride))))

    def _work_beside(self, work: Operation, messages_ago: int) -> None:
        """Draw what follows a message in its own stream: what waits for the message waits for this too."""
        (axis, begin), duration = self._arrival(messages_ago), self._durations.of_work(work)
        self._span(work.name.removeprefix("aten."), axis, begin, duration, work.where)
        self._ends[-1 - messages_ago] = (axis, begin + duration)
        self._free[axis] = max(self._free.get(axis, 0.0), begin + duration)

    def _arrival(self, messages_ago: int) -> tuple[str, float]:
        """Return the axis of a message that all of its ranks send, and its time of arrival."""
        axis, end = self._ends[-1 - messages_ago]
        assert isinstance(end, float)
        return axis, end

    def _wait(self, wait: WaitEvent, posts: Posts) -> bool:
        axis, end = self._ends[-1 - wait.messages_ago]
        if isinstance(end, tuple):
            line, number = end
            arrived = posts.get(line, [])
            if number >= len(arrived):
                return False
            end = arrived[number]
        if end > self._now:
            self.timeline.waited_s[axis] = self.timeline.waited_s.get(axis, 0.0) + end - self._now
            self._now = end
        return True

    def _span(self, name: str, track: str, start_s: float, duration_s: float, where: StepPlace) -> None:
        if duration_s > 0:
            self.timeline.spans.append(Span(name, track, start_s, duration_s, where))


def chrome_trace(timelines: Mapping[int, StepTimeline]) -> str:
    """Return the timelines in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing read."""
    events = [event for rank, timeline in timelines.items() for event in _chrome_events(rank, timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _chrome_events(rank: int, timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    tracks = {COMPUTE: 0}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for span in timeline.spans:
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.where.phase,
            "pid": rank,
            "tid": tracks.setdefault(span.track, len(tracks)),
            "ts": round(span.start_s * 1e6, 3),
            "dur": round(span.duration_s * 1e6, 3),
            "args": {"where": str(span.where)},
        }
    for track, number in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": track}}
    for at_s, levels in timeline.memory:
        yield {"ph": "C", "name": "memory", "pid": rank, "ts": round(at_s * 1e6, 3), "args": levels}
