"""Pipeline schedules, and how layers are dealt to stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from argosy.config.model import ModelConfig, MTPConfig
from argosy.plan.layer_spec import layer_kinds
from argosy.plan.quantities import lowest
from argosy.plan.workload import Numbers, train_flops_per_token

if TYPE_CHECKING:
    from numpy.typing import NDArray

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


@dataclass(frozen=True)
class ScheduleRule:
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
V_SHAPED: tuple[Schedule, ...] = tuple(name for name, rule in SCHEDULES.items() if rule.v_shaped)
INTERLEAVED = tuple(name for name, rule in SCHEDULES.items() if rule.stages_per_rank is None)
SPLITTING = tuple(name for name, rule in SCHEDULES.items() if rule.splits_backward)
"""INTERLEAVED schedules take any number of stages on a rank; SPLITTING schedules split backward."""


def cannot_run(p: Any, microbatches: Any) -> Any:
    """Return True where the schedule of a plan, or of each of many, cannot run so many microbatches."""
    rounds = microbatches // p.pp
    too_few = p.is_("schedule", "1f1b", "dualpipev") & (microbatches < p.stages)
    uneven = p.is_("schedule", *INTERLEAVED) & (microbatches % (rounds + (rounds == 0)) != 0)
    return (p.pp > 1) & (too_few | uneven)


def cannot_run_a_share(p: Any, batch: int) -> Any:
    """Return True where the schedule cannot run the microbatches that `plan.shares` gives some pipeline of a batch."""
    found: Any = False
    of_portion = batch // (p.portions * p.microbatch)
    for said, numbers in p.numbers("shares"):
        for share in set(lowest(numbers)):
            found = found | (said & cannot_run(p, of_portion * share))
    return found


@lru_cache(64)
def split_layers(config: ModelConfig, seq_len: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, at least one each, such that the slowest stage is as fast as possible.

    A layer costs its FLOPs; the last stage also computes the head and modules of multi-token prediction. The split is
    optimal (dynamic programming over where the last stage begins); of equally good splits it is the one whose stages
    are most alike.
    """
    import numpy as np  # a plan is read where nothing is computed, and NumPy takes a tenth of a second

    of_layers = _flops_of_layers(config, seq_len)
    upto = np.cumsum([0.0, *of_layers])
    cost = upto[None, :] - upto[:, None]  # of a stage from its first layer [rows] to before its end [columns]
    cost[:, -1] += round(train_flops_per_token(config, seq_len)) - sum(of_layers)
    after_first = np.triu(np.ones(cost.shape, bool), 1)

    # Of the first `stage` stages over n layers [n]: the slowest, the sum of squares, and where each begins.
    slowest, squares = cost[0], cost[0] ** 2
    begins: list[list[int]] = [[0]] * (config.layers + 1)
    for stage in range(1, stages):
        allowed = after_first & (np.arange(config.layers + 1) >= stage)[:, None]
        slower = np.where(allowed, np.maximum(slowest[:, None], cost), np.inf)
        slowest = slower.min(0)
        sums = np.where(allowed & (slower == slowest), squares[:, None] + cost**2, np.inf)
        squares = sums.min(0)
        equal: list[list[list[int]]] = [[] for _ in begins]
        for first, n in np.argwhere(allowed & (sums == squares)).tolist():
            equal[n].append([*begins[first], first])
        begins = [min(some, default=[]) for some in equal]
    return tuple(range(first, end) for first, end in pairwise([*begins[-1], config.layers]))


def last_stage_layers(layers: Numbers, stages: Numbers, worth: Numbers) -> NDArray[Any]:
    """Return how many layers `split_layers` gives the last stage, for many splits at once, if all layers cost the same.

    worth: the cost of what the last stage computes besides, in layers. The other stages share the rest evenly, the
    first ones with fewer.
    """
    import numpy as np

    before = np.maximum(1, stages - 1)
    even = np.floor((layers - worth * before) / stages)
    many = [np.clip(even + more, 1, np.maximum(1, layers - before)) for more in (-1, 0, 1)]
    slowest = np.stack(np.broadcast_arrays(*(np.maximum(np.ceil((layers - n) / before), n + worth) for n in many)))
    less = [np.floor((layers - n) / before) for n in many]
    squares = [
        (before - (layers - n) % before) * f**2 + (layers - n) % before * (f + 1) ** 2
        for n, f in zip(many, less, strict=True)
    ]
    spread = np.stack(np.broadcast_arrays(*(s + (n + worth) ** 2 for s, n in zip(squares, many, strict=True))))
    best = np.where(slowest <= slowest.min(0), spread, np.inf).argmin(0)
    return np.take_along_axis(np.stack(np.broadcast_arrays(*many, slowest[0])[:3]), best[None], 0)[0]


def _flops_of_layers(config: ModelConfig, seq_len: int) -> list[int]:
    """Return each layer's FLOPs per token. They are whole numbers, so that equal splits cost exactly the same."""
    alone = config.model_copy(update={"mtp": MTPConfig()})

    def upto(layers: int) -> float:
        return train_flops_per_token(alone.model_copy(update={"layers": layers}), seq_len)

    found = [0] * config.layers
    for alike in layer_kinds(config).values():
        flops = round(upto(alike[0] + 1) - upto(alike[0]))
        for layer in alike:
            found[layer] = flops
    return found
