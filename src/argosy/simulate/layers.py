"""Which of a stage's layers are alike, so that a few of them tell what all do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.config.schema import RunConfig
from argosy.plan.cost.exact_state import DTYPE_BYTES, local_shard_of, stages_on
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
    if len(stages) > 1 or run.optimizer.kind == "muon" or run.optimizer.groups or run.train.frozen:
        return None  # Muon deals matrices out over ranks, and patterns may name single layers
    (stage,) = stages.values()
    if not _buckets_repeat(plan, run, rank, stage):
        return None
    last = stage.layers[-1]
    same = [layer for layer in stage.layers if run.model.is_moe_layer(layer) == run.model.is_moe_layer(last)]
    return Alike(stage, min(same), 1 if plan.recompute == "none" else plan.recompute_every)


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
