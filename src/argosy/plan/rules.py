"""Which plans can train a run, as a table of rules; each states the values, the rule, and often what would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from argosy.config.schema import RunConfig
from argosy.plan.pipeline import SCHEDULES

if TYPE_CHECKING:
    from argosy.plan.plan import Plan

Rule = Callable[["Plan", RunConfig], str | None]
"""None, or in words why the plan cannot train the run."""


def batch_is_dealt_out(plan: Plan, run: RunConfig) -> str | None:
    rows = plan.dp * plan.microbatch
    if run.train.global_batch % rows == 0:
        return None
    below, above = run.train.global_batch // rows * rows, -(-run.train.global_batch // rows) * rows
    near = " or ".join(str(n) for n in (below, above) if n)
    return (
        f"train.global_batch = {run.train.global_batch} is not a multiple of {rows} "
        f"({plan.dp} data-parallel ranks x plan.microbatch = {plan.microbatch}). Try {near}."
    )


def heads_are_dealt_out(plan: Plan, run: RunConfig) -> str | None:
    heads, kv_heads = run.model.heads, run.model.kv_heads
    if heads % plan.tp:
        return f"plan.tp = {plan.tp} does not divide model.heads = {heads}: each rank computes as many heads."
    if kv_heads % plan.tp and plan.tp % kv_heads:
        return (
            f"plan.tp = {plan.tp} and model.kv_heads = {kv_heads}: one must divide the other, "
            "so that each rank has as many key/value heads, or shares one."
        )
    return None


def feed_forward_is_dealt_out(plan: Plan, run: RunConfig) -> str | None:
    if run.model.ffn_width % plan.tp:
        return f"plan.tp = {plan.tp} does not divide model.ffn_width = {run.model.ffn_width}."
    return None


def tokens_are_dealt_out(plan: Plan, run: RunConfig) -> str | None:
    pieces = plan.tp * (2 * plan.cp if plan.cp > 1 else 1)
    if run.data.seq_len % pieces == 0:
        return None
    two = "2 x plan.cp (an early and a late chunk for each rank) x " if plan.cp > 1 else ""
    return (
        f"data.seq_len = {run.data.seq_len} is not a multiple of {pieces} = {two}plan.tp = {plan.tp}. "
        f"Try data.seq_len = {max(1, run.data.seq_len // pieces) * pieces}."
    )


def ulysses_has_heads(plan: Plan, run: RunConfig) -> str | None:
    if plan.cp == 1 or plan.context != "ulysses":
        return None
    heads, kv_heads = run.model.heads // plan.tp, max(1, run.model.kv_heads // plan.tp)
    if heads % plan.cp or (kv_heads % plan.cp and plan.cp % kv_heads):
        return (
            f"plan.context = ulysses with plan.cp = {plan.cp}: {heads} heads and {kv_heads} key/value heads on each of "
            f"plan.tp = {plan.tp} ranks; plan.cp must divide the former, and divide the latter or be a multiple. "
            "Try context=ring."
        )
    return None


def every_stage_has_a_layer(plan: Plan, run: RunConfig) -> str | None:
    if plan.pp > 1 and plan.stages > run.model.layers:
        return (
            f"plan.pp = {plan.pp} with schedule {plan.schedule} makes {plan.stages} stages, "
            f"and model.layers = {run.model.layers}: each stage needs a layer."
        )
    return None


def schedule_admits_the_microbatches(plan: Plan, run: RunConfig) -> str | None:
    if plan.pp == 1:
        return None
    n = plan.microbatches(run.train.global_batch)
    problem = f"plan.schedule = {plan.schedule} with plan.pp = {plan.pp} cannot run {n} microbatches a step"
    remedy = "(train.global_batch / data-parallel ranks / plan.microbatch)"
    if plan.schedule == "1f1b" and n < plan.stages:
        return f"{problem} {remedy}: at least {plan.stages}."
    if plan.schedule == "dualpipev" and n < plan.stages:
        return f"{problem} {remedy}: at least {plan.stages}, its stages."
    if SCHEDULES[plan.schedule].stages_per_rank is None and n % max(1, n // plan.pp):
        below, above = n // plan.pp * plan.pp, -(-n // plan.pp) * plan.pp
        return f"{problem} {remedy}: try {below} or {above}."
    return None


def schedule_is_of_several_stages(plan: Plan, run: RunConfig) -> str | None:
    if plan.pp > 1 and SCHEDULES[plan.schedule].stages_per_rank is None and plan.stages_per_rank < 2:
        return f"plan.stages_per_rank = 1 with schedule {plan.schedule}: it interleaves at least 2. Or use 1f1b."
    return None


def split_backward_is_eager(plan: Plan, run: RunConfig) -> str | None:
    if plan.pp == 1 or not SCHEDULES[plan.schedule].splits_backward:
        return None
    if plan.compile:
        return f"plan.schedule = {plan.schedule} splits backward, which compiled blocks cannot. Add compile=false."
    if plan.recompute == "selective":
        return (
            f"plan.schedule = {plan.schedule} splits backward, and what recompute=selective keeps serves one backward. "
            "Use recompute=full or none, or schedule=interleaved_1f1b."
        )
    return None


def experts_are_dealt_out(plan: Plan, run: RunConfig) -> str | None:
    if plan.ep == 1:
        return None
    experts = run.model.moe.experts
    if not experts:
        return f"plan.ep = {plan.ep}, and the model has no experts (model.moe.experts = 0). Leave ep out."
    if experts % plan.ep:
        return f"plan.ep = {plan.ep} does not divide model.moe.experts = {experts}."
    if plan.dp_shard * plan.cp % plan.ep:
        return (
            f"plan.ep = {plan.ep} does not divide plan.dp_shard x plan.cp = {plan.dp_shard * plan.cp}, "
            "the ranks that it is laid over."
        )
    return None


def number_formats_go_together(plan: Plan, run: RunConfig) -> str | None:
    if plan.precision == "fp8" and plan.tp > 1:
        return f"plan.precision = fp8 with plan.tp = {plan.tp}: fp8 layers take whole matrices only. Try bf16, or tp=1."
    if plan.precision == "fp8" and run.model.moe.experts:
        return "plan.precision = fp8 with experts: their grouped matmuls are not done in fp8. Try precision=bf16."
    if plan.precision == "fp16" and plan.weights == "bf16":
        return "plan.weights = bf16 with precision = fp16: weights would lose what fp16 resolves. Try precision=bf16."
    return None


RULES: tuple[Rule, ...] = (
    batch_is_dealt_out,
    heads_are_dealt_out,
    feed_forward_is_dealt_out,
    tokens_are_dealt_out,
    ulysses_has_heads,
    every_stage_has_a_layer,
    schedule_is_of_several_stages,
    schedule_admits_the_microbatches,
    split_backward_is_eager,
    experts_are_dealt_out,
    number_formats_go_together,
)


def first_problem(plan: Plan, run: RunConfig) -> str | None:
    """The first rule that `plan` breaks, in words; None if it can train `run`."""
    return next((problem for rule in RULES if (problem := rule(plan, run))), None)


def nearest(plan: Plan, run: RunConfig, many: int = 3) -> list[Plan]:
    """The plans of as many processes that can train `run` and whose axes are nearest to those of `plan`.

    Of equally near ones, first those that keep the microbatch, then those with more data parallelism: it asks least
    of the model.
    """
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    sizes_here = tuple(getattr(plan, axis) for axis in axes)

    def distance(choice: tuple[int, ...]) -> tuple[float, ...]:
        doublings = sum(abs(math.log2(there / here)) for there, here in zip(choice, sizes_here, strict=False))
        _, dp_replicate, dp_shard, *_, microbatch = choice
        return round(doublings, 6), microbatch != plan.microbatch, -dp_shard, -dp_replicate, *choice

    choices = (
        (*sizes, ep, microbatch)
        for sizes in _factorizations(plan.world_size, len(axes) - 1)
        for ep in {1, plan.ep, math.gcd(plan.ep, max(1, run.model.moe.experts))}
        for microbatch in {1, plan.microbatch}
    )
    others = (
        plan.model_copy(update=dict(zip((*axes, "microbatch"), choice, strict=True)))
        for choice in sorted(choices, key=distance)
    )
    return list(islice((other for other in others if first_problem(other, run) is None), many))


def _factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `number` as a product of that many factors, in order."""
    if factors == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for rest in _factorizations(number // first, factors - 1):
            yield (first, *rest)


@cache
def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
