"""Rules about the memory of devices."""

from __future__ import annotations

import numpy as np

from argosy.plan.cost.estimate import GIB, percent, seconds
from argosy.watch.facts import RunFacts
from argosy.watch.rules.planner import Planner
from argosy.watch.rules.rule import Advice, is_enough

NEAR = 0.92
"""Share of a device's memory at its peak above which fragmentation, or a longer document, can end the run: the
allocator of torch holds some percent that it cannot use."""
SHOULD = 0.85
"""Share that leaves room for that."""
FAR = 0.6
"""Share below which memory is left over that could make steps faster."""


def memory_near_limit(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that a rank's memory is nearly full, and which plan needs less."""
    share, used, rank = _share(facts, planner)
    if share < NEAR or facts.has_ended:
        return None
    other = planner.leaner(SHOULD, used)
    slower = "" if other is None else f", {seconds(float(other.step_s.mid))} a step in place of {seconds(other.now_s)}"
    return Advice(
        "memory_near_limit",
        "warning",
        f"Rank {rank} uses {percent(share)} of its device's memory",
        f"Its peak is {used / GIB:.1f} GiB of {used / share / GIB:.1f} GiB for programs; above {percent(NEAR)} "
        "a fragmented allocator or a longer microbatch can end the run.",
        f'"{other.plan}" needs less{slower}.'
        if other
        else "A smaller microbatch or more recompute needs less; the planner finds no plan that leaves "
        f"{percent(1 - SHOULD)} free.",
        plan=str(other.plan) if other else "",
        facts={"share": share, "bytes": used, "rank": rank},
    )


def memory_left_over(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that memory is left over, if a plan that uses it would be faster."""
    share, used, rank = _share(facts, planner)
    if not 0 < share < FAR or not is_enough(facts):
        return None
    other = planner.faster
    if other is None or not _changes(facts, planner):
        return None
    return Advice(
        "memory_left_over",
        "info",
        f"{percent(1 - share)} of the devices' memory is never used",
        f"The fullest rank ({rank}) needs {used / GIB:.1f} GiB at its peak, of {used / share / GIB:.1f} GiB.",
        f'--plan "{other.plan}" uses it, {_changes(facts, planner)}.',
        f"{seconds(float(other.step_s.mid))} a step in place of {seconds(other.now_s)}, {percent(other.saves)} less",
        other.saves,
        str(other.plan),
        facts.over,
        {"share": share, "bytes": used},
    )


def _share(facts: RunFacts, planner: Planner) -> tuple[float, float, int]:
    """Return the share of its device that the fullest rank uses at its peak, in bytes, and the rank; 0 if unknown."""
    limit, rank = planner.usable_bytes, 0
    peaks = facts.column("memory_bytes", facts.recent)
    used = float(np.nanmax(peaks)) if np.isfinite(peaks).any() else 0.0
    ranks = facts.ranks
    if ranks is not None and ranks.memory_bytes is not None and np.isfinite(ranks.memory_bytes).any():
        fullest = int(np.nanargmax(ranks.memory_bytes))
        if ranks.memory_bytes[fullest] > used:
            used, rank = float(ranks.memory_bytes[fullest]), int(ranks.numbers[fullest])
    return (used / limit if limit else 0.0), used, rank


def _changes(facts: RunFacts, planner: Planner) -> str:
    """Say what of the plan in force changes that costs memory."""
    now, other = facts.plan, planner.faster
    if now is None or other is None:
        return ""
    said = []
    if other.plan.microbatch > now.microbatch:
        said.append(f"with microbatches of {other.plan.microbatch} in place of {now.microbatch}")
    if other.plan.recompute != now.recompute != "none":
        said.append(f"with recompute={other.plan.recompute} in place of {now.recompute}")
    if now.offload != "none" and other.plan.offload == "none":
        said.append("with state on the device in place of the host")
    if now.shards_parameters and not other.plan.shards_parameters:
        said.append("with whole parameters on each rank")
    return " and ".join(said)
