"""How the data-parallel ranks of a plan sum their gradients, in words, with the bytes that each sends."""

from __future__ import annotations

from argosy.config.schema import RunConfig
from argosy.plan.cost.formatting import GIB
from argosy.plan.cost.traffic import traffic
from argosy.plan.plan import Plan

WHERE = {
    "shard": "among ranks that share the state",
    "replicate_inside": "among neighbours",
    "replicate_between": "between their groups",
    "replicate": "across",
}
"""Axes of traffic that sums of gradients go along, in their order (those of experts go the same way)."""


def sums_in_words(plan: Plan, run: RunConfig) -> tuple[str, str] | None:
    """Return in which messages gradients are summed; and over which ranks, with GiB that each sends in a step.

    None if no rank has a like.
    """
    if plan.dp * plan.cp == 1:
        return None
    ways = []
    if plan.shares_state > 1:
        ways.append(f"among {plan.shares_state} ranks that share the state")
    if plan.sums_in_tiers:
        ways.append(f"among {plan.sum_inside} neighbours")
    if plan.sum_between > 1:
        ways.append(f"between {plan.sum_between} groups of them")
    across = plan.replicas // (plan.sum_inside * plan.sum_between)
    if across > 1:
        ways.append(f"across {across}{' groups' if plan.sums_in_tiers else ' replicas'}")
    if plan.is_compressed:
        ways[-1] += f" in {plan.sync}"
    messages = "layer by layer (FSDP2)" if plan.shards_parameters else f"buckets of {plan.bucket_mb} MiB"
    sent = dict.fromkeys(WHERE, 0.0)
    for (axis, _), size in traffic(plan, run).items():
        name = axis.removeprefix("expert_")
        if name in sent:
            sent[name] += size
    amounts = [f"{size / GIB:.3g} GiB {WHERE[name]}" for name, size in sent.items() if size]
    return messages, f"{', then '.join(ways)}; a rank sends in a step {', '.join(amounts)}"
