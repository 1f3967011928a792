"""Advice on a run: what holds it back, by rules that state their evidence."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.watch.facts import Facts
from argosy.watch.rules import learning, memory, ranks, reliability, times
from argosy.watch.rules.planner import Planner
from argosy.watch.rules.rule import Advice, Rule

RULES: tuple[Rule, ...] = (
    ranks.straggler,
    ranks.slow_link,
    ranks.throttled_device,
    reliability.lost_ranks,
    learning.bad_steps,
    learning.growing_gradients,
    learning.learning_rate_ended,
    learning.overfits,
    learning.skewed_experts,
    memory.memory_near_limit,
    times.waiting_for_data,
    times.exposed_communication,
    times.pipeline_bubble,
    memory.memory_left_over,
    times.recompiles,
    times.slower_than_planned,
    times.idle_devices,
    times.evaluation_share,
    reliability.checkpoint_stalls,
    reliability.checkpoint_interval,
    reliability.low_goodput,
    times.faster_plan,
)
"""All rules. Of those that name the same better plan, the first says it: it knows why."""


def advise(facts: Facts, planner: Planner | None = None, rules: Sequence[Rule] = RULES) -> tuple[Advice, ...]:
    """Return what the rules say, warnings first, and of these what costs most first."""
    planner = planner or Planner(facts)
    said: list[Advice] = []
    for rule in rules:
        advice = rule(facts, planner)
        if advice is not None and not _is_said(advice, said):
            said.append(advice)
    return tuple(sorted(said, key=lambda each: (each.severity != "warning", -(each.gain_share or 0.0))))


def _is_said(advice: Advice, said: Sequence[Advice]) -> bool:
    """Return True if another rule has said the same with its reason."""
    names = {each.rule for each in said}
    if advice.plan and advice.severity == "info":
        return any(each.plan == advice.plan for each in said)
    if advice.rule == "checkpoint_interval":
        return "checkpoint_stalls" in names
    # A slow rank makes the others wait, and makes steps longer than planned.
    return advice.rule in ("exposed_communication", "slower_than_planned") and "straggler" in names
