"""Heterogeneous devices in one job: work dealt out in proportion to their speed, and the time of such a step.

Either each data-parallel replica has devices of one kind, and fast replicas run more microbatches (`shares` of a plan);
or each pipeline stage has, and fast stages have more layers (`layers`). The time of a share follows from the cost model
with the rates of its kind; shares are whole, and the slowest decides. Ranks are counted in the order of the cluster's
groups, so the first replicas, or the first stages, are on the first group's devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import first_of
from argosy.plan.dealing import deal, layers_of_stages
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.quantities import ratio_of
from argosy.plan.rules import first_problem

Floats = NDArray[np.float64]


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
    """The plan, with what it deals out unevenly."""
    step_s: float
    shares: tuple[DeviceShare, ...]


def uneven_splits(costs: CostModel, plans: Sequence[Plan]) -> list[UnevenSplit]:
    """Return the best uneven batch per replica and the best uneven layers per stage, each on the best of these plans.

    Empty if all devices are alike, or if no plan keeps a replica or a stage to one kind of device.
    """
    if not costs.kinds:
        return []
    found: list[UnevenSplit] = []
    for way in (_by_microbatches, _by_layers):
        ways = [split for plan in plans if (split := way(costs, plan))]
        found += sorted(ways, key=lambda split: split.step_s)[:1]
    return found


def _by_microbatches(costs: CostModel, plan: Plan) -> UnevenSplit | None:
    """Put each replica on devices of one kind, with as many microbatches as it can run in the time of the others."""
    times = costs.uneven
    holders = times.holders(plan, plan.holders_of_shares)
    if plan.pp > 1 or holders is None:  # a pipeline's replicas lie across all devices
        return None
    many = int(holders.sum())
    total = costs.run.train.global_batch // plan.microbatch // (plan.dp // many)
    each = np.arange(1, total // many * 4 + 2)
    dealt = deal(total, holders, np.stack([np.asarray(times.of_share(plan, k, each).total) for k in costs.kinds]))
    if dealt is None:
        return None
    return _split(costs, plan, "microbatches", {"shares": ratio_of(_in_order(dealt[0]))}, *dealt)


def _by_layers(costs: CostModel, plan: Plan) -> UnevenSplit | None:
    """Put each pipeline rank on devices of one kind, with as many layers as it can hold and run in the others' time."""
    uneven = costs.uneven
    holders = uneven.holders(plan, plan.pp)
    if holders is None:
        return None
    layers, times = costs.run.model.layers, uneven.of_kinds(plan)
    memory = np.array([float(kind.rates.memory_bytes) for kind in costs.kinds])
    most = room_for_layers(costs, plan, costs.memory_bytes * (memory / memory.min()))
    each = np.arange(1, layers + 1)
    seconds = np.where(each <= most[:, None], uneven.of_layer(plan, times)[:, None] * each, np.inf)
    dealt = deal(layers, holders, seconds)
    if dealt is None:
        return None
    of_ranks = _in_order(dealt[0])
    said = layers_of_stages(plan, of_ranks)
    if said is None:
        return None
    step_s = uneven.of_pipeline_s(plan, times, of_ranks, holders)
    return _split(costs, plan, "layers", {"layers": said}, dealt[0], step_s)


def room_for_layers(costs: CostModel, plan: Plan, memory_bytes: Floats) -> Floats:
    """Return how many layers a pipeline rank has room for on devices that may hold so many bytes, for each of them."""
    even = plan.model_copy(update={"layers": "", "shares": ""})
    memory = costs.predict_memory(Layouts.of([even]))
    constant = first_of(memory.workspace) + first_of(memory.logits)
    of_layer_bytes = (first_of(memory.total) - constant) / (costs.run.model.layers / plan.pp)
    return np.floor((memory_bytes - constant) / of_layer_bytes)  # of infinite memory, // is no number


def _in_order(pieces: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the pieces of all holders, kind by kind."""
    return tuple(int(n) for row in pieces for n in row if n)


def _split(
    costs: CostModel, plan: Plan, what: str, said: dict[str, str], dealt: NDArray[np.int64], step_s: float
) -> UnevenSplit | None:
    """Return the split of `plan` with the word that says it; None if the run cannot be trained like that."""
    uneven = plan.model_copy(update=said)
    if first_problem(uneven, costs.run) is not None:
        return None
    by_device: dict[str, list[int]] = {}
    for kind, row in zip(costs.kinds, dealt, strict=True):
        by_device.setdefault(kind.device, []).extend(int(n) for n in row if n)
    shares = [DeviceShare(device, len(some), min(some), max(some)) for device, some in by_device.items()]
    return UnevenSplit(what, str(uneven), step_s, tuple(shares))
