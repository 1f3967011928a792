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
from argosy.plan.cost.uneven_time import first_of
from argosy.plan.layouts import Layouts
from argosy.plan.pipeline import SCHEDULES, stages_of_rank
from argosy.plan.plan import Plan
from argosy.plan.ratio import ratio_of
from argosy.plan.rules import first_problem
from argosy.plan.shares import holders_of

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
    holders = times.holders(plan, holders_of(plan))
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
    memory = costs.predict_memory(Layouts.of([plan]))
    constant = first_of(memory.workspace) + first_of(memory.logits)
    of_layer_bytes = (first_of(memory.total) - constant) / (layers / plan.pp)
    room = float(costs.memory_bytes) / float(costs.rates.memory_bytes)
    most = np.array([(float(kind.rates.memory_bytes) * room - constant) // of_layer_bytes for kind in costs.kinds])
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


def _in_order(pieces: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the pieces of all holders, kind by kind."""
    return tuple(int(n) for row in pieces for n in row if n)


def layers_of_stages(plan: Plan, of_ranks: Sequence[int]) -> str | None:
    """Return the word `layers` for a pipeline whose ranks have so many layers; None if a stage would have none.

    A rank with several stages has its layers in these as evenly as can be.
    """
    each, v_shaped = plan.stages // plan.pp, SCHEDULES[plan.schedule].v_shaped
    found = [0] * plan.stages
    for rank, layers in enumerate(of_ranks):
        for turn, stage in enumerate(stages_of_rank(rank, plan.pp, each, v_shaped)):
            found[stage] = layers // each + (turn < layers % each)
    return ":".join(map(str, found)) if min(found) else None


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
