"""Which of a stage's layers are alike, so that a few of them tell what all do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from argosy.config.schema import RunConfig
from argosy.plan.cost.exact_state import DTYPE_BYTES, local_shard_of, stages_on
from argosy.plan.layer_spec import LayerSpec, layer_spec
from argosy.plan.parameters import Parameter, Stage, Table, block_table, parameter_table
from argosy.plan.plan import Plan


@dataclass(frozen=True)
class Alike:
    """Layers that come again and again, the last ones of a stage."""

    stage: Stage
    first: int
    """Where they begin."""
    period: int
    """Layers of one repetition."""

    @property
    def times(self) -> int:
        """Whole repetitions."""
        return (self.stage.layers[-1] + 1 - self.first) // self.period

    def few(self, times: int) -> list[int]:
        """Return the stage's layers with only this many repetitions: those after the first are left out."""
        kept = self.first + self.period
        left_out = (self.times - times) * self.period
        return [*range(self.stage.layers[0], kept), *range(kept + left_out, self.stage.layers[-1] + 1)]


def layers_alike(plan: Plan, run: RunConfig, rank: int) -> Alike | None:
    """Those on rank `rank`; None if it has several stages, or what it does with them may not be the same for each."""
    stages = stages_on(plan, run, rank)
    if len(stages) > 1 or run.optimizer.kind == "muon" or run.optimizer.groups:
        return None  # Muon deals matrices out over ranks, and groups may name single layers
    (stage,) = stages.values()
    if not _buckets_repeat(plan, run, rank, stage):
        return None
    first, period = _last_repetitions([layer_spec(run.model, layer) for layer in stage.layers])
    if period > 1 and not _parameters_alike(run, stage.layers[first:]):
        return None  # buckets of gradients begin elsewhere in each layer
    return Alike(stage, stage.layers[first], math.lcm(period, 1 if plan.recompute == "none" else plan.recompute_every))


def _last_repetitions(specs: Sequence[LayerSpec]) -> tuple[int, int]:
    """Return from where on layers repeat themselves up to the last, and after how many: as early as can be."""
    found = []
    for period in range(1, len(specs) + 1):
        first = len(specs) - period
        while first and specs[first - 1] == specs[first - 1 + period]:
            first -= 1
        found.append((first, period))
        if not first:
            break
    return min((first, period) for first, period in found if len(specs) - first >= 2 * period or first == found[0][0])


def _parameters_alike(run: RunConfig, layers: Sequence[int]) -> bool:
    tables = [block_table(run.model, layer) for layer in layers]
    return all(table == tables[0] for table in tables)


def _buckets_repeat(plan: Plan, run: RunConfig, rank: int, stage: Stage) -> bool:
    """Return True if the buckets of gradients (`parallel.data`) begin alike in each layer, or there is only one.

    A parameter that fills a bucket alone ends it, so that what comes after begins alike.
    """
    if plan.shards_parameters or plan.dp * plan.cp == 1:
        return not plan.sums_beside_fsdp
    of_layer = block_table(run.model, stage.layers[-1], plan.tp)
    whole = parameter_table(run.model, stage, plan.tp)
    bucket_bytes = plan.bucket_mb * 2**20
    return all(
        not here or max(here) >= bucket_bytes or sum(_bytes(whole, plan, rank, experts)) < bucket_bytes
        for experts in (False, True)
        for here in [_bytes(of_layer, plan, rank, experts)]
    )


def _bytes(table: Table, plan: Plan, rank: int, experts: bool) -> Sequence[int]:
    """Return the bytes of each parameter as tensor and expert parallelism leave it: dealt experts, or all else."""

    def is_dealt(parameter: Parameter) -> bool:
        return parameter.is_expert and plan.ep > 1

    each = DTYPE_BYTES[plan.weights]
    return [each * local_shard_of(p, plan, rank).numel for p in table.values() if is_dealt(p) == experts]
