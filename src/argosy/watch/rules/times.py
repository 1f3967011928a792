"""Rules about where the time of a step goes, and how much of the devices' memory it takes."""

from __future__ import annotations

import numpy as np

from argosy.errors import counted
from argosy.observe.counters import NODE_TIER
from argosy.plan.calibration import CALIBRATED_PARTS, PASSES, Reconciled, reconcile
from argosy.plan.cost.breakdown import OF_TIME
from argosy.plan.cost.estimate import percent, seconds
from argosy.plan.hardware.devices import GIB
from argosy.watch.columns import channels_in
from argosy.watch.facts import RunFacts
from argosy.watch.rules.planner import Advice, Alternative, Planner, is_enough, over

DATA_SHARE = 0.05
"""The loader reads ahead while the step before runs, so that a step should find its batch: a healthy run waits for less
than 1 %. What is below a twentieth is not worth an hour of anybody's time."""
LEAST_WAIT_S = 2e-3
"""Taking a batch over from the loader's thread takes up to a millisecond or two, however fast the storage is."""
COMMUNICATION_SHARE, COMMUNICATION_ALONE = 0.15, 0.25
"""Waiting for collectives that the compute did not hide. Published runs hide nearly all of it; Llama 3 405B lost about
a tenth of its step (Dubey et al. 2024, section 3.3: 38 to 43 % MFU), and a fifth is what another layout often wins.
Where the planner knows no better one, only a larger share is worth saying."""
BUBBLE_SHARE = 0.1
"""Share of a step that stages of a pipeline idle."""
EVALUATION_SHARE = 0.1
EVALUATION_SHOULD = 0.05
"""Evaluation is worth saying above the first share of the time, and is set to come to the second."""
RECOMPILED_TIMES, RECOMPILED_S = 5.0, 2.0
"""A compiled step that takes so many times the median, and so much longer, in forward and backward, compiled again:
torch.compile takes seconds for each graph."""
RECOMPILED_LEAST = 3
RECOMPILED_SHARE = 0.02
"""Fewer such steps, or a smaller share of the time, can be a pause of the machine, and do not matter."""
IDLE_BELOW = 0.5
"""Mean utilisation below which devices idle most of the time; a training GPU is above 0.9 by this measure."""


def waiting_for_data(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that steps wait for their batch."""
    share = facts.share("data")
    wait_s = facts.mean_s("data")
    if not is_enough(facts) or share < DATA_SHARE or wait_s < LEAST_WAIT_S:
        return None
    sources = list(facts.run.data.sources) if facts.run is not None else []
    where = f" ({', '.join(sources)})" if sources else ""
    return Advice(
        "waiting_for_data",
        "warning",
        f"Steps wait {percent(share)} of their time for data",
        f"Of {seconds(facts.step_s)} a step, {seconds(wait_s)} are spent waiting for the batch ({over(facts)}). A "
        "loader that keeps up costs less than 1 %.",
        f"Put the prepared data{where} on a disk of the machine, or on faster storage (of an object store: raise "
        "data.cache.size_gb), and look whether other programs take the cores on which the loader's thread reads ahead.",
        f"up to {percent(share)} of each step",
        share,
        steps=facts.over,
        facts={"share": share, "seconds": wait_s},
    )


def exposed_communication(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that ranks wait for collectives, along which axis and tier, and which plan waits less."""
    waits = _waits(facts, _bubble_share(planner)) if is_enough(facts) else {}
    share = sum(waits.values()) / facts.step_s if waits else 0.0
    if share < COMMUNICATION_SHARE or _slowest_rank_explains(facts, sum(waits.values())):
        return None
    worst = max(waits, key=lambda name: waits[name])
    largest = sorted(waits.items(), key=lambda item: -item[1])[:3]
    predicted = _predicted_waits(facts)
    beside = "" if predicted is None else f"; the plan was predicted to wait {seconds(predicted)}"
    other = planner.faster
    if other is None and share < COMMUNICATION_ALONE:
        return None
    return Advice(
        "exposed_communication",
        "warning",
        f"Ranks wait {percent(share)} of a step for each other, most {worst}",
        f"Of {seconds(facts.step_s)} a step: {', '.join(f'{seconds(value)} {name}' for name, value in largest)} "
        f"({over(facts)}){beside}.",
        _try(other, facts)
        or f"No other plan on these devices is predicted to be enough faster. {_more_tokens(facts, worst)}A faster "
        "network between the ranks shortens the waits.",
        *_taking(other),
        facts.over,
        {"share": share, "waits": waits},
    )


def _more_tokens(facts: RunFacts, wait: str) -> str:
    """Say that a larger batch sends less for each token, if it does: what is waited for is sent once a step."""
    gathers = facts.plan is not None and facts.plan.shards_parameters and "shard" in wait  # for each microbatch
    if gathers or not any(word in wait for word in ("gradients", "replicate", "shard")):
        return ""
    return "A larger train.global_batch sends the same gradients for more tokens. "


def pipeline_bubble(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that the stages of a pipeline idle, and what makes the bubble smaller."""
    plan, run, share = facts.plan, facts.run, _bubble_share(planner)
    if plan is None or run is None or share < BUBBLE_SHARE or not is_enough(facts) or not facts.has_whole_batch:
        return None
    microbatches = plan.microbatches(run.train.global_batch)
    times = share / (1 - share) * (1 - BUBBLE_SHARE) / BUBBLE_SHARE  # the bubble stays as long
    wanted = int(np.ceil(round(microbatches * times, 6)))
    smaller = ", or a smaller microbatch," if plan.microbatch > 1 else ""
    more = (
        f"With {wanted} microbatches the bubble would be about {percent(BUBBLE_SHARE)} of a step: a larger "
        f"train.global_batch{smaller} makes more of them."
    )
    other = planner.faster
    return Advice(
        "pipeline_bubble",
        "warning",
        f"Stages of the pipeline idle {percent(share)} of a step",
        f"{plan.pp} stages run {microbatches} microbatches in the schedule {plan.schedule}. Of {seconds(facts.step_s)} "
        f"a step ({over(facts)}), passes and their waits take {seconds(_passes_s(facts))}, and the bubble "
        f"{seconds(share * facts.step_s)} by the schedule's formula.",
        _try(other, facts) or more,
        *(_taking(other) if other else (f"up to {percent(share)} of each step", share, "")),
        facts.over,
        {"share": share, "microbatches": microbatches},
    )


def faster_plan(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell of a plan that would be faster on the same devices, whatever the reason."""
    other = planner.faster if is_enough(facts) else None
    if other is None:
        return None
    return Advice(
        "faster_plan",
        "info",
        f"Another plan is predicted to take {percent(other.saves)} less for a step",
        f'A step takes {seconds(facts.step_s)} with "{facts.plan}" ({over(facts)}); the planner, calibrated with these '
        f"steps, predicts {_step(other)} for the other.",
        _try(other, facts),
        *_taking(other),
        facts.over,
    )


def slower_than_planned(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that steps take longer than the prediction's interval, and which part disagrees most."""
    found = _reconciled(facts)
    if found is None or found.step_s.high is None or found.step_s.measured <= found.step_s.high:
        return None
    part, compared = max(found.seconds.items(), key=lambda item: item[1].measured - item[1].predicted)
    mfu = facts.column("mfu", facts.recent)
    would = float(np.nanmean(mfu)) * found.step_s.measured / found.step_s.predicted if len(mfu) else float("nan")
    is_rough = "argosy probe" in found.cluster or "by the catalogue" in found.cluster
    probe = " The machine was never measured: `argosy probe` tells what it can do." if is_rough else ""
    return Advice(
        "slower_than_planned",
        "info" if is_rough else "warning",
        f"Steps take {found.step_s.measured / found.step_s.predicted:.1f} times as long as planned",
        f"{seconds(found.step_s.measured)} a step ({over(facts)}); predicted: at most {seconds(found.step_s.high)} "
        f"(90 % interval). Most of it is {part.replace('_', ' and ')}: {seconds(compared.measured)}, "
        f"predicted {seconds(compared.predicted)}. MFU {percent(float(np.nanmean(mfu)))}, at the plan's step "
        f"{percent(min(1.0, would))}.",
        _ABOUT_PARTS[part] + probe,
        facts=found.model_dump(),
        steps=facts.over,
    )


_ABOUT_PARTS = {
    "forward_backward": "Look for other programs on the machine, clocks that are throttled, and a profile of some "
    "steps (`argosy train --profile`).",
    "communication": "Look at links between ranks, and at ranks that come late (Ranks).",
    "optimizer": "Look for memory that is swapped, and for state in host memory (offload).",
    "rest": "Look at the loader, and at what else runs in each step.",
}


def evaluation_share(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that evaluation takes much of the time."""
    run, whole = facts.run, slice(0, len(facts))
    times = len(facts.evaluated("step"))
    total = facts.mean_s("step", whole)
    if run is None or times < 2 or not run.evaluate.every_steps or total <= 0 or not is_enough(facts):
        return None
    share = facts.mean_s("evaluate", whole) / total
    if share < EVALUATION_SHARE:
        return None
    each_s = facts.mean_s("evaluate", whole) * len(facts) / times
    rarer = int(np.ceil(each_s * (1 - EVALUATION_SHOULD) / EVALUATION_SHOULD / facts.step_s))
    fewer = int(run.evaluate.tokens * run.evaluate.every_steps / max(rarer, 1))
    batch = run.data.seq_len * (facts.plan.microbatch * facts.plan.dp if facts.plan is not None else 1)
    or_fewer = "" if run.evaluate.tasks or fewer < batch else f", or evaluate.tokens = {fewer},"  # no less is faster
    return Advice(
        "evaluation_share",
        "info",
        f"Evaluation takes {percent(share)} of the time",
        f"{times} evaluations of {run.evaluate.tokens} tokens took {seconds(each_s)} each, one every "
        f"{run.evaluate.every_steps} steps of {seconds(facts.step_s)} (steps {facts.known[0]} to {facts.known[1]}).",
        f"Set evaluate.every_steps = {rarer}{or_fewer} for {percent(EVALUATION_SHOULD)}.",
        f"{percent(share - EVALUATION_SHOULD)} of the time",
        share - EVALUATION_SHOULD,
        facts={"share": share, "seconds": each_s, "every_steps": rarer},
    )


def recompiles(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that torch.compile seems to compile again and again."""
    if facts.plan is None or not facts.plan.compile or not is_enough(facts):
        return None
    passes = np.nansum([facts.column(f"seconds.{name}") for name in CALIBRATED_PARTS[PASSES].measured], axis=0)
    usual = float(np.median(passes[facts.recent]))
    slow = facts.warm & (passes > RECOMPILED_TIMES * usual) & (passes > usual + RECOMPILED_S)
    slow[: facts.recent.start] &= facts.column("step")[: facts.recent.start] >= facts.plan_since
    lost = float((passes[slow] - usual).sum())
    share = lost / float(np.nansum(facts.column("seconds.step")))
    if slow.sum() < RECOMPILED_LEAST or share < RECOMPILED_SHARE:
        return None
    steps = facts.column("step")[slow].astype(int).tolist()
    return Advice(
        "recompiles",
        "warning",
        f"{len(steps)} steps took so long that torch.compile must have compiled again",
        f"Steps {', '.join(map(str, steps[:8]))}{', ...' if len(steps) > 8 else ''} took {seconds(lost / len(steps))} "
        f"longer than usual in forward and backward ({seconds(usual)}).",
        "Run with TORCH_LOGS=recompiles to see why; shapes that change (data.stages, a callback of yours) are the "
        "usual reason. compile=false in the plan avoids it, and changes the numbers slightly.",
        f"{percent(share)} of the time",
        share,
        steps=(steps[0], steps[-1]),
        facts={"steps": steps[:100], "lost_s": lost},
    )


def idle_devices(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that devices idle, with the energy that this takes."""
    seen = [device.utilisation for device in facts.devices if device.utilisation is not None]
    if not seen or not is_enough(facts) or facts.has_ended or float(np.mean(seen)) >= IDLE_BELOW:
        return None
    used = float(np.mean(seen))
    power = sum(device.power_w or 0.0 for device in facts.devices)
    energy = f", and they draw {power:,.0f} W all the same" if power else ""
    if facts.power_w and facts.wall_s > 0:
        energy += f" (about {facts.power_w * facts.wall_s / 3.6e6:,.2f} kWh so far)"
    other = planner.faster
    return Advice(
        "idle_devices",
        "info",
        f"Devices are busy only {percent(used)} of the time",
        f"Mean utilisation of {len(seen)} devices over the last minutes is {percent(used)}{energy}.",
        _try(other, facts)
        or "Where the time goes tells what they wait for; a larger microbatch or torch.compile gives them more to do "
        "at a time.",
        *_taking(other),
        facts={"utilisation": used, "power_w": power},
    )


def _reconciled(facts: RunFacts) -> Reconciled | None:
    if facts.prediction is None or facts.plan is None or not is_enough(facts) or not facts.has_whole_batch:
        return None
    memory = float(np.nan_to_num(facts.column("memory_bytes", facts.recent)).max(initial=0.0))
    return reconcile(facts.prediction, facts.plan, facts.typical, memory, with_reserve=True)


def _bubble_share(planner: Planner) -> float:
    """Return the share of a step that stages of a pipeline idle by their schedule; 0 if it is not predicted."""
    predicted = planner.predicted
    return 0.0 if predicted is None else predicted.seconds.get("bubble", 0.0) / float(predicted.step_s.mid)


def _waits(facts: RunFacts, bubble_share: float) -> dict[str, float]:
    """Return the seconds a step that rank 0 waited for others: by axis and tier where a run wrote that down.

    A stage waits along pp for the bubble too, which has a rule of its own.
    """
    waits = {}
    for axis, tier, key in channels_in(facts.keys("communication.")):
        over_the = "inside a machine" if tier == NODE_TIER else "over the network"
        idle_s = bubble_share * facts.step_s if axis == "pp" else 0.0
        waits[f"along {axis} {over_the}"] = facts.typical_mean(key) - idle_s
    waits = {name: value for name, value in waits.items() if value > 0}
    return waits or {"for sums of gradients": facts.mean_s("communication")}


def _slowest_rank_explains(facts: RunFacts, waited_s: float) -> bool:
    """Return True if most of the waiting of rank 0 is for a rank whose own work takes longer."""
    if facts.ranks is None or not len(facts.ranks.steps):
        return False
    own_s = np.nanmedian(facts.ranks.own_s, axis=0)
    first = own_s[facts.ranks.numbers == 0]
    return bool(len(first)) and float(np.nanmax(own_s) - first[0]) > 0.5 * waited_s


def _predicted_waits(facts: RunFacts) -> float | None:
    if facts.prediction is None:
        return None
    return sum(facts.prediction.seconds.get(name, 0.0) for name in OF_TIME["network"])


def _passes_s(facts: RunFacts) -> float:
    return sum(facts.mean_s(name) for name in CALIBRATED_PARTS[PASSES].measured)


def _step(other: Alternative) -> str:
    low, mid, high = (seconds(float(end)) for end in (other.step_s.low, other.step_s.mid, other.step_s.high))
    return f"{mid} a step ({low} to {high})"


def _try(other: Alternative | None, facts: RunFacts) -> str:
    if other is None:
        return ""
    spares = f" It leaves {counted(other.spares, 'process', 'es')} idle." if other.spares else ""
    if facts.has_ended:
        return f'Next time, give --plan "{other.plan}".{spares}'
    return f'Stop the run and go on with --plan "{other.plan}": it goes on from its checkpoint.{spares}'


def _taking(other: Alternative | None) -> tuple[str, float | None, str]:
    """Return what a plan gains, in words and as a share of the time, and the plan itself; nothing without one."""
    if other is None:
        return "", None, ""
    return f"{_step(other)} in place of {seconds(other.now_s)}", other.saves, str(other.plan)


NEARLY_FULL = 0.92
"""Share of a device's memory at its peak above which fragmentation, or a longer document, can end the run: the
allocator of torch holds some percent that it cannot use."""
SHOULD = 0.85
"""Share that leaves room for that."""
FAR = 0.6
"""Share below which memory is left over that could make steps faster."""


def memory_near_limit(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that a rank's memory is nearly full, and which plan needs less."""
    share, used, rank = _share(facts, planner)
    if share < NEARLY_FULL or facts.has_ended:
        return None
    other = planner.leaner(SHOULD, used)
    slower = "" if other is None else f", {seconds(float(other.step_s.mid))} a step in place of {seconds(other.now_s)}"
    return Advice(
        "memory_near_limit",
        "warning",
        f"Rank {rank} uses {percent(share)} of its device's memory",
        f"Its peak is {used / GIB:.1f} GiB of {used / share / GIB:.1f} GiB for programs; above {percent(NEARLY_FULL)} "
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
