"""Simulates a step of a run under a plan without devices: what each rank of the real step holds, computes and sends."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from argosy.config.launch import USUAL_ACCELERATOR
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.errors import RunFailed, UserError
from argosy.models.decoder import Decoder
from argosy.models.microbatch import Microbatch, microbatches, with_mask_keys
from argosy.observe.wire import Counts
from argosy.parallel.apply import apply
from argosy.parallel.offload import ActivationOffload
from argosy.parallel.world import World
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.exact_state import dp_rank_of, place_of, stages_on
from argosy.plan.cost.fabric import Fabric
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.parameters import Stage
from argosy.plan.plan import Plan
from argosy.plan.search.auto import Devices, choose_plan, processes_of
from argosy.simulate.fake import FakeMemoryMode, fake_memory, fake_world, replaced
from argosy.simulate.record import Change, ForwardBegins, Operation, Phase, Recorder, SendEvent, StepPlace, Trace
from argosy.simulate.repeat import grown, layers_alike
from argosy.simulate.timeline import StepTimeline, draw
from argosy.training.state import StepUpdate, TrainState
from argosy.training.step import Step

WORTH_IT = 1.3
"""Repetitions of layers over those to be traced instead, from which that takes less time."""


@dataclass(frozen=True)
class SimulatedMemory:
    """Device memory in a simulated step."""

    peak_bytes: int
    """The most that is allocated at once."""
    at_peak: dict[str, int]
    """The peak by category (`simulate.record.Category`)."""
    peak_phase: Phase
    """The phase of the step in which the peak is."""
    peak_layer: int | None
    held_bytes: int
    """Still allocated after the step."""
    host_bytes: int
    """The most that `plan.offload` keeps in host memory at once."""


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
    """One rank's simulated step, as a program reads it. What it allocates and sends is exact; when it does so follows
    from rates and links."""

    rank: int
    plan: str
    memory: SimulatedMemory
    flops: dict[str, int]
    """FLOPs of contractions (`simulate.fake`), by phase, and in total."""
    traffic: list[SimulatedTraffic]
    time: SimulatedTime
    tracing_s: float
    """Seconds that the simulation took."""


class SimulatedStep(NamedTuple):
    """One rank's simulated step, and when each of its operations runs."""

    record: SimulatedRecord
    timeline: StepTimeline


def simulate(
    plan: Plan, run: RunConfig, ranks: Sequence[int], cluster: Cluster, processes: int = 1
) -> list[SimulatedStep]:
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
    Raises: UserError if there is neither, the cluster is too small, or the plan cannot train the run.
    """
    if not run.model.vocab_size:
        run = run.with_keys(model={"vocab_size": _vocab_size(run)})
    written = processes_of(run.plan)
    size = world_size or written or run.launch.processes
    if not size:
        raise UserError(f'plan = "{run.plan}" is for any number of ranks. Say for how many, e.g. --world-size 8.')
    if written and size != written:
        raise UserError(
            f'--world-size {size}: the plan "{run.plan}" is for {written} ranks. Try --world-size {written}.'
        )
    if cluster is not None and cluster.devices < size:
        raise UserError(f"--cluster has {cluster.devices} devices, and there are {size} ranks. Name a larger one.")
    run = run.with_keys(launch={"processes": size})
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


def _summary(plan: Plan, rank: int, trace: Trace, timeline: StepTimeline, tracing_s: float) -> SimulatedStep:
    level = Counter(trace.before)
    now = sum(level.values()) - level["host"]
    peak_bytes, peak, where, host = now, Counter(level), StepPlace("other", None), level["host"]
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
        elif isinstance(event, SendEvent) and event.sent_bytes:
            sent_bytes[event.axis, event.kind] += event.sent_bytes
            messages[event.axis, event.kind] += 1
    del peak["host"]
    memory = SimulatedMemory(
        peak_bytes=peak_bytes,
        at_peak={category: size for category, size in peak.items() if size},
        peak_phase=where.phase,
        peak_layer=where.layer,
        held_bytes=now,
        host_bytes=host,
    )
    counted = {"total": sum(flops.values())} | {phase: count for phase, count in flops.items() if count}
    traffic = [
        SimulatedTraffic(axis, kind, size, messages[axis, kind]) for (axis, kind), size in sorted(sent_bytes.items())
    ]
    times = SimulatedTime(timeline.step_s, timeline.compute_s, timeline.waited_s)
    return SimulatedStep(
        SimulatedRecord(rank, str(plan), memory, counted, traffic, times, round(tracing_s, 3)), timeline
    )


def simulate_rank(plan: Plan, run: RunConfig, rank: int) -> Trace:
    """Trace a step of rank `rank` under `plan`, with no device, no weights and no other rank; nothing is compiled.

    The batch has whole documents, and goes evenly to all experts; fingerprints of replicas are compared, if they ever
    are. Equal layers repeat, and so do microbatches: a few are traced, then one more, and if that adds what the ones
    before it did, it stands for all others (`simulate.repeat`). If that cannot be told, all are traced.

    Raises: UserError if the step depends on numbers that only a real run knows, or on a device that is not here.
    """
    some = partial(_of_few_layers, plan, run, rank)
    total, enough = plan.microbatches_of(dp_rank_of(rank, plan), run.train.global_batch), _enough(plan, run, rank)
    if enough is None or total <= (enough + 1 if plan.pp == 1 else 2 * enough + 1):
        return some(None)
    longer = some(enough + 1)
    shorter = _without_last_but_one(longer) if plan.pp == 1 else some(enough)
    return grown(shorter, longer, total - enough - 1) or some(None)


def _enough(plan: Plan, run: RunConfig, rank: int) -> int | None:
    """Return how many microbatches a step needs so that one more only repeats another; None if that cannot be told.

    The first one makes gradients (and what is summed of experts' loads, which the second frees), after the last one
    they are summed over ranks, and a pipeline has to be filled.
    """
    filled = {
        "gpipe": 1,
        "1f1b": plan.pp - place_of(rank, plan)["pp"],
        "zbv": 2 * plan.pp + 2,
        "dualpipev": 2 * plan.pp + 2,
    }
    alone = 2 + (run.model.moe.experts > 0)
    if plan.pp == 1:
        return alone + 1
    # torch refuses a schedule of fewer microbatches than stages
    return max(filled[plan.schedule] + alone, plan.stages) if plan.schedule in filled else None


def _without_last_but_one(trace: Trace) -> Trace:
    """Return the trace without its last microbatch but one: without a pipeline they come one after the other."""
    begins = [i for i, event in enumerate(trace.events) if isinstance(event, ForwardBegins)]
    return Trace(trace.before, [*trace.events[: begins[-2]], *trace.events[begins[-1] :]])


def _of_few_layers(plan: Plan, run: RunConfig, rank: int, microbatches: int | None) -> Trace:
    """Return the trace of a step with this many microbatches (None: all), from some of the layers if they repeat."""
    alike = layers_alike(plan, run, rank)
    # The first and the last of them do what has to do with those around them, FSDP2's second too.
    few = 3 if plan.shards_parameters else 2
    if alike is not None and alike.times >= WORTH_IT * (2 * few + 1):
        shorter, longer = (traced(plan, run, rank, microbatches, alike.few(n)) for n in (few, few + 1))
        if (whole := grown(shorter, longer, alike.times - few - 1)) is not None:
            return _renumbered(whole, alike.stage.layers)
    return traced(plan, run, rank, microbatches)


def _renumbered(trace: Trace, layers: Sequence[int] | Mapping[int, int]) -> Trace:
    """Return the trace with other numbers of layers: `layers[i]` in the place of i."""
    where = {
        event.where: event.where._replace(layer=layers[event.where.layer])
        for event in trace.events
        if not isinstance(event, ForwardBegins) and event.where.layer is not None
    }
    events = [
        event
        if isinstance(event, ForwardBegins) or event.where.layer is None
        else event._replace(where=where[event.where])
        for event in trace.events
    ]
    return Trace(trace.before, events)


def traced(
    plan: Plan, run: RunConfig, rank: int, microbatches: int | None = None, layers: Sequence[int] | None = None
) -> Trace:
    """Trace a step with this many of the batch's microbatches, and these of the stage's layers, numbered from 0.

    By default all, with their own numbers.
    """
    eager = plan.model_copy(update={"compile": False})
    with fake_world(rank, plan.world_size) as world, fake_memory(FakeMemoryMode()) as fake, Recorder() as recorder:
        trace = _record(recorder, fake, eager, run, world, microbatches, layers)
    if layers is None:
        return trace
    places = {layer: place for place, layer in enumerate(layers)}
    return _renumbered(trace, places)


def _record(
    recorder: Recorder,
    fake: FakeMemoryMode,
    plan: Plan,
    run: RunConfig,
    world: World,
    traced: int | None,
    layers: Sequence[int] | None,
) -> Trace:
    """Write down a step with `traced` of the batch's microbatches and `layers` of this stage's, by default all."""

    def some_of_stages(plan: Plan, run: RunConfig, rank: int) -> dict[int, Stage]:
        stages = stages_on(plan, run, rank)
        return stages if layers is None else {i: replace(stage, layers=layers) for i, stage in stages.items()}

    with _host_copies_labelled(recorder), _sums_beside(recorder):
        model = apply(plan, run, world, partial(without_values, run.data.seq_len), some_of_stages)
        for moe in model.moes.values():
            moe.router.choose = partial(even_choice, run.model.moe.experts_per_token)  # type: ignore[method-assign]
        recorder.label(
            [x for p in (*model.pieces, *model.frozen) for x in (p.parameter.detach(), p.value)], "parameters"
        )
        step = Step(run, TrainState.begin(model, plan, run), world, recorder.clock)
        _make_what_is_kept(step, run, recorder)
        batch = _batch(plan, run, world, fake)
        some = batch if traced is None else [*batch[: traced - 1], batch[-1]]
        recorder.begin(model.meshes.axis_of_groups())
        outcome = step.exchange(step.forward_backward(some))
        step.apply(step.update(outcome, run.optimizer.lr))
        return recorder.end()


def _make_what_is_kept(step: Step, run: RunConfig, recorder: Recorder) -> None:
    """Make what the first steps make and later ones keep: moments, the host's gradients, factors of fingerprints."""
    state, model = step.state, step.state.model
    for piece in model.pieces:
        piece.value.grad = torch.zeros_like(piece.value)
    step.apply(StepUpdate(0, 0.0, 0.0, 0.0, run.optimizer.lr, 0, None))
    if model.masters is not model.pieces:
        moments = [m for p in state.optimizer.pieces for m in state.optimizer.state_of(p).values()]
        gradients = [p.value.grad for p in model.masters if p.value.grad is not None]
        recorder.label([*(p.value for p in model.masters), *gradients, *moments], "host")
    state.step = 0  # a step that compares fingerprints, if any does
    step.checks.fingerprint(state.step)


def _batch(plan: Plan, run: RunConfig, world: World, fake: FakeMemoryMode) -> list[Microbatch]:
    many = plan.microbatches_of(dp_rank_of(world.rank, plan), run.train.global_batch) * plan.microbatch
    rows = np.ones((many, run.data.seq_len + 1), dtype=np.int32)
    batch = with_mask_keys(microbatches(rows, plan.microbatch, 0, world.device), run, step=0, first_row=0)
    # Nothing depends on tokens but numbers; on where documents start, shapes do.
    return [
        replace(
            micro,
            tokens_BT=fake.from_tensor(micro.tokens_BT).clone(),
            targets_BT=fake.from_tensor(micro.targets_BT).clone(),
            mask_keys_BT=None if micro.mask_keys_BT is None else fake.from_tensor(micro.mask_keys_BT).clone(),
        )
        for micro in batch
    ]


def even_choice(experts_per_token: int, scores_BTE: Tensor) -> Tensor:
    """Deal the experts out one after the other: each gets as many tokens, give or take one."""
    *shape, experts = scores_BTE.shape
    pairs = torch.arange(math.prod(shape) * experts_per_token, device=scores_BTE.device)
    return (pairs % experts).view(*shape, experts_per_token)


def without_values(seq_len: int, model: Decoder, config: ModelConfig, device: torch.device, seed: int) -> None:
    model.to_empty(device=device)
    model.places_to(seq_len, device)  # the first step makes it, and later ones keep it


def _host_copies_labelled(recorder: Recorder) -> AbstractContextManager[None]:
    """Label what `offload` copies to the host: on a CPU, both are the same memory."""
    to_host = ActivationOffload.to_host

    def labelled(offload: ActivationOffload, tensor: Tensor) -> Any:
        copy = to_host(offload, tensor)
        recorder.label([copy.host], "host")
        return copy

    return replaced(ActivationOffload, "to_host", labelled)


def _sums_beside(recorder: Recorder) -> AbstractContextManager[None]:
    """FSDP2 sums gradients in streams of its own; on a CPU, one after the other with all else."""
    foreach_reduce = _fsdp_param_group.foreach_reduce

    def summed(*args: Any, **kwargs: Any) -> Any:
        with recorder.summing():
            return foreach_reduce(*args, **kwargs)

    return replaced(_fsdp_param_group, "foreach_reduce", summed)
