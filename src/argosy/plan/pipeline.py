"""Pipeline schedules, and how layers are dealt to stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from argosy.config.model import ModelConfig
from argosy.plan.flops import train_flops_per_token

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


@dataclass(frozen=True)
class ScheduleRule:
    """The demands of a schedule."""

    torch_name: str
    """Name of its class in torch.distributed.pipelining."""
    stages_per_rank: int | None
    """Stages on each rank; None: as many as the plan says (at least 2)."""
    v_shaped: bool = False
    """True if the last stage is on the first rank: rank r has stages r and 2 pp - 1 - r."""
    splits_backward: bool = False
    """True if gradients of inputs and of weights are computed at different times, which compiled blocks cannot do."""


SCHEDULES: dict[Schedule, ScheduleRule] = {
    "gpipe": ScheduleRule("GPipe", 1),
    "1f1b": ScheduleRule("1F1B", 1),
    "interleaved_1f1b": ScheduleRule("Interleaved1F1B", None),
    "interleaved_zero_bubble": ScheduleRule("InterleavedZeroBubble", None, splits_backward=True),
    "zbv": ScheduleRule("ZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleRule("DualPipeV", 2, v_shaped=True, splits_backward=True),
}
"""GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), interleaved (Narayanan et al. 2021), zero bubble and ZBV
(Qi et al. 2024), DualPipeV (DeepSeek-AI 2024, cut in half)."""
INTERLEAVED = tuple(name for name, rule in SCHEDULES.items() if rule.stages_per_rank is None)
SPLITTING = tuple(name for name, rule in SCHEDULES.items() if rule.splits_backward)
"""INTERLEAVED schedules take any number of stages on a rank; SPLITTING schedules split backward."""


def split_layers(config: ModelConfig, seq_len: int, stages: int) -> list[range]:
    """Return the layers of each stage, at least one each, such that the slowest stage is as fast as possible.

    A layer costs its FLOPs; the last stage also computes the head. The split is optimal (dynamic programming over where
    the last stage begins); of equally good splits it is the one whose stages are most alike.
    """
    upto = [train_flops_per_token(config.model_copy(update={"layers": n}), seq_len) for n in range(config.layers + 1)]
    head = upto[0]

    def cost(first: int, end: int) -> float:
        return upto[end] - upto[first] + (head if end == config.layers else 0.0)

    # best[n] for the first `stage` stages over n layers: (slowest stage, sum of squares, begin of the last stage)
    best: list[tuple[float, float, list[int]]] = [(cost(0, n), cost(0, n) ** 2, [0]) for n in range(config.layers + 1)]
    for stage in range(1, stages):
        best = [
            min(
                (max(best[first][0], cost(first, n)), best[first][1] + cost(first, n) ** 2, [*best[first][2], first])
                for first in range(stage, n)
            )
            if n > stage
            else (float("inf"), 0.0, [])
            for n in range(config.layers + 1)
        ]
    begins = [*best[config.layers][2], config.layers]
    return [range(first, end) for first, end in pairwise(begins)]


def stages_of_rank(rank: int, pp: int, per_rank: int, v_shaped: bool) -> list[int]:
    """Return the stages that pipeline rank `rank` of `pp` holds, in the order of the model."""
    if v_shaped:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * turn for turn in range(per_rank)]
