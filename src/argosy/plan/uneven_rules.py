"""The rules for uneven shares: who may have more microbatches than others, and how many a pipeline can run."""

from __future__ import annotations

from typing import Any

from argosy.config.schema import RunConfig
from argosy.plan.pipeline import INTERLEAVED
from argosy.plan.plan import Plan
from argosy.plan.ratio import lowest, numbers_of
from argosy.plan.rule import Plans, rule


def _cannot_be_dealt(p: Plans, run: RunConfig) -> Any:
    found: Any = False
    for said, numbers in p.numbers("shares"):
        found = found | (said & ((p.dp == 1) | (p.dp % len(numbers) != 0)))
    return found


@rule(_cannot_be_dealt)
def shares_are_of_ranks(plan: Plan, run: RunConfig) -> str:
    if plan.dp == 1:
        return f"plan.shares = {plan.shares}, and there is one data-parallel rank, which has all of it. Leave it out."
    return (
        f"plan.shares = {plan.shares} has {len(numbers_of(plan.shares))} numbers, which do not divide the {plan.dp} "
        "data-parallel ranks: give one for each rank, or for each of equal blocks of ranks, such as replicas."
    )


def _differ_in_a_replica(p: Plans, run: RunConfig) -> Any:
    found: Any = False
    for said, numbers in p.numbers("shares"):
        many = len(numbers)
        block = p.dp // many
        whole = p.dp_shard % (block + (block == 0)) == 0  # of a replica are several numbers
        across = (block % p.dp_shard != 0) & (whole ^ True)
        found = found | (said & across)
        for together in (size for size in range(2, many + 1) if many % size == 0):
            if any(len(set(numbers[i : i + together])) > 1 for i in range(0, many, together)):
                found = found | (said & (p.dp_shard == together * block))
    return found & ((p.zero == 3) | (p.ep > 1))


@rule(_differ_in_a_replica)
def ranks_that_gather_together_are_alike(plan: Plan, run: RunConfig) -> str:
    remedy = "Use zero=2, or let dp_replicate separate what is unlike"
    if plan.dp_replicate > 1:
        remedy += f", with a number for each of its {plan.dp_replicate} replicas"
    if plan.ep > 1:
        what = f"plan.ep = {plan.ep}: ranks that exchange tokens with each other's experts"
        remedy = remedy.replace("Use zero=2, or let", "Let")
    else:
        what = f"plan.zero = 3: ranks that gather each layer's parameters together, dp_shard = {plan.dp_shard} of them,"
    return f"plan.shares = {plan.shares} with {what} run as many microbatches. {remedy}."


def _are_not_the_layers(p: Plans, run: RunConfig) -> Any:
    found: Any = False
    for said, numbers in p.numbers("layers"):
        wrong = (p.stages != len(numbers)) | (p.pp == 1) | (sum(numbers) != run.model.layers)
        found = found | (said & wrong)
    return found


@rule(_are_not_the_layers)
def stages_have_the_layers(plan: Plan, run: RunConfig) -> str:
    said = f"plan.layers = {plan.layers}"
    if plan.pp == 1:
        return f"{said} with plan.pp = 1: it says how many layers each pipeline stage has. Leave it out."
    numbers = numbers_of(plan.layers)
    if len(numbers) != plan.stages:
        return f"{said} has {len(numbers)} numbers, and the pipeline has {plan.stages} stages: give one for each."
    return f"{said} adds up to {sum(numbers)}, and model.layers = {run.model.layers}. Change one of the numbers."


def cannot_run(p: Plans, microbatches: Any) -> Any:
    """Return True where the pipeline's schedule cannot run so many microbatches."""
    rounds = microbatches // p.pp
    too_few = p.is_("schedule", "1f1b", "dualpipev") & (microbatches < p.stages)
    uneven = p.is_("schedule", *INTERLEAVED) & (microbatches % (rounds + (rounds == 0)) != 0)
    return (p.pp > 1) & (too_few | uneven)


def _cannot_run_a_share(p: Plans, run: RunConfig) -> Any:
    found: Any = False
    of_portion = run.train.global_batch // (p.portions * p.microbatch)
    for said, numbers in p.numbers("shares"):
        for share in set(lowest(numbers)):
            found = found | (said & cannot_run(p, of_portion * share))
    return found


@rule(_cannot_run_a_share)
def schedule_admits_every_share(plan: Plan, run: RunConfig) -> str:
    of_portion = run.train.global_batch // (plan.portions * plan.microbatch)
    each = [of_portion * share for share in lowest(numbers_of(plan.shares))]
    wrong = next(n for n in each if cannot_run(plan, n))
    needs = f"at least {plan.stages}, its stages" if wrong < plan.stages else f"a multiple of {plan.pp}"
    return (
        f"plan.shares = {plan.shares} gives pipelines {', '.join(map(str, each))} microbatches, and plan.schedule = "
        f"{plan.schedule} with plan.pp = {plan.pp} cannot run {wrong}: it takes {needs}. Try shares that are more "
        "alike, a smaller plan.microbatch, or schedule=gpipe."
    )
