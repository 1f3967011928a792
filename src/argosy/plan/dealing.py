"""Dealing work out by speed, in whole pieces: microbatches to replicas, layers to pipeline ranks.

What a pipeline's rank does in a microbatch is counted in layers: those of its stages, and the head on the rank of the
last one, which counts as many as its FLOPs do. The layers of a model are taken to be alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.config.model import ModelConfig
from argosy.plan.pipeline import split_layers
from argosy.plan.plan import Plan
from argosy.plan.workload import train_flops_per_token

Floats = NDArray[np.float64]

COLD_STEPS = 2
"""First steps of a world, or under other shares, which compile, warm up and read late: they tell no rank's speed."""
LEAST_HOLD = 0.1
"""A slow rank whose steps are not so much longer than its peers' has a share of the work that fits its speed."""
DOUBT = 2.0
"""Embedding and head, around the layers, may take nothing, or so many times what their FLOPs say."""


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


def layers_of_stages(plan: Plan, of_ranks: Sequence[int]) -> str | None:
    """Return the word `layers` for a pipeline whose ranks have so many layers; None if a stage would have none.

    A rank with several stages has its layers in these as evenly as can be.
    """
    each = plan.stages // plan.pp
    found = [0] * plan.stages
    for rank, layers in enumerate(of_ranks):
        for turn, stage in enumerate(plan.stages_of(rank)):
            found[stage] = layers // each + (turn < layers % each)
    return ":".join(map(str, found)) if min(found) else None


def pipeline_s(of_ranks: Floats, turns: float, microbatches: float) -> Any:
    """Return the seconds in which a pipeline runs a step's microbatches, whose ranks take `of_ranks` for each.

    of_ranks: [..., rank]; the result has the shape before that.

    If rank i takes s_i seconds for a microbatch, m microbatches take sum(s_i) + (m - 1) max(s_i) (1F1B). With v stages
    on a rank, `turns`, the part of the sum beyond max(s_i) shrinks to 1/v.
    """
    slowest = of_ranks.max(axis=-1)
    return (of_ranks.sum(axis=-1) - slowest) / turns + microbatches * slowest


@dataclass(frozen=True)
class PipelineWork:
    """The work of each pipeline rank in a microbatch, in layers."""

    plan: Plan
    """With the layers of each stage said."""
    layers: Floats
    """The layers of each rank."""
    beside: Floats
    """The head, on the rank that has it, by FLOPs."""
    doubtful: Floats
    """The most that embedding and head may count for, on the ranks that have them."""

    @classmethod
    def of(cls, plan: Plan, model: ModelConfig, seq_len: int) -> PipelineWork:
        """Return the work of the plan's pipeline ranks, of a model with sequences of so many tokens."""
        head = train_flops_per_token(model.model_copy(update={"layers": 0}), seq_len)
        layer = (train_flops_per_token(model, seq_len) - head) / model.layers
        stages = [plan.stages_of(rank) for rank in range(plan.pp)]
        if not plan.layers:
            of_stages = [len(layers) for layers in split_layers(model, seq_len, plan.stages)]
            plan = plan.model_copy(update={"layers": ":".join(map(str, of_stages))})
        ends = np.array([[0 in mine, plan.stages - 1 in mine] for mine in stages], float)
        beside = ends[:, 1] * head / layer
        return cls(plan, np.array(plan.layers_of_ranks, float), beside, DOUBT * ends.sum(axis=1) * head / layer)

    @property
    def units(self) -> Floats:
        """The layers that the work of each rank counts for."""
        return self.layers + self.beside

    def dealt_by_speed(self, stage_s: Floats, most: Floats | None = None) -> PipelineWork | None:
        """Return the deal of layers whose slowest rank ends first, where ranks take `stage_s` for their work now.

        most: layers that each rank has room for. None if that is the deal in force, or none is possible.
        """
        speeds, total = stage_s / self.units, round(float(self.layers.sum()))
        each = np.arange(1, total + 1)
        seconds = speeds[:, None] * (each + self.beside[:, None])
        if most is not None:
            seconds = np.where(each <= most[:, None], seconds, np.inf)
        dealt = deal(total, np.ones(len(stage_s), np.int64), seconds)
        said = None if dealt is None else layers_of_stages(self.plan, [int(n) for n in dealt[0][:, 0]])
        if dealt is None or said is None or (dealt[0][:, 0] == self.layers).all():
            return None
        plan = self.plan.model_copy(update={"layers": said})
        return PipelineWork(plan, dealt[0][:, 0].astype(float), self.beside, self.doubtful)

    def takes_s(self, stage_s: Floats, now: PipelineWork, microbatches: float) -> Any:
        """Return the seconds of a step's microbatches under this deal, of ranks that take `stage_s` for one under
        `now`: [..., rank]."""
        turns = self.plan.stages // self.plan.pp
        return pipeline_s(stage_s / now.units * self.units, turns, microbatches)


@dataclass(frozen=True)
class RankWork:
    """The work of each rank in a microbatch, and whom it can be compared with.

    Ranks of one pipeline stage do the same. Ranks of several are compared only where a stage has one: then embedding
    and head may count for nothing, or for `DOUBT` times what their FLOPs say.
    """

    peers: tuple[range, ...]
    least: Floats
    """In any unit that is the same for all. Shape, as of `most`: (ranks,)."""
    most: Floats

    @classmethod
    def of(cls, plan: Plan, model: ModelConfig, seq_len: int) -> RankWork:
        ranks, of_stage = plan.world_size, plan.world_size // plan.pp
        if plan.pp == 1 or of_stage > 1:
            stages = tuple(range(first, first + of_stage) for first in range(0, ranks, of_stage))
            return cls(stages, np.ones(ranks), np.ones(ranks))
        work = PipelineWork.of(plan, model, seq_len)
        return cls((range(ranks),), work.layers, work.layers + work.doubtful)

    @classmethod
    def alike(cls, ranks: int) -> RankWork:
        """Return the work of ranks that all do the same."""
        return cls((range(ranks),), np.ones(ranks), np.ones(ranks))

    def over_peers(self, busy_s: Floats, microbatches: Floats) -> tuple[Floats, Floats]:
        """Return by rank, of one step, its time for a unit of work over the median of its peers', and its time of the
        step over theirs, whatever each had to do: by how much it holds them up.

        busy_s: seconds of own work, without waits. Shape of all: (ranks,). NaN where busy_s is, and without peers.
        """
        of_one = busy_s / microbatches
        ratios = self._over_medians(of_one / self.most, of_one / self.least)
        is_even = bool((microbatches == microbatches[:1]).all()) and np.array_equal(self.least, self.most)
        return ratios, ratios if is_even else self._over_medians(busy_s, busy_s)

    def _over_medians(self, mine_s: Floats, others_s: Floats) -> Floats:
        ratios = np.full(len(mine_s), np.nan)
        for peers in self.peers:
            known = np.asarray(peers)[np.isfinite(mine_s[peers.start : peers.stop])]
            if len(known) > 1:
                ratios[known] = mine_s[known] / np.maximum(medians_without(others_s[known]), 1e-9)
        return ratios


def medians_without(times: Floats) -> Floats:
    """Return, for each of at least two times, the median of the others."""
    order = np.argsort(times, kind="stable")
    ascending, at, others = times[order], np.arange(len(times)), len(times) - 1
    low, high = ((others - 1) // 2, others // 2)
    medians = np.empty_like(times)
    medians[order] = (ascending[low + (low >= at)] + ascending[high + (high >= at)]) / 2
    return medians
