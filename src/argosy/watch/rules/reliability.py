"""Rules about failures, checkpoints and goodput."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from argosy.config.schema import RunConfig
from argosy.errors import counted
from argosy.plan.cost.economy import RESTART_S, CheckpointCost, best_interval_s, effective_share
from argosy.plan.cost.estimate import percent, seconds
from argosy.plan.cost.reliability import node_rate_factor
from argosy.watch.facts import Event, RunFacts
from argosy.watch.rules.planner import Advice, Planner, is_enough
from argosy.watch.rules.ranks import agent_of, listed, node_of
from argosy.watch.rules.stops import Outage, failures, rates_of
from argosy.watch.timeline import WENT_BACK, steps_gone_back

DEATHS_IN_DOUBT = 2
"""A node on which so many processes died is in doubt."""
GOODPUT, GOODPUT_AFTER_S = 0.9, 600.0
"""Llama 3 405B reached more than 90 % effective training time on 16,384 GPUs (Dubey et al. 2024, section 3.3.4). Of a
shorter run, starting is a large part."""
WORTH_SHARE = 0.01
"""Share of the time that another checkpoint interval must save to be worth saying."""
STALL_SHARE = 0.03
"""Share of the time that saving may stop training: with background = true it is the copy to host memory, seconds for
each ten minutes."""


def lost_ranks(facts: RunFacts, planner: Planner) -> Advice | None:
    """Name the ranks that died, why, and what that cost."""
    struck = [outage for outage in failures(facts) if outage.deaths]
    deaths = [death for outage in struck for death in outage.deaths]
    if not deaths:
        return None
    cost_s = sum(outage.cost_s(_step_s(facts)) for outage in struck)
    lost = sum(outage.steps_lost for outage in struck)
    share = min(1.0, cost_s / facts.wall_s) if facts.wall_s > 0 else None
    nodes = Counter(where for death in deaths if death.get("event") == "worker_died" and (where := _node(facts, death)))
    again = [(node, times) for node, times in nodes.most_common() if times >= DEATHS_IN_DOUBT and len(nodes) > 1]
    ranks = sorted({int(death["rank"]) for death in deaths if death.get("rank") is not None})
    return Advice(
        "lost_ranks",
        "warning" if again or (share or 0) > WORTH_SHARE or len(struck) > 1 else "info",
        f"Rank{'s' if len(ranks) > 1 else ''} {listed(ranks) or '?'} died",
        f"{'; '.join(_told(facts, death) for death in deaths[-3:])}. {_cost(struck, cost_s, lost)}",
        _after_deaths(deaths, again, len(struck), planner),
        f"{seconds(cost_s)} so far" if share is not None and share > WORTH_SHARE else "",
        share if again else None,
        facts={"ranks": ranks, "nodes": dict(nodes), "cost_s": cost_s, "steps_lost": lost, "stops": len(struck)},
    )


def low_goodput(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell what took the time in which no step was made that counts."""
    found = spent(facts)
    if found is None or found.wall_s < GOODPUT_AFTER_S or found.goodput >= GOODPUT:
        return None
    parts = {name: value for name, value in found.parts.items() if value > 0}
    largest = sorted(parts.items(), key=lambda item: -item[1])
    worst = largest[0][0]
    return Advice(
        "low_goodput",
        "warning",
        f"Only {percent(found.goodput)} of the time went into steps that count",
        f"Of {seconds(found.wall_s)} in which it ran: {seconds(found.useful_s)} of steps, "
        + ", ".join(f"{seconds(value)} {name}" for name, value in largest[:4])
        + ".",
        _ABOUT_STOPS[worst],
        f"up to {percent(parts[worst] / found.wall_s)} of the time",
        parts[worst] / found.wall_s,
        facts={"goodput": found.goodput, "parts": parts},
    )


_ABOUT_STOPS = {
    "stopped": "Failures cost most: advice about ranks that died says which; spare nodes make stops shorter.",
    "made again": "Steps that are made again cost most: save more often, on disk or in memory.",
    "checkpoints": "Checkpoints cost most: save in the background (checkpoint.background = true), or more rarely.",
    "evaluation": "Evaluation costs most: evaluate more rarely (evaluate.every_steps), or on fewer tokens.",
    "checks": "Replay checks cost most: make them more rarely (resilience.replay_check_every_steps).",
    "starting and the rest": "Starting costs most, with compiling and what comes between steps: longer runs spread it.",
}


@dataclass(frozen=True)
class WallTimeSplit:
    """The time in which the run held its devices, split by use."""

    wall_s: float
    useful_s: float
    """Steps that count, without what comes beside them."""
    parts: dict[str, float]
    """Seconds of all else."""

    @property
    def goodput(self) -> float:
        return self.useful_s / self.wall_s


def spent(facts: RunFacts) -> WallTimeSplit | None:
    """Return where the time in which it ran went; None before the first step."""
    whole = slice(0, len(facts))
    useful_s = float(np.nansum(facts.column("step_time_s")))
    if not len(facts) or not facts.wall_s > 0 or not useful_s > 0:
        return None
    found = failures(facts)
    made_again = sum(outage.steps_lost for outage in found) + sum(map(steps_gone_back, facts.of(*WENT_BACK)))
    parts = {
        "stopped": sum(outage.stood_s for outage in found),
        "made again": made_again * _step_s(facts),
        "checkpoints": facts.mean_s("checkpoint", whole) * len(facts),
        "evaluation": facts.mean_s("evaluate", whole) * len(facts),
        "checks": facts.mean_s("check", whole) * len(facts),
    }
    wall_s = max(facts.wall_s, useful_s)
    parts["starting and the rest"] = max(0.0, wall_s - useful_s - sum(parts.values()))
    return WallTimeSplit(wall_s, useful_s, parts)


def checkpoint_stalls(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that saving stops training for a notable part of the time."""
    run, whole = facts.run, slice(0, len(facts))
    total, stall = facts.mean_s("step", whole), facts.mean_s("checkpoint", whole)
    saves = len(_saves(facts))
    if run is None or saves < 2 or not is_enough(facts) or total <= 0 or stall / total < STALL_SHARE:
        return None
    each_s, share = stall * len(facts) / saves, stall / total
    how = "in the background" if run.checkpoint.background else "while training waits"
    rarer = _interval(facts, planner)
    doing = (
        f"Save at most every {seconds(rarer.best_s)} ({_keys(run, rarer.best_s)})."
        if run.checkpoint.background and rarer is not None and rarer.best_s > rarer.now_s
        else "Set checkpoint.background = true: the state is copied, and written while training goes on."
        if not run.checkpoint.background
        else "Write to a faster disk: a save begins only when the one before has been written."
    )
    return Advice(
        "checkpoint_stalls",
        "warning",
        f"Saving stops training for {percent(share)} of the time",
        f"{saves} saves {how} stopped training for {seconds(each_s)} each "
        f"(steps {facts.known[0]} to {facts.known[1]}).",
        doing,
        f"up to {percent(share)} of the time",
        share,
        facts={"share": share, "stall_s": each_s, "saves": saves},
    )


def checkpoint_interval(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that checkpoints should be rarer, or oftener, by what they cost and by the measured rate of failures."""
    found = _interval(facts, planner)
    if found is None or facts.has_ended or found.gain < WORTH_SHARE:
        return None
    oftener = found.best_s < found.now_s
    rate = (
        f"{counted(found.failures, 'failure')} that needed one in {seconds(facts.wall_s)}"
        if found.is_measured
        else f"one failure in {seconds(found.mtbf_s)} that needs one, by the catalogue's rate,"
    )
    return Advice(
        "checkpoint_interval",
        "info",
        f"Checkpoints should be {'oftener' if oftener else 'rarer'}",
        f"One is made every {seconds(found.now_s)} and stops training for {seconds(found.stall_s)}; with {rate} the "
        f"best interval is {seconds(found.best_s)} (Young 1974, Daly 2006).",
        f"Set {_keys(facts.run, found.best_s)}.",
        f"{percent(found.gain)} of the time",
        found.gain,
        facts=vars(found),
    )


@dataclass(frozen=True)
class _Interval:
    """The interval of saves, and the best one."""

    now_s: float
    best_s: float
    stall_s: float
    mtbf_s: float
    is_measured: bool
    """True if mtbf_s is the run's own, and not the catalogue's."""
    failures: int
    gain: float
    """Share of the time that the best interval saves."""


def _interval(facts: RunFacts, planner: Planner) -> _Interval | None:
    saves = _saves(facts)
    if len(saves) < 2 or not is_enough(facts) or not facts.wall_s > 0:
        return None
    times = sorted(float(save["time_s"]) - float(save.get("seconds") or 0.0) for save in saves)
    now_s = float(np.median(np.diff(times)))
    stall_s = max(facts.mean_s("checkpoint", slice(0, len(facts))) * len(facts) / len(saves), 1e-3)
    found = [outage for outage in failures(facts) if outage.source not in ("live", "memory")]
    rates = rates_of(facts, planner, found)
    if rates is None or facts.plan is None or now_s <= 0:
        return None
    mtbf_s = float(rates.mtbf_s(facts.plan.world_size).mid)
    write_s = float(np.median([float(save.get("seconds") or 0.0) for save in saves]))
    best_s = max(float(best_interval_s(stall_s, mtbf_s)), write_s, facts.step_s)
    restart_s = float(np.median([outage.stood_s for outage in found])) if found else float(RESTART_S.mid)
    cost = CheckpointCost(stall_s, max(write_s, stall_s))
    best, now = (float(effective_share(each, cost, restart_s, mtbf_s)) for each in (best_s, now_s))
    return _Interval(now_s, best_s, stall_s, mtbf_s, rates.is_measured, len(found), best - now)


def _saves(facts: RunFacts) -> list[Event]:
    """Return the first event of each step that was saved."""
    return list({int(save["step"]): save for save in reversed(facts.of("save"))}.values())[::-1]


def _keys(run: RunConfig | None, interval_s: float) -> str:
    by_steps = " and checkpoint.every_steps = 0" if run is not None and run.checkpoint.every_steps else ""
    return f"checkpoint.every_minutes = {max(0.1, float(f'{interval_s / 60:.2g}')):g}{by_steps}"


def _step_s(facts: RunFacts) -> float:
    return facts.step_s if facts.step_s > 0 else 0.0


def _node(facts: RunFacts, death: Event) -> str:
    """Return the node of a process that died: that of the agent that saw it."""
    rank = death.get("rank")
    return agent_of(death) or (node_of(facts, int(rank)) if rank is not None else "")


def _told(facts: RunFacts, death: Event) -> str:
    rank = f"rank {death['rank']}" if death.get("rank") is not None else "a process"
    node = _node(facts, death)
    at = f" at step {death['step']}" if death.get("step") is not None else ""
    what = "was out of memory" if death.get("event") == "oom_kill" else "died"
    return f"{rank}{f' on {node}' if node else ''} {what}{at}: {death.get('why', 'nobody knows why')}"


def _cost(struck: list[Outage], cost_s: float, lost: int) -> str:
    stops = f"{len(struck)} stop{'s' if len(struck) > 1 else ''}"
    again = f", {lost} step{'s' if lost != 1 else ''} made again" if lost else ", no step lost"
    return f"{stops} cost {seconds(cost_s)}{again}."


def _after_deaths(deaths: list[Event], again: list[tuple[str, int]], stops: int, planner: Planner) -> str:
    if again:
        node, times = again[0]
        many = max(2, planner.machine.nodes) if planner.machine is not None else 2
        factor = node_rate_factor(times, stops / many)
        return (
            f"{node} lost {counted(times, 'process', 'es')}: check it (`argosy probe` there); start the run without it "
            f"if it goes on. By published fleets such a node stops {factor:.2g} times as often as the mean one."
        )
    if any(death.get("event") == "oom_kill" for death in deaths):
        return "The kernel killed a process for want of memory: use fewer processes on that machine, or one with more."
    return "Nothing, if it stays at this: the process was replaced. Its log in logs/ says what it did last."
