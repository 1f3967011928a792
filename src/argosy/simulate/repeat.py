"""Extends a step of a few equal layers, or microbatches, to one of many: what one more adds is added again and again.

Two traces are laid side by side; the longer one has one layer (or microbatch) more. Wherever the longer one has
more events, these must be the events just before once again: so the layer goes on being repeated there. All else must
be the same in both, but for numbers (bytes of what is made for all layers at once, places, distances to messages),
which then grow by as much with each further one. In any other case the step cannot be extended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.plan.cost.exact_state import DTYPE_BYTES, local_shard_of, stages_on
from argosy.plan.cost.traffic import is_dealt_out
from argosy.plan.layer_spec import LayerSpec, layer_spec
from argosy.plan.parameters import Stage, Table, block_table, parameter_table
from argosy.plan.plan import Plan
from argosy.simulate.record import (
    Category,
    Change,
    Event,
    ForwardBegins,
    MemoryBlock,
    Operation,
    StepPlace,
    Trace,
    WaitEvent,
)


@dataclass(frozen=True)
class RepeatedLayers:
    """Layers that come again and again, the last ones of a stage."""

    stage: Stage
    first: int
    period: int
    """Layers of one repetition."""

    @property
    def times(self) -> int:
        """Whole repetitions."""
        return (self.stage.layers[-1] + 1 - self.first) // self.period

    def few(self, times: int) -> list[int]:
        """Return the stage's layers with only this many repetitions: those after the first are left out."""
        kept = self.first + self.period
        left_out = (self.times - times) * self.period
        return [*range(self.stage.layers[0], kept), *range(kept + left_out, self.stage.layers[-1] + 1)]


def layers_alike(plan: Plan, run: RunConfig, rank: int) -> RepeatedLayers | None:
    """Return those of rank `rank`; None if it has several stages, or may not do the same with each layer."""
    stages = stages_on(plan, run, rank)
    if len(stages) > 1 or run.optimizer.kind == "muon" or run.optimizer.groups or run.train.frozen or run.lora.rank:
        return None  # Muon deals matrices out over ranks, and patterns may name single layers
    (stage,) = stages.values()
    if stage.last and run.model.mtp.modules:
        return None  # its last layers are others
    first, period = _cycle([layer_spec(run.model, layer) for layer in stage.layers])
    if plan.recompute != "none":
        period = math.lcm(period, plan.recompute_every)
    if not _buckets_repeat(plan, run, rank, stage, period):
        return None
    return RepeatedLayers(stage, stage.layers[first], period)


def _cycle(specs: Sequence[LayerSpec]) -> tuple[int, int]:
    """Return from where on the layers repeat, to their end, and after how many, such that few need be traced."""

    def start_of(period: int) -> int:
        differing = [i for i in range(len(specs) - period) if specs[i] != specs[i + period]]
        return differing[-1] + 1 if differing else 0

    starts = {period: start_of(period) for period in range(1, len(specs) + 1)}
    period = min(starts, key=lambda period: (starts[period] + TRACED * period, period))
    return starts[period], period


TRACED = 4
"""Repetitions that are traced in any case."""


def _buckets_repeat(plan: Plan, run: RunConfig, rank: int, stage: Stage, period: int) -> bool:
    """Return True if the buckets of gradients (`parallel.data`) begin alike in each period, or there is only one.

    A parameter that fills a bucket alone ends it, so that what comes after begins alike.
    """
    if plan.shards_parameters or plan.dp * plan.cp == 1:
        return not plan.sums_beside_fsdp
    last = stage.layers[-period:]
    of_layer = {f"{layer}.{n}": p for layer in last for n, p in block_table(run.model, layer, plan.tp).items()}
    whole = parameter_table(run.model, stage, plan.tp)
    bucket_bytes = plan.bucket_mb * 2**20
    return all(
        not here or max(here) >= bucket_bytes or sum(_bytes(whole, plan, rank, experts)) < bucket_bytes
        for experts in (False, True)
        for here in [_bytes(of_layer, plan, rank, experts)]
    )


def _bytes(table: Table, plan: Plan, rank: int, experts: bool) -> Sequence[int]:
    """Return the bytes of each parameter as tensor and expert parallelism leave it: dealt experts, or all else."""
    each = DTYPE_BYTES[plan.weights]
    return [each * local_shard_of(p, plan, rank).numel for p in table.values() if is_dealt_out(p, plan) == experts]


Ints = NDArray[np.int64]

WINDOWS = (24, 8, 3)
"""Events that must go on alike after a difference; fewer only if no place has more."""
MOST_EVENTS_REPEATED = 200_000
"""Events of a layer, or of a microbatch, at most."""


@dataclass(frozen=True)
class _Paired:
    """`count` events from `short` on in the shorter trace are those from `long` on in the longer."""

    short: int
    long: int
    count: int


@dataclass(frozen=True)
class _Again:
    """`count` events from `long` on in the longer trace are those just before them once again."""

    long: int
    count: int


def grown(shorter: Trace, longer: Trace, more: int) -> Trace | None:
    """`longer`, which has one unit more than `shorter`, with `more` units yet; None if that cannot be told."""
    a, b = _Trace(shorter.events), _Trace(longer.events)
    _number_alike(a, b)
    runs = _aligned(a, b)
    if runs is None:
        return None
    before: Counter[Category] = Counter()
    for category in [*shorter.before, *(c for c in longer.before if c not in shorter.before)]:
        small, large = shorter.before[category], longer.before[category]
        before[category] = large + more * (large - small)
    return Trace(before, list(_events(a, b, runs, more + 1)))


class _Trace:
    """A trace's events, each as what it is (an integer, equal for equal ones), roughly what it is, and its numbers."""

    def __init__(self, events: Sequence[Event]):
        self.events = events
        described = [_described(event) for event in events]
        self.rough: list[Hashable] = [rough for rough, _, _ in described]
        self.exact: list[Hashable] = [(rough, sizes) for rough, sizes, _ in described]
        self.numbers = [sizes + places for _, sizes, places in described]
        self.rough_ids = self.exact_ids = np.empty(0, np.int64)


def _number_alike(*lines: _Trace) -> None:
    for kind in ("rough", "exact"):
        known: dict[Hashable, int] = {}
        for line in lines:
            ids = [known.setdefault(token, len(known)) for token in getattr(line, kind)]
            setattr(line, f"{kind}_ids", np.array(ids, np.int64))


def _described(event: Event) -> tuple[Hashable, tuple[int, ...], tuple[int, ...]]:
    """Return the kind of event; its sizes; its place in the step, which differs from layer to layer."""
    if isinstance(event, ForwardBegins):
        return "pass", (), ()
    layer = event.where.layer
    kind, place = (type(event).__name__, event.where.phase, layer is None), (layer or 0,)
    if isinstance(event, Change):
        return (*kind, event.memory.category), (event.bytes,), place
    if isinstance(event, WaitEvent):
        return kind, (), (event.messages_ago, *place)
    after = (event.after is None,)
    if isinstance(event, Operation):
        return (*kind, *after, event.name, event.dtype), (event.flops, event.moved_bytes), (event.after or 0, *place)
    same = (event.kind, event.axis, event.ranks, event.stride, event.peer)
    return (*kind, *after, *same), (event.sent_bytes, event.message_bytes), (event.after or 0, *place)


def _with(event: Event, numbers: Sequence[int]) -> Event:
    """Return the event with other `_Trace.numbers`."""
    if isinstance(event, ForwardBegins):
        return event
    where = event.where if event.where.layer is None else StepPlace(event.where.phase, numbers[-1])
    if isinstance(event, Change):
        return Change(numbers[0], MemoryBlock(event.memory.category), where)
    if isinstance(event, WaitEvent):
        return WaitEvent(numbers[0], where)
    after = None if event.after is None else numbers[2]
    if isinstance(event, Operation):
        return event._replace(flops=numbers[0], moved_bytes=numbers[1], after=after, where=where)
    return event._replace(sent_bytes=numbers[0], message_bytes=numbers[1], after=after, where=where)


def _aligned(a: _Trace, b: _Trace) -> list[_Paired | _Again] | None:
    """Return the longer trace in terms of the shorter."""
    runs: list[_Paired | _Again] = []
    i = j = paired_from = 0
    while i < len(a.events) or j < len(b.events):
        if alike := _alike(a.exact_ids[i:], b.exact_ids[j:]):
            runs.append(_Paired(i, j, alike))
            i, j = i + alike, j + alike
            continue
        count = _repeated(a, b, i, j, paired_from)
        if count is None:
            return None
        if count:
            runs.append(_Again(j, count))
            j += count
            paired_from = j
        else:
            runs.append(_Paired(i, j, 1))
            i, j = i + 1, j + 1
    return runs


def _alike(a: Ints, b: Ints) -> int:
    """Return how many they have in common from the start on."""
    both = min(len(a), len(b))
    for start in range(0, both, 4096):
        end = min(start + 4096, both)
        differ = np.flatnonzero(a[start:end] != b[start:end])
        if len(differ):
            return start + int(differ[0])
    return both


def _repeated(a: _Trace, b: _Trace, i: int, j: int, since: int) -> int | None:
    """Return how many events from `j` on are a repetition, after which both continue alike; 0: only numbers differ."""
    left = len(a.events) - i
    if left == 0:
        count = len(b.events) - j
        return count if _is_repetition(b, j, count, since) else None
    for of_a, of_b in ((a.exact_ids, b.exact_ids), (a.rough_ids, b.rough_ids)):
        candidates = [int(count) for count in np.flatnonzero(of_b[j : j + MOST_EVENTS_REPEATED] == of_a[i])]
        for window in (min(size, left) for size in WINDOWS):
            for count in candidates:
                goes_on = np.array_equal(of_b[j + count : j + count + window], of_a[i : i + window])
                goes_on &= window < left or len(b.events) == j + count + left  # they end together
                if goes_on and _is_repetition(b, j, count, since):
                    return count
    return None


def _is_repetition(b: _Trace, j: int, count: int, since: int) -> bool:
    """Return True if `count` events from `j` on repeat those before, none of which is before `since`."""
    return j - count >= since and np.array_equal(b.exact_ids[j : j + count], b.exact_ids[j - count : j])


def _events(a: _Trace, b: _Trace, runs: Sequence[_Paired | _Again], times: int) -> Iterator[Event]:
    """Yield the shorter trace's events, with what is repeated `times` more often."""
    partner: dict[int, int] = {}
    for run in runs:
        if isinstance(run, _Paired):
            for k in range(run.count):
                short, long = a.numbers[run.short + k], b.numbers[run.long + k]
                partner[run.long + k] = run.short + k
                event = b.events[run.long + k]
                yield event if short == long else _with(event, _far(short, long, times))
            continue
        first = run.long - run.count
        for again in range(1, times + 1):
            for k in range(run.count):
                begin = _far(a.numbers[partner[first + k]], b.numbers[first + k], times)
                step = zip(b.numbers[first + k], b.numbers[run.long + k], begin, strict=True)
                numbers = [start + again * (after - before) for before, after, start in step]
                yield _with(b.events[run.long + k], numbers)


def _far(short: Sequence[Any], long: Sequence[Any], times: int) -> list[int]:
    """Extend numbers of two traces that differ by one unit to `times` units more than the shorter has."""
    return [s + times * (n - s) for s, n in zip(short, long, strict=True)]
