"""What a rule of the plan is, and the rules of how replicas and sites agree: compressed sums, sums in tiers, sites."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

from argosy.config.schema import RunConfig
from argosy.plan.plan import NO_WORKERS, NOT_OF_SITES, Plan
from argosy.plan.quantities import around, divisors
from argosy.plan.sync import COMPRESSED, OF_SITES, WITH_SERVERS

Plans = Any
"""A `Plan` or `Layouts`: both have these columns, as numbers or arrays. mypy cannot type arithmetic on that union."""
Breaks = Callable[[Plans, RunConfig], Any]
"""Returns True, or a mask of plans, where a rule is broken; only arithmetic and & | ~: it serves both."""


class Rule:
    """A rule. Called with a plan and a run, it returns None, or an explanation of how the plan breaks the rule."""

    def __init__(self, breaks: Breaks, words: Callable[[Plan, RunConfig], str]):
        self.breaks, self.words, self.__name__ = breaks, words, words.__name__

    def __call__(self, plan: Plan, run: RunConfig) -> str | None:
        return self.words(plan, run) if self.breaks(plan, run) else None


def rule(breaks: Breaks) -> Callable[[Callable[[Plan, RunConfig], str]], Rule]:
    """Make a rule of `breaks` and the decorated function, which explains a plan that breaks it."""
    return lambda words: Rule(breaks, words)


def _has_no_replicas(p: Plans) -> Any:
    return (p.dp_replicate == 1) & ((p.zero != 0) | (p.dp_shard * p.cp == 1))


@rule(lambda p, run: _has_no_replicas(p) & p.is_("sync", *COMPRESSED))
def compressed_sums_have_replicas(plan: Plan, run: RunConfig) -> str:
    return (
        f"plan.sync = {plan.sync} with plan.dp_replicate = 1: it says how replicas of the state sum their gradients, "
        "and there is one only. Leave sync out, or give dp_replicate some of the ranks."
    )


@rule(lambda p, run: p.is_("sync", *COMPRESSED) & run.resilience.check_collectives)
def compressed_sums_are_not_checked(plan: Plan, run: RunConfig) -> str:
    return (
        f"resilience.check_collectives = true with plan.sync = {plan.sync}: checksums fit exact sums only. "
        "Set it to false, or leave sync out."
    )


def _tiers_do_not_divide(p: Plans) -> Any:
    unit, replicas = p.sum_inside * p.sum_between, p.dp_replicate * (1 + (p.zero == 0) * (p.dp_shard * p.cp - 1))
    cut = (unit > 1) & ((replicas % unit != 0) | (unit >= replicas))
    return cut | ((p.sum_between > 1) & (p.sum_inside == 1))


@rule(lambda p, run: _tiers_do_not_divide(p))
def tiers_divide_the_replicas(plan: Plan, run: RunConfig) -> str:
    if plan.sum_inside == 1:
        return f"plan.sum_between = {plan.sum_between} with sum_inside = 1: the first tier is sum_inside. Name it so."
    unit, many = plan.sum_inside * plan.sum_between, plan.replicas
    said = f"plan.sum_inside = {plan.sum_inside}" + f" x sum_between = {plan.sum_between}" * (plan.sum_between > 1)
    good, plural = [n for n in divisors(many) if 1 < n < many], "s" * (many != 1)
    remedy = f"Try {around(unit, good) or good[-1]}." if good else "Leave it out."
    return (
        f"{said} has to divide the plan's {many} replica{plural} of the state into two groups or more (replicas are "
        f"dp_replicate, and with zero = 0 the other data and context ranks too). {remedy}"
    )


def _tiers_cut_experts(p: Plans) -> Any:
    sizes = p.sum_inside, p.sum_inside * p.sum_between
    return (p.zero == 0) & reduce(or_, [(size % p.ep != 0) & (p.ep % size != 0) for size in sizes])


@rule(lambda p, run: _tiers_cut_experts(p))
def tiers_hold_whole_sets_of_experts(plan: Plan, run: RunConfig) -> str:
    return (
        f"plan.sum_inside = {plan.sum_inside} and sum_between = {plan.sum_between} with ep = {plan.ep} and zero = 0: "
        "neighbours have other experts, so ep has to divide the replicas of a tier, or they it. "
        f"Try sum_inside = {plan.ep}."
    )


@rule(lambda p, run: p.is_("sync", *OF_SITES) ^ bool(run.sites))
def sites_agree_now_and_then(plan: Plan, run: RunConfig) -> str:
    if not run.sites and plan.has_servers:
        return NO_WORKERS
    if not run.sites:
        return (
            f"plan.sync = {plan.sync}, and the run has no [[sites]]: it says how sites agree. Name two sites or more "
            "(docs/sites.md), or leave sync out."
        )
    return NOT_OF_SITES.format(plan.sync)


@rule(lambda p, run: p.is_("sync", *WITH_SERVERS) & p.is_("precision", "fp16"))
def asynchronous_gradients_have_no_loss_scale(plan: Plan, run: RunConfig) -> str:
    return (
        "plan.sync = async with precision = fp16: workers come and go, and a loss scale would be found anew each time. "
        "Try precision=bf16 or fp32."
    )


@rule(lambda p, run: p.is_("sync", "async") & bool(run.train.frozen or run.lora.rank))
def servers_train_all_weights(plan: Plan, run: RunConfig) -> str:
    key = "train.frozen" if run.train.frozen else "lora.rank"
    return f"{key} is not supported with plan.sync = async. Remove it, or use sites (sync=local, sync=diloco)."


@rule(lambda p, run: p.is_("sync", *OF_SITES) & (run.model.moe.experts > 0) & (run.model.moe.balance == "bias"))
def sites_have_no_state_but_weights(plan: Plan, run: RunConfig) -> str:
    return (
        f'plan.sync = {plan.sync} with model.moe.balance = "bias": each site would have biases of its own, which '
        'are no weights that sites agree on. Use balance = "aux".'
    )
