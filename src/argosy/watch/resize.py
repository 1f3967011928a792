"""Resize a run under way: time and cost of the rest of it on fewer devices, on more, or on others.

On devices of its own kind, the measured step is scaled by the ratio of two predictions, both calibrated by the run's
recent steps (`watch.rules.planner`). For another cluster there is nothing measured: its prediction stands as it is. All
plans keep the numbers of training: precision, batch, sample order.

The ways to go on with a run, for the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Group

from argosy.config.schema import RunConfig
from argosy.errors import UserError, counted
from argosy.observe.terminal import printable
from argosy.plan.cost.economy import comparable_costs, price_per_device_h
from argosy.plan.cost.estimate import Estimate, count, propagate, seconds, within
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import NUMERICS, Plan
from argosy.plan.report.explain import Reliability, reliability, shown_stops, spares_in_words, stops_in_words
from argosy.plan.report.report import PlanRequest
from argosy.plan.report.terminal import console_of, plans_table, stops_table
from argosy.plan.report.within import best_by_size
from argosy.plan.search.candidates import grown
from argosy.plan.search.replan import REPLAN_S
from argosy.watch.conclusions import facts_of
from argosy.watch.facts import RunFacts
from argosy.watch.forecast import forecast
from argosy.watch.reader import RunReader
from argosy.watch.rules.planner import Planner
from argosy.watch.rules.stops import StopsSoFar, failures, rates_of, stops_so_far

Direction = Literal["stay", "up", "down", "sideways"]

MOST_TIMES_LARGER = 4
"""Clusters are looked at up to this many times as large."""
WORTH_SAVING = 0.1
"""A change that saves less of the cost is not worth a restart."""


@dataclass(frozen=True)
class Option:
    """One way to go on with the run."""

    where: str
    """Empty: on devices of its own kind; else the cluster as the user named it."""
    devices: int
    plan: str
    step_s: Estimate
    left_s: Estimate
    """Until the last step, a restart included where one is needed."""
    device_hours: Estimate
    """Device hours that are left."""
    money: Estimate | None
    """Price of the rest; None if nobody knows one."""
    currency: str
    is_measured: bool = False
    """True for going on as now."""


@dataclass(frozen=True)
class Resizing:
    """The ways to go on, and which of them is recommended."""

    steps_left: int
    limit_s: float | None
    options: tuple[Option, ...]
    """The run as it is first, then by devices."""
    direction: Direction
    recommended: Option
    words: str
    stops: StopsSoFar | None = None
    """The stops so far, seen and expected."""
    ahead: Reliability | None = None
    """The forecast for the rest of the run on today's machines, from those stops."""


def resizing(
    facts: RunFacts, planner: Planner, others: Sequence[tuple[str, Cluster]], limit_s: float | None
) -> Resizing:
    """Return the ways to go on with a run, on its own kind of devices and on `others` (name, cluster).

    limit_s: seconds from now in which it is to be done.
    Raises: UserError if the run has ended, or has done too little to tell.
    """
    run, plan = facts.run, facts.plan
    if facts.has_ended:
        raise UserError(
            f"{facts.folder}: the run has ended. Ask about its run file: argosy plan {facts.folder}/run.toml"
        )
    expected = forecast(facts, planner)
    if run is None or plan is None or expected is None:
        raise UserError(f"{facts.folder}: the run has done too little to tell. Ask again after some more steps.")
    left, left_s, machine = expected.steps_left, expected.left_s, planner.machine
    beside = float(left_s.mid) / (left * facts.step_s)  # evaluations and failures make it more than 1
    now = _option("", plan.world_size, str(plan), Estimate.exactly(facts.step_s), left_s, machine, is_measured=True)
    free = rest_of(run, left).model_copy(update={"plan": "auto"})
    tokens = float(free.train.batches.before(left) * run.data.seq_len)
    pins = {key: (getattr(plan, key),) for key in NUMERICS}
    found = [now]
    if machine is not None:
        for devices, words in _own_sizes(PlanRequest(free, grown(machine, MOST_TIMES_LARGER), tokens, pins=pins)):
            alternative = planner.elsewhere(Plan.parse(words), grown(machine, MOST_TIMES_LARGER))
            if alternative is not None and (devices != plan.world_size or alternative.saves > 0):
                rest_s = propagate(lambda step: left * step * beside + REPLAN_S, alternative.step_s)
                found.append(_option("", devices, words, alternative.step_s, rest_s, machine))
    for name, cluster in others:
        *_, sizes = best_by_size(PlanRequest(free, cluster, tokens, pins=pins))
        for size in sizes:
            rest_s = propagate(lambda took: took + REPLAN_S, size.run.time_s)
            found.append(_option(name, size.devices, size.plan, size.step_s, rest_s, cluster))
    best = _best(found, limit_s)
    direction = _direction(best, now)
    options = (now, *sorted(_shown(found[1:], now, best), key=lambda each: (each.where, each.devices)))
    stops, ahead = stops_so_far(facts, planner), None
    rates = rates_of(facts, planner, failures(facts))
    if rates is not None and machine is not None:
        ahead = reliability(machine, plan.world_size, float(now.device_hours.mid), rates)
    return Resizing(left, limit_s, options, direction, best, _words(direction, best, now, limit_s), stops, ahead)


def rest_of(run: RunConfig, left: int) -> RunConfig:
    """Return the run of the `left` steps that are still to be made: of a batch ramp, only what is not done yet."""
    done = (run.train.steps or left) - left
    ramp = tuple(
        stage.model_copy(update={"until_step": stage.until_step - done})
        for stage in run.train.batch_ramp
        if stage.until_step > done
    )
    return run.with_keys(train={"steps": left, "batch_ramp": ramp})


def _own_sizes(request: PlanRequest) -> list[tuple[int, str]]:
    try:
        return [(size.devices, size.plan) for size in best_by_size(request)[-1]]
    except UserError:
        return []


def _option(
    where: str,
    devices: int,
    plan: str,
    step_s: Estimate,
    left_s: Estimate,
    cluster: Cluster | None,
    is_measured: bool = False,
) -> Option:
    hours = propagate(lambda left: left / 3600 * devices, left_s)
    price = cluster and price_per_device_h(cluster)
    return Option(
        where=where,
        devices=devices,
        plan=plan,
        step_s=step_s,
        left_s=left_s,
        device_hours=hours,
        money=propagate(lambda h, each: h * each, hours, price) if price else None,
        currency=cluster.currency if cluster else "",
        is_measured=is_measured,
    )


def _best(found: Sequence[Option], limit_s: float | None) -> Option:
    """Return the cheapest that is in time, or no slower than now; the run as it is, if that saves little; else, where
    nothing is in time, the fastest."""
    now = found[0]
    limit = float(now.left_s.mid) if limit_s is None else limit_s
    able = [each for each in found if float(each.left_s.mid) <= limit]
    if not able:
        return min(found, key=lambda each: float(each.left_s.mid))
    costs = comparable_costs((each.currency, each.money, each.device_hours) for each in able)
    stays = now in able and min(costs) > (1 - WORTH_SAVING) * costs[able.index(now)]
    return now if stays else able[costs.index(min(costs))]


def _direction(best: Option, now: Option) -> Direction:
    if best is now:
        return "stay"
    if best.where or best.devices == now.devices:
        return "sideways"
    return "up" if best.devices > now.devices else "down"


def _shown(found: Sequence[Option], now: Option, best: Option) -> list[Option]:
    """Return the options worth a row: halves and doubles, the best, and of another cluster the fewest and the most."""
    sizes = {max(1, now.devices // 4), max(1, now.devices // 2), now.devices, 2 * now.devices, 4 * now.devices}
    own = [each for each in found if not each.where and (each.devices in sizes or each is best)]
    others = [each for each in found if each.where]
    ends: dict[str, list[Option]] = {}
    for each in others:
        ends.setdefault(each.where, [each, each])[1] = each
    return [*own, *(each for each in others if each is best or each in ends[each.where])]


def _words(direction: Direction, best: Option, now: Option, limit_s: float | None) -> str:
    if limit_s is not None and float(best.left_s.mid) > limit_s:
        stay = "as it is" if best is now else f"on {_place(best)}"
        return (
            f"Not within {seconds(limit_s)}: the fastest is {seconds(best.left_s.mid)}, {stay}. More steps a day need "
            "another kind of device, or fewer tokens."
        )
    if direction == "stay":
        return f"Stay: {seconds(now.left_s.mid)} are left, and no other number of devices saves a tenth of the cost."
    words = {"up": "Scale up to", "down": "Scale down to", "sideways": "Go sideways, to"}[direction]
    money = f", {count(best.money.mid)} {best.currency}" if best.money else ""
    before = f", {count(now.money.mid)} {now.currency}" if now.money else ""
    return (
        f"{words} {_place(best)}: {seconds(best.left_s.mid)} left{money}, in place of "
        f"{seconds(now.left_s.mid)}{before}. "
        f'Stop the run, and go on with --plan "{best.plan}": it goes on from its checkpoint.'
    )


def _place(option: Option) -> str:
    devices = counted(option.devices, "device")
    return f"{devices} of {option.where}" if option.where else devices


def resizing_of(reader: RunReader, others: Sequence[tuple[str, Cluster]], limit_s: float | None) -> Resizing:
    """Return the ways to go on with the run as of the reader's last `refresh`. Raises: UserError, as `resizing`."""
    facts = facts_of(reader)
    return resizing(facts, Planner(facts), others, limit_s)


def show(found: Resizing, folder: Path) -> None:
    """Print a row for each way to go on, and the recommendation."""
    console = console_of(None)

    def line(text: str, style: str = "") -> None:
        console.print(printable(text), style=style, highlight=False, soft_wrap=True, markup=False)

    limit = "" if found.limit_s is None else f", to be done within {seconds(found.limit_s)}"
    line(f"{folder}: {found.steps_left} steps are left{limit}", "bold")
    line("")
    figures = ("devices", "step", "left (90 % interval)", "device-hours", "cost")
    rows = [_row(option, option is found.recommended) for option in found.options]
    plans = [printable(option.plan) for option in found.options]
    table = plans_table(("", *figures), rows, plans, console.width, words=("",))
    console.print(Group(*table), highlight=False, crop=False)
    line("")
    line(found.words, "bold")
    if found.stops is not None:
        line("")
        line(f"What stopped it: {found.stops.words}")
        if shown_stops(found.stops.components):
            console.print(stops_table(found.stops.components), highlight=False)
    if found.ahead is not None:
        line(f"Ahead: {stops_in_words(found.ahead)}; {spares_in_words(found.ahead)}.")


def _row(option: Option, is_best: bool) -> tuple[str, ...]:
    where = "as it is" if option.is_measured else option.where or "these devices"
    return (
        f"{'* ' if is_best else '  '}{printable(where)}",
        str(option.devices),
        seconds(option.step_s.mid),
        within(option.left_s, seconds),
        count(option.device_hours.mid),
        f"{within(option.money, count)} {printable(option.currency)}" if option.money else "?",
    )
