"""The cost model of a run on a cluster: the memory and the time of its plans.

It brings together the run's workload, the devices' rates, the software, the constants of the formulas and the factors
learnt from finished runs, and predicts columns of plans with them.

On devices of several kinds, work may be dealt out unevenly. Ranks are counted in the order of the cluster's groups: the
first replicas, or the first pipeline stages, are on the first group's devices. A replica with shares of its own, or a
pipeline rank, is on devices of one kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from operator import or_
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from argosy.config.optimizer import LEAST_INT8, settings_of
from argosy.config.schema import RunConfig
from argosy.plan.cost.breakdown import MEMORY_FACTORS, OF_TIME, Factors, spread
from argosy.plan.cost.constants import Constants, constants_of, memory_std, time_std
from argosy.plan.cost.estimate import Estimate, first_of
from argosy.plan.cost.exact_state import INT8_BLOCK, moments_of
from argosy.plan.cost.fabric import Fabric
from argosy.plan.cost.memory_model import Footprint, MemoryModel
from argosy.plan.cost.muon import hidden_matrices
from argosy.plan.cost.network import Compression, Placements, Placer, placed_in_order
from argosy.plan.cost.rates import Rates, System
from argosy.plan.cost.step_time import StepModel, StepTime
from argosy.plan.dealing import pipeline_s
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layer_spec import LEAST_CHUNK_ROWS
from argosy.plan.layouts import RATIOS, Layouts, column_of
from argosy.plan.plan import Plan, Precision
from argosy.plan.quantities import numbers_of
from argosy.plan.workload import Workload

ONCE_A_STEP = ("gradients", "optimizer", "other")
"""Categories that do not grow with a rank's layers and microbatches."""


@dataclass(frozen=True)
class DeviceKind:
    """The devices of one group of a cluster."""

    device: str
    devices: int
    rates: Rates
    """Its own, on the network that all share."""


def kinds_of(cluster: Cluster) -> tuple[DeviceKind, ...]:
    """Return the groups of the cluster; none if all devices are alike."""
    if len({group.device.name for group in cluster.groups}) == 1:
        return ()
    shared = Rates.of(cluster)
    return tuple(
        DeviceKind(
            group.device.name,
            group.devices,
            replace(
                Rates.of_device(group.device),
                link_bytes_per_s=shared.link_bytes_per_s,
                nic_bytes_per_s=shared.nic_bytes_per_s,
                node=shared.node,
                fabric=shared.fabric,
            ),
        )
        for group in cluster.groups
    )


@dataclass(frozen=True)
class UnevenTimes:
    """Predicts the steps of one run on devices of several kinds."""

    costs: CostModel

    def predict(self, plan: Plan) -> StepTime | None:
        """Return the seconds of a step: those of the replica that takes longest; for layers, those of the slowest kind
        of device, scaled to the step.

        None if devices are alike, `plan` deals work out evenly, or one share is on devices of several kinds.
        """
        if plan.shares:
            return self._of_shares(plan)
        return self._of_layers(plan) if plan.layers else None

    def holders(self, plan: Plan, many: int) -> NDArray[np.int64] | None:
        """Return how many of `many` holders are on each kind; None if one would have devices of several kinds."""
        of_one = plan.world_size // many
        if many == 1 or sum(kind.devices for kind in self.costs.kinds) != plan.world_size:
            return None
        if any(kind.devices % of_one for kind in self.costs.kinds):
            return None
        return np.array([kind.devices // of_one for kind in self.costs.kinds])

    def of_share(self, plan: Plan, kind: DeviceKind, microbatches: NDArray[np.int64]) -> StepTime:
        """Return the time of a step in which ranks on `kind` run so many microbatches, for each of the numbers."""
        one = Layouts.of([plan.model_copy(update={"shares": "", "layers": ""})])
        c = self.costs
        work = replace(c.workload, global_batch=microbatches * float(plan.dp * plan.microbatch))
        model = StepModel(one, work, kind.rates, c.system, c.constants, c.compression)
        return model.predict().calibrated(c.factors)

    def of_kinds(self, plan: Plan) -> list[StepTime]:
        """Return the time of a step of `plan`, dealt out evenly, on devices of each kind alone."""
        even = plan.model_copy(update={"shares": "", "layers": ""})
        many = np.array([even.microbatches(self.costs.run.train.global_batch)])
        return [self.of_share(even, kind, many) for kind in self.costs.kinds]

    def of_layer(self, plan: Plan, times: Sequence[StepTime]) -> NDArray[np.float64]:
        """Return the seconds of a layer and microbatch on each kind, whose steps take `times`."""
        run = self.costs.run
        microbatches, even = plan.microbatches(run.train.global_batch), run.model.layers / plan.pp
        return np.array([repeated_s(time) / microbatches / even for time in times])

    def of_pipeline_s(
        self, plan: Plan, times: Sequence[StepTime], layers: Sequence[int], holders: NDArray[np.int64]
    ) -> float:
        """Return the seconds of a step of a pipeline whose ranks have so many layers; `holders` of them on each
        kind."""
        kind_of = np.repeat(np.arange(len(self.costs.kinds)), holders)
        of_ranks = self.of_layer(plan, times)[kind_of] * np.array(layers)
        once = max(sum(first_of(getattr(time, name)) for name in ONCE_A_STEP) for time in times)
        microbatches = plan.microbatches(self.costs.run.train.global_batch)
        return float(pipeline_s(of_ranks, plan.stages // plan.pp, microbatches) + once)

    def _of_shares(self, plan: Plan) -> StepTime | None:
        many = len(numbers_of(plan.shares))
        holders = self.holders(plan, many)
        if plan.pp > 1 or holders is None:  # a pipeline's replicas lie across all devices
            return None
        batch = self.costs.run.train.global_batch
        counts = [plan.microbatches_of(n * plan.dp // many, batch) for n in range(many)]
        most = [max(counts[end - n : end]) for n, end in zip(holders, np.cumsum(holders), strict=True)]
        times = [self.of_share(plan, kind, np.array([n])) for kind, n in zip(self.costs.kinds, most, strict=True)]
        return max(times, key=lambda time: first_of(time.total))

    def _of_layers(self, plan: Plan) -> StepTime | None:
        holders = self.holders(plan, plan.pp)
        if holders is None or not plan.layers_of_ranks:
            return None
        times = self.of_kinds(plan)
        step_s = self.of_pipeline_s(plan, times, plan.layers_of_ranks, holders)
        slowest = max(times, key=lambda time: first_of(time.total))
        scale = step_s / first_of(slowest.total)
        return slowest.each(lambda column: column * scale)


def repeated_s(time: StepTime) -> float:
    """Return the seconds of a step's microbatches on one rank, without the bubble."""
    return sum(first_of(getattr(time, f.name)) for f in fields(time) if f.name not in (*ONCE_A_STEP, "bubble"))


Floats = NDArray[np.float64]
BreakdownT = TypeVar("BreakdownT", StepTime, Footprint)

PLANS_AT_ONCE = 4096
"""Plans that are computed at once, so that their columns stay in the cache."""
FAST_HALF = 1.5
"""bf16 is chosen if its matmuls are this much faster than those of fp32, as in `plan.search.auto`."""
FITS_Z = 1.2816
"""Standard deviations of memory's logarithm to leave as a margin: a plan that fits does so nine times of ten."""


@dataclass(frozen=True)
class CostModel:
    """The costs of plans for one run on one kind of device."""

    run: RunConfig
    """Model, sequence length, global batch and optimizer count; its plan does not."""
    devices: int
    rates: Rates
    tier: int
    """Devices of the first network tier outside the node."""
    precision: Precision
    """Number format of the arithmetic, unless pinned."""
    constants: Constants
    time_std: float
    """Standard deviation of the logarithm of measured over predicted."""
    memory_std: float
    compress_s: Mapping[str, float] = field(default_factory=dict)
    """Word of `sync` -> seconds to compress a number, as a probe measured it."""
    factors: Factors = field(default_factory=dict)
    """Measured over predicted, as finished runs on this cluster found it."""
    kinds: tuple[DeviceKind, ...] = ()
    """The devices, where they are of several kinds."""
    is_in_order: bool = False
    """True if ranks stay in their order on a network of known topology, false if they are placed."""
    placed_meshes: dict[tuple[int, ...], int] = field(default_factory=dict, compare=False)
    """Meshes that have their place (`Placer`): they keep it if rates change."""

    @classmethod
    def of(cls, run: RunConfig, cluster: Cluster) -> CostModel:
        """Return the cost model of the run on all devices of the cluster.

        The precision is bf16 (or fp16) if the slowest device has fast matmuls of it. Constants and standard deviations
        are those that fit published runs, or those that a probe measured.
        """
        device, tiers = cluster.device, cluster.tiers
        half: Precision = "bf16" if "bf16" in device.formats else "fp16"
        fast = half in device.formats and (
            "fp32" not in device.formats
            or device.matmul_flops_per_s(half) > FAST_HALF * device.matmul_flops_per_s("fp32")
        )
        return cls(
            run=run,
            devices=cluster.devices,
            rates=Rates.of(cluster),
            tier=tiers[1].devices if len(tiers) > 1 else cluster.devices_per_node,
            precision=half if fast else "fp32",
            constants=constants_of(cluster),
            time_std=time_std(cluster, experts=run.model.moe.experts > 0),
            memory_std=memory_std(cluster),
            compress_s={rate.sync: rate.number_s for rate in cluster.measured.compression} if cluster.measured else {},
            factors=cluster.factors,
            kinds=kinds_of(cluster),
        )

    def as_started(self) -> CostModel:
        """Return the cost model with ranks where a run that is started has them: placed only by its launch.rank_map."""
        return self if self.run.launch.rank_map else replace(self, is_in_order=True)

    def on(self, run: RunConfig, devices: int) -> CostModel:
        """Return the cost model of another run, or for another number of the same devices."""
        return replace(self, run=run, devices=devices, placed_meshes={})

    @cached_property
    def workload(self) -> Workload:
        return Workload.of(self.run)

    @cached_property
    def system(self) -> System:
        """Argosy, with the run's optimizer and checks."""
        moments, large = moments_of(self.run), (LEAST_INT8, LEAST_INT8)
        inside, ends = (settings_of(name, large, self.run.optimizer) for name in ("up.weight", "embedding.weight"))
        moment_bytes, of_ends = (moments[of.rule] * (1.0 + 4 / INT8_BLOCK if of.int8 else 4.0) for of in (inside, ends))
        return System(
            moment_bytes=moment_bytes,
            ends_moment_bytes=of_ends - moment_bytes,
            hidden=hidden_matrices(self.run),
            direction_bytes=4 if self.rates.host_waits else 2,
            widened_bytes=moments[inside.rule] * 4.0 * inside.int8,
            saves_here=self.rates.host_waits,
            chunk_rows=LEAST_CHUNK_ROWS["cpu" if self.rates.host_waits else "accelerator"],
            deals_experts=1,
            buckets=1,
            copies_sums=self.rates.host_waits,
            gathers_ahead=1,
            computes_shared_meanwhile=1,
            checks_gradients=float(self.run.resilience.replay_check_every_steps > 0),
        )

    @cached_property
    def compression(self) -> Compression:
        return Compression(self.run.sync, self.compress_s)

    @property
    def memory_bytes(self) -> float:
        """Most bytes that a prediction may come to, so that the plan fits nine times of ten."""
        return float(self.rates.memory_bytes) / self._margin

    @property
    def host_memory_bytes(self) -> float:
        """The same of what a device keeps in its host's memory."""
        return float(self.rates.host_memory_bytes) / self._margin

    @property
    def _margin(self) -> float:
        return math.exp(FITS_Z * self.memory_std)

    def has_room(self, plans: Layouts, memory_bytes: Floats, slack: float = 0.0) -> NDArray[np.bool_]:
        """Return True for the plans, predicted to take `memory_bytes`, that fit the device and, offloaded, its host.

        slack: share by which they may exceed the device. On CPUs the host is the device.
        """
        on_host, most = self.predict_host_memory(plans), self.memory_bytes * (1 + slack)
        if self.rates.host_waits:
            return memory_bytes + on_host <= most
        return (memory_bytes <= most) & (on_host <= self.host_memory_bytes)

    def predict_host_memory(self, plans: Layouts) -> Floats:
        """Return the bytes that each plan's rank offloads to its host's memory."""
        offloads = np.broadcast_to(~plans.is_("offload", "none"), len(plans))
        found = np.zeros(len(plans))
        if offloads.any():
            some = plans[offloads]
            whole = replace(some, offload=column_of("offload", ["none"]))
            found[offloads] = np.asarray(self.predict_memory(whole).total) - self.predict_memory(some).total
        return np.maximum(0.0, found)

    def predict_memory(self, plans: Layouts) -> Footprint:
        """Return the bytes of each plan, on the rank that needs most."""

        def of_ranks(some: Layouts) -> Footprint:
            return MemoryModel(some, self.workload, self.system, self.constants, self.compression).predict()

        # Several ranks of a pipeline are computed, so that plans without one go by themselves.
        is_alone = np.broadcast_to(plans.pp == 1, len(plans))
        order = np.argsort(np.concatenate([np.flatnonzero(is_alone), np.flatnonzero(~is_alone)]))
        parts = [_in_chunks(plans[rows], of_ranks, Footprint) for rows in (is_alone, ~is_alone)]
        whole = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Footprint)}
        raw = Footprint(**whole).rows(order)
        return raw.calibrated(self.factors)

    def with_buckets(self, plans: Layouts) -> Layouts:
        """Return the plans with the size of buckets that each waits least for (`plan.cost.step_time`)."""
        sizes = [
            np.broadcast_to(self.step_model(some).best_bucket_mb(), len(some))
            for some in (plans[start : start + PLANS_AT_ONCE] for start in range(0, len(plans), PLANS_AT_ONCE))
        ]
        return replace(plans, bucket_mb=np.concatenate(sizes)) if sizes else plans

    def predict_time(self, plans: Layouts) -> StepTime:
        raw = _in_chunks(plans, lambda some: self.step_model(some).predict(), StepTime)
        time = raw.calibrated(self.factors)
        return self._by_speed(plans, time) if self.kinds else time

    def step_s(self, plan: Plan) -> float:
        return first_of(self.predict_time(Layouts.of([plan])).total)

    def time_of(self, parts: Mapping[str, float], beside_s: float = 0.0) -> Estimate:
        """Return the seconds of a step whose parts these are, by category, and of what comes beside them."""
        return Estimate.log_normal(sum(parts.values()) + beside_s, spread(parts, OF_TIME, self.factors, self.time_std))

    def memory_of(self, parts: Mapping[str, float]) -> Estimate:
        """Return the bytes of a rank whose parts these are, by category."""
        return Estimate.log_normal(sum(parts.values()), spread(parts, MEMORY_FACTORS, self.factors, self.memory_std))

    def placements(self, plans: Layouts) -> Placements | None:
        """Return how each plan's ranks are placed on the network; None if its topology is not known."""
        fabric = self.rates.fabric
        if fabric is None:
            return None
        if self.is_in_order:
            return placed_in_order(fabric, plans)
        return self._placer.best(plans)

    @cached_property
    def _placer(self) -> Placer:
        assert self.rates.fabric is not None
        return Placer(self.rates.fabric, self._step_s_on, self.placed_meshes)

    def step_model(self, plans: Layouts) -> StepModel:
        """Return the step model of plans, each placed."""
        plans, fabric = _alone_as_zero(plans), self.rates.fabric
        placed = self.placements(plans)
        if fabric is None or placed is None:
            return self._model_on(plans, None)
        return self._model_on(plans, fabric.placed(plans, placed.ways, placed.rows))

    def _step_s_on(self, plans: Layouts, fabric: Fabric) -> Floats:
        return np.asarray(self._model_on(_alone_as_zero(plans), fabric).predict().total)

    def _model_on(self, plans: Layouts, fabric: Fabric | None) -> StepModel:
        rates = self.rates if fabric is None else replace(self.rates, fabric=fabric)
        return StepModel(plans, self.workload, rates, self.system, self.constants, self.compression)

    @cached_property
    def uneven(self) -> UnevenTimes:
        """Predicts plans that deal work out by the speed of devices of several kinds."""
        return UnevenTimes(self)

    def _by_speed(self, plans: Layouts, time: StepTime) -> StepTime:
        """Replace the times of plans that deal work out unevenly: the others wait for the slowest device."""
        said = [mask for key in RATIOS for mask, _ in plans.numbers(key)]
        for row in np.flatnonzero(np.broadcast_to(reduce(or_, said, np.zeros(1, bool)), len(plans))):
            of_row = self.uneven.predict(plans.plan(int(row)))
            for f in fields(StepTime) if of_row is not None else ():
                getattr(time, f.name)[row] = first_of(getattr(of_row, f.name))
        return time


def _alone_as_zero(plans: Layouts) -> Layouts:
    """A rank alone shares nothing."""
    return replace(plans, zero=np.where(plans.dp_shard * plans.cp == 1, 0, plans.zero))


def _in_chunks(plans: Layouts, predict: Callable[[Layouts], BreakdownT], kind: type[BreakdownT]) -> BreakdownT:
    whole = {f.name: np.empty(len(plans)) for f in fields(kind)}
    for start in range(0, len(plans), PLANS_AT_ONCE):
        cost = predict(_alone_as_zero(plans[start : start + PLANS_AT_ONCE]))
        for name, column in whole.items():
            column[start : start + PLANS_AT_ONCE] = getattr(cost, name)
    return kind(**whole)
