"""Simulates a step of a run under a plan without devices: what it holds, computes and sends."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

from argosy.config.launch import USUAL_ACCELERATOR
from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.errors import RunFailed, UserError
from argosy.observe.wire import Counts
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.exact_state import place_of
from argosy.plan.cost.fabric import Fabric
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.auto import Devices, choose_plan, processes_of
from argosy.simulate.rank import simulate_rank
from argosy.simulate.record import Category, Change, Operation, Phase, Sent, Trace, Where
from argosy.simulate.timeline import StepTimeline, draw


@dataclass(frozen=True)
class Simulated:
    """One step of one rank. What it allocates and sends is exact; when it does so follows from rates and links."""

    rank: int
    plan: str
    peak_bytes: int
    """The most device memory that is allocated at once."""
    peak: dict[Category, int]
    """The peak by category (`simulate.record.Category`)."""
    peak_where: Where
    """Operation that runs at the peak, and its layer."""
    held_bytes: int
    """Still allocated on the device after the step."""
    host_bytes: int
    """The most that `plan.offload` keeps in host memory at once."""
    flops: dict[Phase, int]
    """FLOPs of contractions by phase (`simulate.fake`)."""
    sent_bytes: Counts
    """(axis, kind of collective) -> bytes sent (`observe.wire`)."""
    messages: Counts
    """The same -> in how many messages."""
    timeline: StepTimeline
    tracing_s: float
    """Seconds that the simulation took."""

    def record(self) -> SimulatedRecord:
        """Return what a program reads: all but the timeline's spans."""
        memory = SimulatedMemory(
            peak_bytes=self.peak_bytes,
            at_peak={str(category): size for category, size in self.peak.items()},
            peak_phase=self.peak_where.phase,
            peak_layer=self.peak_where.layer,
            held_bytes=self.held_bytes,
            host_bytes=self.host_bytes,
        )
        traffic = [
            SimulatedTraffic(axis, kind, size, self.messages[axis, kind])
            for (axis, kind), size in sorted(self.sent_bytes.items())
        ]
        time = SimulatedTime(self.timeline.step_s, self.timeline.compute_s, self.timeline.waited_s)
        flops: dict[str, int] = {"total": sum(self.flops.values())}
        flops |= {str(phase): count for phase, count in self.flops.items()}
        return SimulatedRecord(self.rank, self.plan, memory, flops, traffic, time, round(self.tracing_s, 3))


@dataclass(frozen=True)
class SimulatedMemory:
    """Device memory in a simulated step."""

    peak_bytes: int
    at_peak: dict[str, int]
    """The peak by category."""
    peak_phase: str
    """The phase of the step in which the peak is."""
    peak_layer: int | None
    held_bytes: int
    """Still allocated after the step."""
    host_bytes: int
    """The most that is kept in host memory at once."""


@dataclass(frozen=True)
class SimulatedTraffic:
    """Bytes that one kind of collective sends over one axis in a simulated step."""

    axis: str
    collective: str
    bytes: int
    messages: int


@dataclass(frozen=True)
class SimulatedTime:
    """The time of a simulated step on the cluster: a best case."""

    step_s: float
    compute_s: float
    waited_s: dict[str, float]
    """Waiting for messages, by axis."""


@dataclass(frozen=True)
class SimulatedRecord:
    """One rank's simulated step, as a program reads it."""

    rank: int
    plan: str
    memory: SimulatedMemory
    flops: dict[str, int]
    """By phase, and in total."""
    traffic: list[SimulatedTraffic]
    time: SimulatedTime
    tracing_s: float
    """Seconds that the simulation took."""


def simulate(plan: Plan, run: RunConfig, ranks: Sequence[int], cluster: Cluster, processes: int = 1) -> list[Simulated]:
    """Simulate a step of `run` under `plan` on each of `ranks`, with its timeline on `cluster`.

    `run` has its vocabulary's size, and `plan` is one that can train it (`settle`). Nothing is compiled: what compiled
    kernels fuse they need not allocate. processes: how many ranks are simulated at once; more than one need a main
    module that may be imported again (`if __name__ == "__main__"`).
    Raises: UserError for a rank out of range, or what cannot be simulated; RunFailed if a process dies.
    """
    if outside := [rank for rank in ranks if not 0 <= rank < plan.world_size]:
        raise UserError(f"rank {outside[0]}: there are ranks 0 to {plan.world_size - 1}. Try --rank 0.")
    timed = partial(_timed, plan, run)
    if processes > 1 and len(ranks) > 1:
        with ProcessPoolExecutor(min(processes, len(ranks)), multiprocessing.get_context("spawn")) as pool:
            try:
                found = list(pool.map(timed, ranks))
            except BrokenProcessPool:
                raise RunFailed("a process of the simulation died, perhaps of too little memory.") from None
    else:
        found = [timed(rank) for rank in ranks]
    traces = {rank: trace for rank, (trace, _) in zip(ranks, found, strict=True)}
    seconds = {rank: took for rank, (_, took) in zip(ranks, found, strict=True)}
    timelines = draw(traces, cluster, _placed(plan, run, cluster))
    return [_summary(plan, rank, traces[rank], timelines[rank], seconds[rank]) for rank in ranks]


def _placed(plan: Plan, run: RunConfig, cluster: Cluster) -> Fabric | None:
    """Return the network of a cluster whose topology is known, with the plan placed on it as `argosy plan` would."""
    if cluster.topology is None:
        return None
    costs = CostModel.of(run, cluster).on(run, plan.world_size)
    return costs.step_model(Layouts.of([plan])).rates.fabric


def _timed(plan: Plan, run: RunConfig, rank: int) -> tuple[Trace, float]:
    began = time.perf_counter()
    return simulate_rank(plan, run, rank), time.perf_counter() - began


def settle(run: RunConfig, world_size: int | None, cluster: Cluster | None = None) -> tuple[RunConfig, Plan]:
    """Return the run with a vocabulary, and its plan for `world_size` GPUs; None: as many as the plan is for.

    cluster: what the plan leaves open is chosen for its devices; none: H100s in nodes of 8.
    Raises: UserError if there is neither, or the plan cannot train the run.
    """
    if not run.model.vocab_size:
        model = run.model.model_copy(update={"vocab_size": _vocab_size(run)})
        run = run.model_copy(update={"model": model})
    written = processes_of(run.plan)
    size = world_size or written or run.launch.processes
    if written and size != written:
        raise UserError(
            f'--world-size {size}: the plan "{run.plan}" is for {written} ranks. Try --world-size {written}.'
        )
    run = run.model_copy(update={"launch": run.launch.model_copy(update={"processes": size})})
    return run, choose_plan(run, Devices(size, USUAL_ACCELERATOR, fast_bf16=True), cluster or nodes_for(size))


def nodes_for(ranks: int) -> Cluster:
    """Return enough H100s in nodes of 8 for this many ranks."""
    return Cluster.parse(f"{-(-ranks // 8)}x8xh100")


def _vocab_size(run: RunConfig) -> int:
    if run.data.sources:
        return open_data(run.data, run.seed, run.train.batches).vocab_size
    if run.data.prepare.input:
        return run.data.prepare.vocab_size
    raise UserError("model.vocab_size is 0, and there is no data to take it from. Try --model.vocab-size 128256.")


def ranks_of_stages(plan: Plan, rank: int) -> list[int]:
    """Return the ranks at the place of `rank` in each of the pipeline's stages."""
    per_stage = plan.world_size // plan.pp
    first = rank - place_of(rank, plan)["pp"] * per_stage
    return [first + stage * per_stage for stage in range(plan.pp)]


def _summary(plan: Plan, rank: int, trace: Trace, timeline: StepTimeline, tracing_s: float) -> Simulated:
    level = Counter(trace.before)
    now = sum(level.values()) - level["host"]
    peak_bytes, peak, where, host = now, Counter(level), Where("other", None), level["host"]
    flops: Counter[Phase] = Counter()
    sent_bytes: Counts = Counter()
    messages: Counts = Counter()
    for event in trace.events:
        if isinstance(event, Change):
            level[event.memory.category] += event.bytes
            if event.memory.category == "host":
                host = max(host, level["host"])
                continue
            now += event.bytes
            if now > peak_bytes:
                peak_bytes, peak, where = now, Counter(level), event.where
        elif isinstance(event, Operation):
            flops[event.where.phase] += event.flops
        elif isinstance(event, Sent) and event.sent_bytes:
            sent_bytes[event.axis, event.kind] += event.sent_bytes
            messages[event.axis, event.kind] += 1
    del peak["host"]
    return Simulated(
        rank=rank,
        plan=str(plan),
        peak_bytes=peak_bytes,
        peak={category: size for category, size in peak.items() if size},
        peak_where=where,
        held_bytes=now,
        host_bytes=host,
        flops={phase: count for phase, count in flops.items() if count},
        sent_bytes=sent_bytes,
        messages=messages,
        timeline=timeline,
        tracing_s=tracing_s,
    )
