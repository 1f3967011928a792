"""Rules about the numbers of training: loss, gradients, learning rate, experts."""

from __future__ import annotations

import numpy as np

from argosy.config.schema import SIGMAS_OF_MAD
from argosy.plan.cost.estimate import percent
from argosy.plan.rules import replicas_that_replay_are_whole
from argosy.watch.columns import finite_mean
from argosy.watch.facts import Event, RunFacts, median
from argosy.watch.rules.planner import Advice, Planner
from argosy.watch.rules.ranks import listed, node_of

LATELY = 1000
"""Bad steps are counted over so many last steps."""
OFTEN = 3
"""This many of them are no accident: `resilience.rewind_after` in the default run file."""
SPIKE_SIGMAS, SPIKE_SHARE, SPIKE_WINDOW = 8.0, 0.2, 64
"""A loss that was applied is a spike if it is so many robust standard deviations, and so much, above the median of the
steps before it. The run's own threshold is 10 by default; below it the step counts, and a person should know."""
GROWN_BY, GROWN_STEPS = 3.0, 400
"""A gradient norm that grows this much within so many steps while the loss does not fall comes before a divergence
(Wortsman et al. 2023, "Small-scale proxies for large-scale Transformer training instabilities")."""
LR_ENDED, LR_STEPS = 0.01, 20
"""Below this share of its peak a learning rate changes next to nothing; so many steps of it are a mistake."""
LR_TAIL = 0.07
"""A cosine to 0 is below that share in its last 6.4 %, and means to be."""
SKEWED = 4.0
"""Tokens of the busiest expert over the mean. The planner counts on 1.5, published runs stay below 2 to 3."""
DROPPED = 0.05
"""Share of token-expert pairs that a capacity may drop (Switch, Fedus et al. 2022: below 1 % at a factor of 1.25)."""
OVERFITS, OVERFIT_EVALUATIONS = 0.01, 3
"""Held-out loss this much above its best, in so many evaluations in a row, while the training loss falls."""


def bad_steps(facts: RunFacts, planner: Planner) -> Advice | None:
    """Name steps that were bad or spiked, and say what keeps them from coming back."""
    last = facts.over[1] if len(facts) else 0
    struck = [event for event in facts.of("bad_step") if int(event.get("step", -1)) > last - LATELY]
    once = [event for event in facts.of("transient") if int(event.get("step", -1)) > last - LATELY]
    applied = {} if struck else spikes(facts)
    if not struck and not once and not applied:
        return None
    told = [*(_bad(event) for event in struck[-3:]), *(_transient(event) for event in once[-3:])]
    told += [f"step {step}: loss {loss:.3g}, median before it {usual:.3g}" for step, (loss, usual) in applied.items()][
        -3:
    ]
    steps = sorted({int(event["step"]) for event in (*struck, *once)} | set(applied))
    many = len(struck) >= OFTEN or len(applied) >= OFTEN
    return Advice(
        "bad_steps",
        "warning" if struck or applied else "info",
        f"{'Steps' if len(steps) > 1 else 'Step'} {listed(steps)} {'were' if len(steps) > 1 else 'was'} bad",
        f"{'; '.join(told)} (of the last {min(LATELY, len(facts))} steps).",
        _remedy(facts, many, is_only_once=bool(once) and not struck and not applied),
        steps=(steps[0], steps[-1]),
        facts={"steps": steps[-100:], "bad": len(struck), "transient": len(once), "applied": len(applied)},
    )


def spikes(facts: RunFacts) -> dict[int, tuple[float, float]]:
    """Return the steps of the last `LATELY` whose loss spiked and was applied -> the loss, and the median before it."""
    first = max(0, len(facts) - LATELY - SPIKE_WINDOW)
    loss = facts.column("loss", slice(first, None))
    if len(loss) <= SPIKE_WINDOW:
        return {}
    windows = np.lib.stride_tricks.sliding_window_view(loss, SPIKE_WINDOW)[:-1]
    known = np.isfinite(windows).any(axis=1)
    windows, now = windows[known], loss[SPIKE_WINDOW:][known]
    steps = facts.column("step", slice(first, None))[SPIKE_WINDOW:][known]
    usual = np.nanmedian(windows, axis=1)
    spread = SIGMAS_OF_MAD * np.nanmedian(np.abs(windows - usual[:, None]), axis=1)
    is_spike = (now > usual + SPIKE_SIGMAS * spread) & (now > (1 + SPIKE_SHARE) * usual)
    return {int(steps[at]): (float(now[at]), float(usual[at])) for at in np.flatnonzero(is_spike)}


def growing_gradients(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that the gradient's norm grows while the loss does not fall."""
    steps = facts.column("step")
    warmup = facts.run.schedule.warmup_of(facts.run.train.steps) if facts.run is not None else 0
    part = slice(max(len(facts) - GROWN_STEPS, int(np.searchsorted(steps, 2 * warmup))), len(facts))
    if part.stop - part.start < GROWN_STEPS:
        return None
    norms, losses = np.array_split(facts.column("grad_norm", part), 4), np.array_split(facts.column("loss", part), 4)
    medians = [median(norm) for norm in norms]
    scatter = SIGMAS_OF_MAD * median(np.abs(losses[0] - median(losses[0])))
    falls = median(losses[-1]) < median(losses[0]) - scatter / 4
    if not (medians[-1] > GROWN_BY * medians[0] and sorted(medians) == medians) or falls:
        return None
    first, last = int(steps[part][0]), int(steps[part][-1])
    lr = facts.run.optimizer.lr if facts.run is not None else None
    half = f" to {lr / 2:g}" if lr else ""
    has_norms = facts.run is not None and (facts.run.model.qk_norm or facts.run.model.mla.kv_rank > 0)
    with_norms = "" if has_norms else ", and set model.qk_norm = true, which keeps attention's logits small"
    return Advice(
        "growing_gradients",
        "warning",
        f"The gradient's norm has grown {medians[-1] / medians[0]:.1f}-fold while the loss did not fall",
        f"Medians over quarters of steps {first} to {last}: {', '.join(f'{each:.3g}' for each in medians)}; the loss "
        f"went from {median(losses[0]):.3f} to {median(losses[-1]):.3f}.",
        f"A run that does so often diverges: lower optimizer.lr{half} from the newest checkpoint on. In a new run, "
        f"raise {warmup_key(facts)}{with_norms}.",
        steps=(first, last),
        facts={"medians": medians},
    )


def learning_rate_ended(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that steps are made at a learning rate of next to nothing."""
    lr, left, in_all = facts.column("lr"), facts.steps_left, facts.steps_in_all
    if len(lr) <= LR_STEPS or in_all is None or left is None or left < LR_STEPS:
        return None
    peak, lately = float(np.nanmax(lr)), lr[-LR_STEPS:]
    if not (peak > 0 and np.all(lately <= LR_ENDED * peak) and np.all(np.diff(lately) <= 0)):
        return None
    since = int(facts.column("step")[len(lr) - int(np.argmax(lr[::-1] > LR_ENDED * peak))])
    if in_all - since <= LR_TAIL * in_all:
        return None
    return Advice(
        "learning_rate_ended",
        "warning",
        "The learning rate has ended, and the run has not",
        f"Since step {since} it is at most {percent(LR_ENDED)} of its peak ({lately[-1]:.3g} of {peak:.3g}), and "
        f"{left} steps are left.",
        "These steps change next to nothing: stop here, or set schedule.final_ratio = 0.1 and a later train.steps, so "
        "that they learn.",
        f"{left} steps, {percent(left / in_all)} of the run",
        left / in_all,
        steps=(since, facts.over[1]),
        facts={"lr": float(lately[-1]), "peak": peak, "left": left},
    )


def skewed_experts(facts: RunFacts, planner: Planner) -> Advice | None:
    """Name layers whose busiest expert gets far more than its share, or that drop tokens."""
    run = facts.run
    if run is None or not run.model.moe.experts or facts.recent_count < LR_STEPS:
        return None
    skew = _by_layer(facts, "imbalance")
    dropped = _by_layer(facts, "dropped")
    bad = {layer: value for layer, value in skew.items() if value >= SKEWED}
    lost = {layer: value for layer, value in dropped.items() if value >= DROPPED}
    if not bad and not lost:
        return None
    moe, first_last = run.model.moe, facts.over
    worst = max(bad or lost, key=lambda layer: (bad or lost)[layer])
    said = [f"layer {worst}: the busiest expert gets {skew.get(worst, float('nan')):.1f} times the mean"]
    if lost:
        said.append(f"{percent(max(lost.values()))} of the choices are dropped")
    do = {
        "none": 'model.moe.balance is "none": set it to "bias" or "aux"',
        "aux": f'Raise model.moe.aux_coefficient ({moe.aux_coefficient:g}), or use balance = "bias" (DeepSeek-V3)',
        "bias": f"Raise model.moe.bias_rate ({moe.bias_rate:g}), so that it follows faster",
    }[moe.balance]
    return Advice(
        "skewed_experts",
        "warning",
        f"Experts are used unevenly in {len(bad or lost)} layer{'s' if len(bad or lost) > 1 else ''}",
        f"{'; '.join(said)} (mean of steps {first_last[0]} to {first_last[1]}). All ranks wait for the busiest.",
        f"{do}, in a new run: one that goes on keeps its [model].",
        steps=first_last,
        facts={"imbalance": skew, "dropped": dropped},
    )


def overfits(facts: RunFacts, planner: Planner) -> Advice | None:
    """Tell that the held-out loss rises while the training loss falls."""
    held_out, at = facts.evaluated("validation_loss"), facts.evaluated("step")
    if len(held_out) <= OVERFIT_EVALUATIONS:
        return None
    best = int(np.nanargmin(held_out)) if np.isfinite(held_out).any() else len(held_out)
    after = held_out[best + 1 :]
    if len(after) < OVERFIT_EVALUATIONS or not np.all(after[-OVERFIT_EVALUATIONS:] > (1 + OVERFITS) * held_out[best]):
        return None
    then, now = _loss_near(facts, float(at[best])), _loss_near(facts, float(at[-1]))
    if not now < then:
        return None
    return Advice(
        "overfits",
        "warning",
        f"Held-out loss rises since step {int(at[best])}: the model learns its data by heart",
        f"It was {held_out[best]:.3f} at step {int(at[best])} and is {held_out[-1]:.3f} at step {int(at[-1])}, while "
        f"the training loss went from {then:.3f} to {now:.3f}.",
        f"{_checkpoint_near(facts, int(at[best]) + 1)}; train on more data, or fewer steps, or raise "
        "optimizer.weight_decay.",
        steps=(int(at[best]), int(at[-1])),
        facts={"best": float(held_out[best]), "now": float(held_out[-1])},
    )


def _checkpoint_near(facts: RunFacts, done: int) -> str:
    """Say which of the checkpoints that are kept is the nearest to the state after so many steps."""
    kept = {int(save["step"]) for save in facts.of("save")} - {int(gone["step"]) for gone in facts.of("prune")}
    if not kept:
        return f"Stop at step {done} in a new run"
    near = min(kept, key=lambda step: abs(step - done))
    return f"Use the checkpoint of step {near}, the nearest that is kept (checkpoint.keep_every keeps more)"


def _loss_near(facts: RunFacts, step: float) -> float:
    end = int(np.searchsorted(facts.column("step"), step, side="right"))
    return median(facts.column("loss", slice(max(0, end - SPIKE_WINDOW), end)))


def _by_layer(facts: RunFacts, what: str) -> dict[int, float]:
    keys = [key for key in facts.keys("experts.") if key.endswith(f".{what}")]
    layers = {key: key.split(".")[1] for key in keys}
    return {
        int(n): finite_mean(facts.column(key, facts.recent))
        for key, n in layers.items()
        if n.isdecimal() and len(n) < 9
    }


def _bad(event: Event) -> str:
    what = {"not_finite": "not finite", "norm_outlier": "a gradient norm far above the others", "loss_spike": "a spike"}
    reason = what.get(str(event.get("reason")), str(event.get("reason")))
    limit = event.get("largest_grad_norm") if event.get("reason") == "norm_outlier" else event.get("largest_loss")
    most = f", {limit:.3g} would have been good" if isinstance(limit, float) else ""
    loss, norm = _short(event.get("loss")), _short(event.get("grad_norm"))
    return f"step {event['step']} was {reason}: loss {loss}, gradient norm {norm}{most}, {event.get('outcome', '')}"


def _transient(event: Event) -> str:
    what, key = ("gradient norm", "grad_norm") if event.get("reason") == "norm_outlier" else ("loss", "loss")
    first, again = _short(event.get(f"first_{key}")), _short(event.get(key))
    return f"step {event['step']} was bad once ({what} {first}) and good when it was done again ({again})"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _remedy(facts: RunFacts, many: bool, is_only_once: bool) -> str:
    suspects = facts.of("corruption", "gradient_corrupt", "collective_corrupt")
    if suspects:
        ranks = sorted({int(r) for e in suspects for r in (e.get("ranks") or e.get("suspects") or [e.get("rank", -1)])})
        places = [(rank, node_of(facts, rank)) for rank in ranks if rank >= 0]
        where = ", ".join(f"rank {rank} on {node}" if node else f"rank {rank}" for rank, node in places)
        return (
            f"Numbers were found corrupt: have {where or 'the machines'} checked, and take what is at fault out of the "
            "run."
        )
    if is_only_once:
        finds = "resilience.replay_check_every_steps finds the rank" if _can_replay(facts) else "check the machines"
        return f"A value that is wrong once is a flipped bit: if it comes back, {finds}."
    if not many:
        return (
            "Nothing, if it stays at this: the samples were skipped, or the loss came back. Look at them if it repeats."
        )
    run = facts.run
    if run is None:
        return "Lower the learning rate."
    warmup = run.schedule.warmup_fraction or run.schedule.warmup_steps
    clip = "" if run.optimizer.grad_clip else " Set optimizer.grad_clip = 1: nothing is clipped now."
    return (
        f"Lower optimizer.lr ({run.optimizer.lr:g}) to {run.optimizer.lr / 2:g}, or raise {warmup_key(facts)} "
        f"({warmup:g}) in a new run.{clip}"
    )


def _can_replay(facts: RunFacts) -> bool:
    """Return True unless the run's objective or its plan refuses replay checks."""
    if facts.run is None:
        return True
    resilience = facts.run.resilience.model_copy(update={"replay_check_every_steps": 1})
    checked = facts.run.model_copy(update={"resilience": resilience})
    fits = facts.plan is None or replicas_that_replay_are_whole(facts.plan, checked) is None
    return fits and not facts.run.train.has_preferences


def warmup_key(facts: RunFacts) -> str:
    """Return the key that the run's warmup is as long as: schedule.warmup_steps counts for nothing beside a share."""
    by_share = facts.run is not None and facts.run.schedule.warmup_fraction > 0
    return f"schedule.warmup_{'fraction' if by_share else 'steps'}"
