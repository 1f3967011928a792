"""The time of a step whose work is dealt out unevenly over devices of several kinds.

Ranks are counted in the order of the cluster's groups: the first replicas, or the first pipeline stages, are on the
first group's devices. A replica with shares of its own, or a pipeline rank, is on devices of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from argosy.config.schema import RunConfig
from argosy.plan.cost.breakdown import Factors
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.network import Compression
from argosy.plan.cost.rates import Rates, System
from argosy.plan.cost.step_time import StepModel, StepTime
from argosy.plan.dealing import pipeline_s
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.quantities import numbers_of
from argosy.plan.workload import Numbers, Workload

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
            ),
        )
        for group in cluster.groups
    )


@dataclass(frozen=True)
class UnevenTimes:
    """Predicts the steps of one run on devices of several kinds."""

    run: RunConfig
    work: Workload
    system: System
    constants: Constants
    compression: Compression
    factors: Factors
    kinds: tuple[DeviceKind, ...]

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
        if many == 1 or sum(kind.devices for kind in self.kinds) != plan.world_size:
            return None
        if any(kind.devices % of_one for kind in self.kinds):
            return None
        return np.array([kind.devices // of_one for kind in self.kinds])

    def of_share(self, plan: Plan, kind: DeviceKind, microbatches: NDArray[np.int64]) -> StepTime:
        """Return the time of a step in which ranks on `kind` run so many microbatches, for each of the numbers."""
        one = Layouts.of([plan.model_copy(update={"shares": "", "layers": ""})])
        work = replace(self.work, global_batch=microbatches * float(plan.dp * plan.microbatch))
        model = StepModel(one, work, kind.rates, self.system, self.constants, self.compression)
        return model.predict().calibrated(self.factors)

    def of_kinds(self, plan: Plan) -> list[StepTime]:
        """Return the time of a step of `plan`, dealt out evenly, on devices of each kind alone."""
        even = plan.model_copy(update={"shares": "", "layers": ""})
        many = np.array([even.microbatches(self.run.train.global_batch)])
        return [self.of_share(even, kind, many) for kind in self.kinds]

    def of_layer(self, plan: Plan, times: Sequence[StepTime]) -> NDArray[np.float64]:
        """Return the seconds of a layer and microbatch on each kind, whose steps take `times`."""
        microbatches, even = plan.microbatches(self.run.train.global_batch), self.run.model.layers / plan.pp
        return np.array([repeated_s(time) / microbatches / even for time in times])

    def of_pipeline_s(
        self, plan: Plan, times: Sequence[StepTime], layers: Sequence[int], holders: NDArray[np.int64]
    ) -> float:
        """Return the seconds of a step of a pipeline whose ranks have so many layers; `holders` of them on each
        kind."""
        kind_of = np.repeat(np.arange(len(self.kinds)), holders)
        of_ranks = self.of_layer(plan, times)[kind_of] * np.array(layers)
        once = max(sum(first_of(getattr(time, name)) for name in ONCE_A_STEP) for time in times)
        microbatches = plan.microbatches(self.run.train.global_batch)
        return float(pipeline_s(of_ranks, plan.stages // plan.pp, microbatches) + once)

    def _of_shares(self, plan: Plan) -> StepTime | None:
        many = len(numbers_of(plan.shares))
        holders = self.holders(plan, many)
        if plan.pp > 1 or holders is None:  # a pipeline's replicas lie across all devices
            return None
        batch = self.run.train.global_batch
        counts = [plan.microbatches_of(n * plan.dp // many, batch) for n in range(many)]
        most = [max(counts[end - n : end]) for n, end in zip(holders, np.cumsum(holders), strict=True)]
        times = [self.of_share(plan, kind, np.array([n])) for kind, n in zip(self.kinds, most, strict=True)]
        return max(times, key=lambda time: first_of(time.total))

    def _of_layers(self, plan: Plan) -> StepTime | None:
        holders = self.holders(plan, plan.pp)
        if holders is None or not plan.layers_of_ranks:
            return None
        times = self.of_kinds(plan)
        step_s = self.of_pipeline_s(plan, times, plan.layers_of_ranks, holders)
        slowest = max(times, key=lambda time: first_of(time.total))
        scale = step_s / first_of(slowest.total)
        return StepTime(**{f.name: getattr(slowest, f.name) * scale for f in fields(StepTime)})


def repeated_s(time: StepTime) -> float:
    """Return the seconds of a step's microbatches on one rank, without the bubble."""
    return sum(first_of(getattr(time, f.name)) for f in fields(time) if f.name not in (*ONCE_A_STEP, "bubble"))


def first_of(values: Numbers) -> float:
    """Return the first number of a column."""
    return float(np.atleast_1d(values)[0])
