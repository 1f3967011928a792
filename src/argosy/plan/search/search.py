"""The search for the best plan: all plans of a run on a cluster as columns, first their memory, then the time of those
that fit. A mesh is dropped if its leanest plan (smallest microbatch, most recompute) does not fit.

Replicas may sum gradients in tiers, neighbours of a node or a site first. That changes no number but by the order of a
sum. A plan stays plain unless tiers save `AS_FAST` of its step: where nodes have fast adapters, a ring through all
ranks is as fast. Of the plans about as fast as the fastest, the plainest is taken; of one that does not fit it is said
by how much, and which is the nearest that does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argosy.errors import UserError, counted
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.memory_model import Footprint
from argosy.plan.cost.step_time import StepTime
from argosy.plan.hardware.devices import GIB
from argosy.plan.layouts import PLAN_WORDS, Ints, Layouts
from argosy.plan.plan import MESH, Plan
from argosy.plan.quantities import evenly
from argosy.plan.rules import breaks_any
from argosy.plan.search.space import Pins, Space, columns_of, crossed, joined

AS_FAST = 0.03
"""Predictions cannot tell plans apart if their steps differ by less (the regret of `benchmarks/planner`)."""
OURS = ("sum_inside", "sum_between")


def with_tiers(costs: CostModel, plans: Layouts, time: StepTime, pins: Pins) -> tuple[Layouts, StepTime]:
    """Return the plans with the tiers that make each fastest, if that saves `AS_FAST` of its step, and their times.

    time: that of `plans`. Plans that could not become as fast as the fastest of all are left as they are.
    """
    if not len(plans) or any(key in pins for key in OURS):
        return plans, time
    total = np.array(time.total)
    without = total - np.asarray(time.gradients)
    could = (np.asarray(time.gradients) > AS_FAST * total) & (without < total.min())
    columns = {f.name: np.array(np.broadcast_to(getattr(plans, f.name), len(plans))) for f in fields(plans)}
    best = total.copy()
    for inside, between in _tiers(costs, plans):
        rows = np.flatnonzero(could & _divides(plans, inside, between))
        tiered = replace(plans[rows], sum_inside=inside[rows], sum_between=between[rows])
        legal = ~np.broadcast_to(breaks_any(tiered, costs.run), len(rows))
        rows, tiered = rows[legal], tiered[legal]
        if not len(rows):
            continue
        tiered = tiered if "bucket_mb" in pins else costs.with_buckets(tiered)
        timed = costs.predict_time(tiered)
        saves = np.asarray(timed.total) < np.minimum(best[rows], (1 - AS_FAST) * total[rows])
        better = rows[saves]
        best[better] = np.asarray(timed.total)[saves]
        for key in (*OURS, "bucket_mb"):
            columns[key][better] = np.broadcast_to(getattr(tiered, key), len(rows))[saves]
        for f in fields(StepTime):
            getattr(time, f.name)[better] = getattr(timed, f.name)[saves]
    return Layouts(**columns), time


def _tiers(costs: CostModel, plans: Layouts) -> Iterator[tuple[Ints, Ints]]:
    """Yield sizes of the inner tiers, one for each plan: those of a node, of a site, and of a node in a site."""
    of_node, of_site = (_replicas_in(int(unit), plans) for unit in (costs.rates.node, costs.rates.site))
    alone = np.ones_like(of_node)
    yield of_node, alone
    if costs.rates.site < costs.devices:
        yield of_site, alone
        yield of_node, of_site // of_node


def _replicas_in(devices: int, plans: Layouts) -> Ints:
    """Return how many replicas lie next to each other on so many devices; 1 where they do not come out even."""
    apart = plans.tp * plans.shares_state
    return np.broadcast_to(np.where(devices % apart == 0, np.maximum(1, devices // apart), 1), len(plans))


def _divides(plans: Layouts, inside: Ints, between: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    unit = inside * between
    return (inside > 1) & (unit < plans.replicas) & (plans.replicas % unit == 0)


Floats = NDArray[np.float64]

MEMORY_EXCESS = 0.1
"""Share of a device's memory by which a plan may exceed it and still be timed, to tell what more memory would bring."""


@dataclass(frozen=True)
class SearchResult:
    """The plans that a search found."""

    looked_at: int
    """Plans whose memory was computed."""
    plans: Layouts
    """Plans that fit; may be empty."""
    memory: Footprint
    time: StepTime
    leanest: Plan
    """The plan that needs least memory; it may not fit."""
    roomier_step_s: float
    """The fastest step if the memory of each device were a tenth larger."""

    @cached_property
    def step_s(self) -> Floats:
        return np.asarray(self.time.total)

    @cached_property
    def memory_bytes(self) -> Floats:
        """Bytes on the rank that needs most, for each plan."""
        return np.asarray(self.memory.total)

    def __len__(self) -> int:
        return len(self.step_s)

    @property
    def devices(self) -> NDArray[np.int64]:
        return np.broadcast_to(self.plans.world_size, len(self))

    def best(self, score: Floats, many: int) -> NDArray[np.int64]:
        """Return the rows with the lowest score, one for each mesh; of equal ones the leanest."""
        order = np.lexsort((self.memory_bytes, score))
        axes = np.stack([np.broadcast_to(getattr(self.plans, axis), len(self)) for axis in MESH])
        first: dict[tuple[int, ...], int] = {}
        for row in order.tolist():  # to the end only if there are fewer meshes
            first.setdefault(tuple(axes[:, row].tolist()), row)
            if len(first) >= many:
                break
        return np.array(list(first.values()), np.int64)

    def pareto(self, many: int = 8) -> NDArray[np.int64]:
        """Return the rows that no other beats in step time, memory and devices at once, the fastest first."""
        order = np.lexsort((self.memory_bytes, self.devices, self.step_s))
        front = _front(order, self.devices[order], self.memory_bytes[order])
        return np.array(evenly(front.tolist(), many), np.int64)


def _front(order: NDArray[np.int64], devices: NDArray[np.int64], memory: Floats) -> NDArray[np.int64]:
    """Return the rows, in the order of their time, that need fewer devices or less memory than all before."""
    keep = np.zeros(len(order), bool)
    for count in np.unique(devices):
        fewer = np.minimum.accumulate(np.where(devices <= count, memory, np.inf))
        before = np.concatenate([[np.inf], fewer[:-1]])
        keep |= (devices == count) & (memory < before * 0.999)
    return order[keep]


def search(costs: CostModel, pins: Pins, counts: Sequence[int] | None = None, explains: bool = True) -> SearchResult:
    """Return the plans for `counts` devices (default: all devices) that fit, with their predicted time.

    Raises: UserError if no plan is legal, which names a rule, unless that is not to be explained: it may take seconds.
    """
    space = Space(costs, pins)
    meshes = joined([space.meshes(count) for count in counts or [costs.devices]])
    lean = space.plans(crossed(meshes, space.pipelines(), space.leanest()), any_microbatch=True)
    lean_bytes = np.asarray(costs.predict_memory(lean).total)
    fitting = lean[lean_bytes <= costs.memory_bytes * (1 + MEMORY_EXCESS)]
    plans = space.plans(crossed(columns_of(fitting), space.microbatches(), space.recomputes()))
    memory = costs.predict_memory(plans)
    memory_bytes = np.asarray(memory.total)
    near = costs.has_room(plans, memory_bytes, MEMORY_EXCESS)
    fits = costs.has_room(plans[near], memory_bytes[near])
    timed = plans[near] if "bucket_mb" in pins else costs.with_buckets(plans[near])
    timed, time = with_tiers(costs, timed, costs.predict_time(timed), pins)
    return SearchResult(
        looked_at=len(lean) + len(near),
        plans=timed[fits],
        memory=memory.rows(near).rows(fits),
        time=time.rows(fits),
        leanest=_leanest(space, lean, lean_bytes, explains),
        roomier_step_s=float(np.min(time.total, initial=np.inf)),
    )


def _leanest(space: Space, lean: Layouts, memory_bytes: Floats, explains: bool) -> Plan:
    """Return the plan that needs least memory of those with the leanest rest. Raises: UserError if none is legal."""
    legal = np.flatnonzero(~np.broadcast_to(breaks_any(lean, space.run), len(lean)))
    if len(legal):
        return lean.plan(int(legal[np.argmin(memory_bytes[legal])]))
    others = space.plans(crossed(columns_of(lean), space.microbatches()))
    if not len(others):
        raise UserError(space.why_none() if explains else "no plan is legal")
    return others.plan(int(np.argmin(space.costs.predict_memory(others).total)))


@dataclass(frozen=True)
class MemoryMisfit:
    """The shortfall of memory of a plan that does not fit."""

    needs_bytes: float
    has_bytes: float
    """Most memory that it may need, to fit nine times of ten."""
    largest: str
    """The largest category."""
    largest_bytes: float
    where: str = "of each device"

    @property
    def excess_bytes(self) -> float:
        return self.needs_bytes - self.has_bytes


def misfit(costs: CostModel, plan: Plan) -> MemoryMisfit | None:
    """Return by how much `plan` does not fit; None if it fits."""
    row = Layouts.of([plan])
    by_category = costs.predict_memory(row).by_category(0)
    on_host = float(costs.predict_host_memory(row)[0])
    if costs.rates.host_waits and on_host:
        by_category["offloaded"] = on_host
    needs = sum(by_category.values())
    if needs > costs.memory_bytes:
        largest = max(by_category, key=lambda name: by_category[name])
        return MemoryMisfit(needs, costs.memory_bytes, largest, by_category[largest])
    if on_host > costs.host_memory_bytes:
        where = "of the host's memory for each device"
        return MemoryMisfit(on_host, costs.host_memory_bytes, "what is offloaded", on_host, where)
    return None


def nearest_that_fits(plan: Plan, found: SearchResult) -> int | None:
    """Return the row of `found` that is most like `plan`, the fastest if several are; None if `found` is empty.

    Each doubling of an axis or of the microbatch counts 1, any other key that differs 1/2.
    """
    if not len(found):
        return None
    wanted, plans = Layouts.of([plan]), found.plans
    sizes = (*MESH, "microbatch")
    doublings = sum(np.abs(np.log2(getattr(plans, key) / getattr(wanted, key))) for key in sizes)
    others = [f.name for f in fields(plans) if f.name not in sizes]
    differ = sum((getattr(plans, key) != getattr(wanted, key)) * 0.5 for key in others)
    return int(np.lexsort((found.step_s, np.round(doublings + differ, 6)))[0])


def least_memory_bytes(costs: CostModel, plan: Plan) -> tuple[float, float]:
    """Return the least bytes that a rank of `plan` needs of its device, and of the host for what it keeps there.

    Nine times of ten it needs more.
    """
    row = Layouts.of([plan])
    on_device = costs.memory_of(costs.predict_memory(row).by_category())
    low = float(on_device.low)
    return low, float(costs.predict_host_memory(row)[0]) * low / float(on_device.mid)


def with_memory(costs: CostModel, memory_bytes: float, host_memory_bytes: float) -> CostModel:
    """Return the cost model of devices with so much memory, and so much of the host's for each."""
    rates = replace(costs.rates, memory_bytes=memory_bytes, host_memory_bytes=host_memory_bytes)
    return replace(costs, rates=rates)


OFFLOADS = tuple(word for word in PLAN_WORDS["offload"] if word != "none")


def search_to_run(costs: CostModel, pins: Pins, counts: Sequence[int] | None = None) -> SearchResult:
    """Search; if nothing fits an accelerator and `pins` allow it, search again with state in host memory.

    Raises: UserError if no plan is legal.
    """
    found = search(costs, pins, counts)
    if len(found) or "offload" in pins or costs.rates.host_waits:  # the host is the device
        return found
    offloaded = search(costs, {**pins, "offload": OFFLOADS}, counts)
    return offloaded if len(offloaded) else found


def plainest(found: SearchResult) -> int:
    """Return the row of the plan with fewest `features` of those about as fast as the fastest; of these, the fastest.

    `found` must not be empty.
    """
    near = np.flatnonzero(found.step_s <= (1 + AS_FAST) * found.step_s.min())
    order = np.lexsort((found.memory_bytes[near], found.step_s[near], features(found.plans[near])))
    return int(near[order[0]])


def best_to_run(costs: CostModel, pins: Pins) -> tuple[Plan, float] | None:
    """Return the plainest of the plans about as fast as the fastest, and the seconds of its step; None if none is legal
    or fits."""
    try:
        found = search_to_run(costs, pins)
    except UserError:
        return None
    if not len(found):
        return None
    row = plainest(found)
    return found.plans.plan(row), float(found.step_s[row])


def features(plans: Layouts) -> Ints:
    """Return how much each plan uses beside plain data parallelism: each feature makes a run harder to understand."""
    plain_schedule = plans.is_("schedule", "1f1b")
    shared = np.where(plans.dp_shard * plans.cp > 1, np.where(plans.zero == 3, 2, plans.zero > 0), 0)
    used = (
        (plans.pp > 1) * (2 - plain_schedule),
        plans.tp > 1,
        plans.cp > 1,
        plans.ep > 1,
        shared,
        (plans.recompute > 0) * (1 + (plans.recompute_every > 1)),
        ~plans.is_("offload", "none"),
        plans.sum_inside > 1,
        plans.sum_between > 1,
    )
    return np.broadcast_to(sum(column.astype(np.int64) for column in used), len(plans))


def why_nothing_fits(costs: CostModel, found: SearchResult) -> str:
    """Explain by how much the leanest plan is too large; `found` is empty."""
    missing = misfit(costs, found.leanest)
    assert missing is not None  # or it would have been found
    plans = counted(found.looked_at, "plan", form=",")
    return (
        f'nothing fits: of {plans} the leanest, "{found.leanest}", needs '
        f"{missing.needs_bytes / GIB:.1f} GiB {missing.where}, {missing.excess_bytes / GIB:.1f} GiB more than the "
        f"{missing.has_bytes / GIB:.1f} GiB that it may (with a margin for the prediction); "
        f"{missing.largest} takes {missing.largest_bytes / GIB:.1f} GiB."
    )
