"""Heterogeneous devices in one job: work dealt out in proportion to their speed, and the time of such a step.

Either each data-parallel replica has devices of one kind, and fast replicas run more microbatches; or each pipeline
stage has, and fast stages have more layers. The time of a share follows from the cost model with the rates of its kind;
shares are whole, and the slowest decides. So far the trainer itself deals work out evenly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.step_time import StepModel, StepTime
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.workload import Numbers

Floats = NDArray[np.float64]

ONCE_A_STEP = ("gradients", "optimizer", "other")
"""Categories that do not grow with a rank's layers and microbatches."""


@dataclass(frozen=True)
class DeviceShare:
    """The share of one kind of device."""

    device: str
    holders: int
    """Replicas, or pipeline ranks, of this kind."""
    least: int
    most: int
    """Microbatches of a replica, or layers of a pipeline rank: some have `least`, some `most`."""

    @property
    def range(self) -> str:
        """Both numbers, or the one that all have."""
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"


@dataclass(frozen=True)
class UnevenSplit:
    """Work dealt out by speed."""

    what: str
    """microbatches or layers."""
    plan: str
    step_s: float
    shares: tuple[DeviceShare, ...]


def uneven_splits(costs: CostModel, cluster: Cluster, plans: list[Plan]) -> list[UnevenSplit]:
    """Return the best uneven batch per replica and the best uneven layers per stage, each on the best of these plans.

    Empty if all devices are alike, or if no plan keeps a replica or a stage to one kind of device.
    """
    kinds = _kinds(cluster)
    if len(kinds) == 1:
        return []
    found: list[UnevenSplit] = []
    for way in (_by_microbatches, _by_layers):
        ways = [split for plan in plans if (split := way(costs, plan, kinds))]
        found += sorted(ways, key=lambda split: split.step_s)[:1]
    return found


@dataclass(frozen=True)
class _Kind:
    device: str
    devices: int
    rates: Rates


def _kinds(cluster: Cluster) -> list[_Kind]:
    """Return the devices by kind, each kind with its own rates on the network that all share."""
    shared = Rates.of(cluster)
    kinds: dict[str, _Kind] = {}
    for group in cluster.groups:
        own = replace(
            Rates.of_device(group.device),
            link_bytes_per_s=shared.link_bytes_per_s,
            nic_bytes_per_s=shared.nic_bytes_per_s,
            node=shared.node,
        )
        before = kinds.get(group.device.name, _Kind(group.device.name, 0, own))
        kinds[group.device.name] = replace(before, devices=before.devices + group.devices)
    return list(kinds.values())


def _by_microbatches(costs: CostModel, plan: Plan, kinds: list[_Kind]) -> UnevenSplit | None:
    """Put each replica on devices of one kind, with as many microbatches as it can run in the time of the others."""
    of_replica = plan.world_size // plan.dp
    if plan.dp == 1 or any(kind.devices % of_replica for kind in kinds):
        return None
    holders = np.array([kind.devices // of_replica for kind in kinds])
    total = costs.run.train.global_batch // plan.microbatch
    each = np.arange(1, total // int(holders.sum()) * 4 + 2)
    work = replace(costs.workload, global_batch=each * float(plan.dp * plan.microbatch))
    one = Layouts.of([plan])
    seconds = np.stack(
        [
            StepModel(one, work, kind.rates, costs.system, costs.constants, costs.compression).predict().total
            for kind in kinds
        ]
    )
    dealt = deal(total, holders, seconds)
    return None if dealt is None else _uneven("microbatches", plan, kinds, *dealt)


def _by_layers(costs: CostModel, plan: Plan, kinds: list[_Kind]) -> UnevenSplit | None:
    """Put each pipeline rank on devices of one kind, with as many layers as it can hold, and run in the others' time.

    If rank i takes s_i seconds for a microbatch, m microbatches take sum(s_i) + (m - 1) max(s_i) (1F1B). With v stages
    on a rank, the part of the sum beyond max(s_i) shrinks to 1/v.
    """
    of_rank = plan.world_size // plan.pp
    if plan.pp == 1 or any(kind.devices % of_rank for kind in kinds):
        return None
    holders = np.array([kind.devices // of_rank for kind in kinds])
    layers, one = costs.run.model.layers, Layouts.of([plan])
    even = layers / plan.pp
    microbatches = plan.microbatches(costs.run.train.global_batch)
    times = [
        StepModel(one, costs.workload, kind.rates, costs.system, costs.constants, costs.compression).predict()
        for kind in kinds
    ]
    of_layer = np.array([_repeated_s(time) / microbatches / even for time in times])
    memory = costs.predict_memory(one)
    constant = _first(memory.workspace) + _first(memory.logits)
    of_layer_bytes = (_first(memory.total) - constant) / even
    room = float(costs.memory_bytes) / float(costs.rates.memory_bytes)
    most = np.array([(float(kind.rates.memory_bytes) * room - constant) // of_layer_bytes for kind in kinds])
    each = np.arange(1, layers + 1)
    seconds = np.where(each <= most[:, None], of_layer[:, None] * each, np.inf)
    dealt = deal(layers, holders, seconds)
    if dealt is None:
        return None
    layers_of, slowest = dealt
    of_all = float(of_layer @ layers_of.sum(axis=1))
    turns = float(Layouts.of([plan]).stages_here[0])
    once = max(sum(_first(getattr(time, name)) for name in ONCE_A_STEP) for time in times)
    step_s = (of_all - slowest) / turns + microbatches * slowest + once
    return _uneven("layers", plan, kinds, layers_of, step_s)


def _repeated_s(time: StepTime) -> float:
    """Return the seconds of a step's microbatches on one rank, without the bubble."""
    return sum(_first(getattr(time, f.name)) for f in fields(time) if f.name not in (*ONCE_A_STEP, "bubble"))


def _first(values: Numbers) -> float:
    return float(np.atleast_1d(values)[0])


def _uneven(what: str, plan: Plan, kinds: list[_Kind], dealt: NDArray[np.int64], step_s: float) -> UnevenSplit:
    shares = [
        DeviceShare(kind.device, int((row > 0).sum()), int(row[row > 0].min()), int(row.max()))
        for kind, row in zip(kinds, dealt, strict=True)
    ]
    return UnevenSplit(what, str(plan), step_s, tuple(shares))


def deal(total: int, holders: NDArray[np.int64], seconds: Floats) -> tuple[NDArray[np.int64], float] | None:
    """Deal `total` pieces to holders of several kinds so that the last one ends as early as possible.

    holders: number of each kind. seconds: [kind, n - 1] time of n pieces, growing with n; infinite for more than a
    holder has room for. Returns pieces [kind, holder], padded with zeros, and the seconds of the slowest; None if the
    holders have no room for all pieces, or if one would get none.
    """
    enough = (
        counts
        for limit in np.unique(seconds[np.isfinite(seconds)])
        if (counts := (seconds <= limit).sum(axis=1)).min() > 0 and counts @ holders >= total
    )
    most = next(enough, None)
    if most is None or total < holders.sum():
        return None
    pieces = np.where(np.arange(holders.max()) < holders[:, None], most[:, None], 0)
    for _ in range(int(most @ holders) - total):
        taken = np.take_along_axis(seconds, np.maximum(pieces - 1, 0), axis=1)
        pieces.flat[np.argmax(np.where(pieces > 1, taken, -1.0))] -= 1
    return pieces, float(max(seconds[kind, row.max() - 1] for kind, row in enumerate(pieces)))
