"""Rules about single ranks, nodes, devices and links."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from argosy.errors import some_of
from argosy.observe.counters import OWN_WORK
from argosy.plan.cost.estimate import percent, seconds
from argosy.plan.dealing import LEAST_HOLD, RankWork
from argosy.watch.columns import Floats
from argosy.watch.facts import DeviceSeen, Event, RankTable, RunFacts
from argosy.watch.rules.planner import Advice, Planner

LEAST_RANK_STEPS = 10
"""Steps of which the ranks' own work must be known; the detector needs `resilience.straggler_steps`."""
RANK_SLOW_SHARE = 0.5
"""A rank is slow if it is so in more than this share of them, as the detector has it."""
STILL = 50
"""A finding counts as long as no more than so many steps were made since, if nodes tell nothing newer."""
COOLER = 0.85
"""A device whose clock is below this share of its peers' median is throttled: on one node they differ by some
percent."""
MOST_NAMED_RANKS = 5


def straggler(facts: RunFacts, planner: Planner) -> Advice | None:
    """Name ranks that are slower than their peers, and tell what the run would do without their node."""
    slow = slow_ranks(facts)
    if not slow:
        return _found_straggler(facts, planner)
    ranks, seen = facts.ranks, max(slow.items(), key=lambda item: item[1])
    assert ranks is not None
    rank, times = seen
    at = int(np.searchsorted(ranks.numbers, rank))
    node = ranks.nodes[at]
    own_s = float(np.nanmedian(ranks.own_s[:, at]))
    peers_s = own_s / times
    where = _category(ranks, at)
    others = f" Slow too: {_some(sorted(set(slow) - {rank}))}." if len(slow) > 1 else ""
    holds = float(np.nanmedian(_over_peers(facts)[1][:, at]))  # whatever each had to do
    lost_s = own_s * (1 - 1 / holds) if holds >= 1 + LEAST_HOLD else 0.0
    first, last = int(ranks.steps[0]), int(ranks.steps[-1])
    share = min(1.0, lost_s / facts.step_s) if facts.step_s > 0 else None
    doing, gain, plan = _without(facts, planner, node, times)
    waits = f"The others wait {seconds(lost_s)} in each step." if lost_s else "Its share of the work is as small."
    return Advice(
        "straggler",
        "warning",
        f"Rank {rank} on {node} is slow: it takes {times:.1f} times as long as its peers",
        f"Its own work takes {seconds(own_s)} a step, its peers' {seconds(peers_s)} (median of steps {first} to "
        f"{last}){where}. {waits}{others}",
        doing,
        gain or (f"up to {seconds(lost_s)} of each step" if lost_s else ""),
        share,
        plan,
        (first, last),
        {"rank": rank, "node": node, "factor": times, "own_s": own_s, "peers_s": peers_s, "ranks": slow},
    )


def slow_ranks(facts: RunFacts) -> dict[int, float]:
    """Return rank -> how many times its peers' time it takes, for ranks that are slow in most of the last steps.

    As the detector has it, peers and their time for as much work are those of `plan.dealing.RankWork`.
    """
    ranks, factor = facts.ranks, facts.run.resilience.straggler_factor if facts.run is not None else 1.5
    if ranks is None or len(ranks.steps) < LEAST_RANK_STEPS or len(ranks.numbers) < 2:
        return {}
    ratios = _over_peers(facts)[0]
    known = np.isfinite(ratios)
    count = np.maximum(1, known.sum(axis=0))
    often = ((ratios >= factor) & known).sum(axis=0) / count
    slow = np.flatnonzero((often > RANK_SLOW_SHARE) & (count >= LEAST_RANK_STEPS))
    return {int(ranks.numbers[at]): round(float(np.nanmedian(ratios[:, at])), 2) for at in slow}


def slow_link(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell of links that became slow, as the detector found it, and of the plan that suffers least."""
    newest = _newest(facts, "slow_link")
    if newest is None:
        return None
    evidence = newest.get("evidence") or {}
    times, step = float(evidence.get("factor", 0) or 0), int(evidence.get("last_step", 0) or 0)
    other = planner.around_slow_link(times) if times > 1 else None
    return Advice(
        "slow_link",
        "warning",
        "A link between ranks became slow",
        f"{newest.get('why', '')} (at step {step}).",
        (f'Go on with --plan "{other.plan}", which sends less over it. ' if other else "")
        + "Measure the network between the nodes with `argosy probe`, and look for other jobs on it.",
        f"{seconds(float(other.step_s.mid))} a step in place of {seconds(other.now_s)}" if other else "",
        other.saves if other else None,
        str(other.plan) if other else "",
        (step, step),
        {"ranks": newest.get("ranks", []), **evidence},
    )


def throttled_device(facts: RunFacts, planner: Planner) -> Advice | None:
    """Name devices whose clock is lower than that of their peers: they are hot, or their power is capped."""
    seen = [device for device in facts.devices if device.clock_mhz and (device.utilisation or 0.0) > 0.5]
    if len(seen) < 3 or facts.has_ended:
        return None
    clocks = np.array([device.clock_mhz for device in seen], dtype=float)
    usual = float(np.median(clocks))
    slow = [device for device, clock in zip(seen, clocks, strict=True) if clock < COOLER * usual]
    if not slow or len(slow) > len(seen) // 3:
        return None
    worst = min(slow, key=lambda device: device.clock_mhz or 0.0)
    hot = f", {worst.temperature_c:.0f} degrees C" if worst.temperature_c is not None else ""
    return Advice(
        "throttled_device",
        "warning",
        f"{len(slow)} device{'s run' if len(slow) > 1 else ' runs'} at a lower clock than the others",
        f"{_device(worst)} runs at {worst.clock_mhz:.0f} MHz{hot}; the median of {len(seen)} busy devices is "
        f"{usual:.0f} MHz.",
        "Look at its cooling and its power limit (`nvidia-smi -q -d PERFORMANCE` names the reason).",
        facts={"devices": [[device.node, list(device.ranks), device.clock_mhz] for device in slow[:100]]},
    )


def _device(device: DeviceSeen) -> str:
    return f"That of {_some(list(device.ranks))} on {device.node}" if device.ranks else f"One on {device.node}"


def _over_peers(facts: RunFacts) -> tuple[Floats, Floats]:
    """Return what `RankWork.over_peers` says of each step. Shape of both: (S, R)."""
    ranks, work = facts.ranks, None
    assert ranks is not None
    if facts.plan is not None and facts.run is not None and facts.plan.world_size > int(ranks.numbers[-1]):
        work = RankWork.of(facts.plan, facts.run.model, facts.run.data.seq_len)
    work = work or RankWork.alike(int(ranks.numbers[-1]) + 1)
    own_s = np.full((len(ranks.steps), len(work.least)), np.nan)
    own_s[:, ranks.numbers] = ranks.own_s
    many = np.ones_like(own_s)
    if ranks.microbatches is not None:
        many[:, ranks.numbers] = ranks.microbatches
    found = [work.over_peers(*of_step) for of_step in zip(own_s, many, strict=True)]
    slower, holds = (np.array(both)[:, ranks.numbers] for both in zip(*found, strict=True))
    return slower, holds


def _category(ranks: RankTable, at: int) -> str:
    """Say in which part of the step a rank is slower than the others."""
    more = {
        name: float(values[at] - np.nanmedian(values)) for name, values in ranks.seconds.items() if name in OWN_WORK
    }
    if not more:
        return ""
    worst = max(more, key=lambda name: more[name] if np.isfinite(more[name]) else 0.0)
    return f", mostly because of {worst}" if more[worst] > 0 else ""


def _found_straggler(facts: RunFacts, planner: Planner) -> Advice | None:
    """Say what the detector found, where nodes wrote down nothing of their ranks."""
    newest = _newest(facts, "straggler")
    if (
        (facts.ranks is not None and len(facts.ranks.steps) >= LEAST_RANK_STEPS)
        or newest is None
        or not newest.get("ranks")
    ):
        return None
    evidence, rank = newest.get("evidence") or {}, int(newest["ranks"][0])
    node, step = node_of(facts, rank), int(evidence.get("last_step", 0) or 0)
    times = float(evidence.get("factor", 0) or 0)
    doing, gain, plan = _without(facts, planner, node, times)
    return Advice(
        "straggler",
        "warning",
        f"Rank {rank}{f' on {node}' if node else ''} is slow: it takes {times:.1f} times as long as its peers",
        f"{newest.get('why', '')}, up to step {step}; the others wait for it in each of them.",
        doing,
        gain,
        plan=plan,
        steps=(max(0, step - int(evidence.get("steps", 1) or 1) + 1), step),
        facts={"rank": rank, "node": node, **evidence},
    )


def _without(facts: RunFacts, planner: Planner, node: str, times: float) -> tuple[str, str, str]:
    """Return what to do about a slow node, what that gains, and the plan without it."""
    look = f"Look at {node or 'its machine'}: other programs, clocks, a failing device (`argosy probe` there)."
    of_node = nodes_of(facts)
    here = sum(1 for name in of_node.values() if name == node)
    other = planner.without(here, times) if 0 < here < len(of_node) else None
    if other is None:
        return look, "", ""
    mid = seconds(float(other.step_s.mid))
    return (
        f'{look} Without {node}, "{other.plan}" is predicted to be faster: start the run again without that machine.',
        f"{mid} a step in place of {seconds(other.now_s)}, {percent(other.saves)} less",
        str(other.plan),
    )


def nodes_of(facts: RunFacts) -> dict[int, str]:
    """Return rank -> node of the newest world."""
    newest = facts.of("generation")[-1:]
    if not newest or not isinstance(newest[0].get("ranks"), dict):
        return {}
    return {int(rank): str(place).rpartition("/")[0] for place, rank in newest[0]["ranks"].items()}


def node_of(facts: RunFacts, rank: int) -> str:
    """Return the node of a rank; empty if nobody knows."""
    return nodes_of(facts).get(rank, "")


def agent_of(event: Event) -> str:
    """Return the node of the agent that wrote an event; empty if no agent did."""
    by = str(event.get("process", ""))
    return by.removeprefix("launcher-") if by.startswith("launcher-") else ""


def _newest(facts: RunFacts, kind: str) -> Event | None:
    """Return the newest finding of a kind if it still holds: the world is the same, and it was not long ago."""
    found = facts.of(kind)[-1:]
    if not found:
        return None
    since = float(found[0]["time_s"])
    if any(float(event["time_s"]) > since for event in facts.of("generation")):
        return None
    step = int((found[0].get("evidence") or {}).get("last_step", 0) or 0)
    window = STILL if facts.run is None else max(STILL, 4 * facts.run.resilience.straggler_steps)
    return found[0] if facts.over[1] - step <= window else None


def _some(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def listed(numbers: Sequence[int]) -> str:
    """Return the first of these numbers, and how many more there are."""
    return some_of(numbers, MOST_NAMED_RANKS)
