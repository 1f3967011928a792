"""The fewest devices of each cluster that train a run in a given time, with plan and cost; and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from argosy.errors import UserError, counted
from argosy.plan.cost.economy import comparable_costs
from argosy.plan.cost.estimate import count, seconds, within
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report.report import PlanRequest, describe, searched
from argosy.plan.report.terminal import console_of, figures_table, line_printer
from argosy.plan.search.candidates import Candidate, best_of_each, counts_up_to, fewest, grown

MOST_DEVICES = 2**18
"""No search goes further: larger jobs are not known."""


OPEN_MORE = 4
"""A device named alone is looked at in so many times as many as are enough, to be sure too."""
FEW_NODES = 64
"""Nodes that are looked at where no number is known to do."""


@dataclass(frozen=True)
class WithinAnswer:
    """The answer for one cluster."""

    named: str
    """The cluster as the user named it."""
    cluster: str
    """The cluster in words."""
    within_s: float
    currency: str
    devices: int
    """Devices that there are, or that were looked at."""
    is_open: bool
    """There are as many as it takes."""
    fewest: Candidate | None = None
    """The fewest devices whose whole run takes no longer, half of the time; None: more are needed than there are."""
    surely: Candidate | None = None
    """The fewest that do so nine times of ten or more: the upper end of the interval is within the limit."""
    fastest: Candidate | None = None
    """The fastest plan that there is on the cluster."""
    sizes: tuple[Candidate, ...] = ()
    """The best plan for each number of devices; the fewest first."""
    beyond: int | None = None
    """If the cluster is too small: how many such devices would do; None if none are known to."""
    tokens: float = 0.0
    """Tokens of the run."""
    assumed: tuple[str, ...] = ()
    """Defaults that were filled in for the user, in words."""
    problem: str = ""
    """Why there is no plan at all."""


def fewest_within(named: str, request: PlanRequest, limit_s: float, is_open: bool = False) -> WithinAnswer:
    """Return the fewest devices that do the run in `limit_s`.

    is_open: the cluster is one node of as many as it takes.
    Raises: UserError if there is no legal plan, or none fits.
    """
    if is_open:
        size = _large_enough(request, limit_s)
        request = _on(request, grown(request.cluster, OPEN_MORE * (size or FEW_NODES)))
    request, tokens, sizes = best_by_size(request)
    in_time = fewest([float(each.run.time_s.mid) <= limit_s for each in sizes])
    surely = fewest([float(each.run.time_s.high) <= limit_s for each in sizes])
    beyond = None
    if in_time is None and not is_open:
        times = _large_enough(request, limit_s, start=2)
        beyond = times and request.cluster.devices * times
    return WithinAnswer(
        named=named,
        cluster=describe(request.cluster),
        within_s=limit_s,
        devices=request.cluster.devices,
        is_open=is_open,
        fewest=None if in_time is None else sizes[in_time],
        surely=None if surely is None else sizes[surely],
        fastest=min(sizes, key=lambda each: float(each.run.time_s.mid)),
        sizes=sizes,
        beyond=beyond,
        currency=request.cluster.currency,
        tokens=tokens,
        assumed=request.assumed,
    )


def of_each(requests: Sequence[tuple[str, PlanRequest, bool]], limit_s: float) -> tuple[WithinAnswer, ...]:
    """Return the answer for each (cluster as named, request, is_open); one without a plan keeps no other from its own.

    Raises: UserError if no cluster has a plan.
    """
    found = tuple(_answer(named, request, limit_s, is_open) for named, request, is_open in requests)
    if all(each.problem for each in found):
        raise UserError(
            "\n".join(f"{each.named}: {each.problem}" if len(found) > 1 else each.problem for each in found)
        )
    return found


def best_by_size(request: PlanRequest) -> tuple[PlanRequest, float, tuple[Candidate, ...]]:
    """Return the request that is answered (`searched`), the tokens of the run, and for each number of devices the plan
    whose whole run, failures included, is shortest; the fewest first. Numbers that are no faster than fewer are left
    out.

    Raises: UserError if nothing is legal or fits.
    """
    request, economy, found = searched(request, counts_up_to)
    tokens_per_day = -economy.score(found, "goodput")
    days = economy.tokens / tokens_per_day
    rows = best_of_each(days, np.asarray(found.devices))
    before = np.concatenate([[np.inf], np.minimum.accumulate(days[rows])[:-1]])
    return request, economy.tokens, economy.choices(found.plans[rows[days[rows] < before]])


def recommended(found: Sequence[WithinAnswer]) -> WithinAnswer | None:
    """Return the cluster that does it for least, or with fewest device-hours where a price is unknown; None if none."""
    able = [(each, each.fewest.run) for each in found if each.fewest is not None]
    costs = comparable_costs((each.currency, run.money, run.device_hours) for each, run in able)
    return able[costs.index(min(costs))][0] if able else None


def _answer(named: str, request: PlanRequest, limit_s: float, is_open: bool) -> WithinAnswer:
    try:
        return fewest_within(named, request, limit_s, is_open)
    except UserError as error:
        cluster = request.cluster
        about = named, describe(cluster), limit_s, cluster.currency, cluster.devices, is_open
        return WithinAnswer(*about, problem=str(error))


def _large_enough(request: PlanRequest, limit_s: float, start: int = 1) -> int | None:
    """Return how many times the cluster's nodes do it in time, in doublings from `start` on; None if none are known to.

    It ends where twice as many devices are no faster.
    """
    times, before = start, float("inf")
    while request.cluster.devices * times <= MOST_DEVICES:
        took = _shortest_s(_on(request, grown(request.cluster, times)))
        if took is not None and took <= limit_s:
            return times
        if took is not None and took > 0.98 * before:
            return None
        times, before = 2 * times, before if took is None else took
    return None


def _shortest_s(request: PlanRequest) -> float | None:
    """Return the shortest run on all devices; None if no plan is legal there, or none fits."""
    try:
        _, economy, found = searched(request, lambda costs: [costs.devices])
    except UserError:
        return None
    return float(np.min(economy.tokens / -economy.score(found, "goodput"))) * 86_400


def _on(request: PlanRequest, cluster: Cluster) -> PlanRequest:
    return replace(request, cluster=cluster, given=None)


def in_words(one: WithinAnswer) -> str:
    limit = seconds(one.within_s)
    if one.problem:
        return f"{one.named}: {one.problem}"
    if one.fewest is not None:
        run = one.fewest.run
        money = f", {count(run.money.mid)} {one.currency}" if run.money else ""
        sure = (
            f"nine times of ten with {one.surely.devices}"
            if one.surely
            else f"nine times of ten it takes more than the {one.devices} that there are"
        )
        do = f"{counted(one.fewest.devices, 'device')} {'does' if one.fewest.devices == 1 else 'do'}"
        return f"{one.named}: {do} it in {limit} ({seconds(run.time_s.mid)}{money}); {sure}."
    assert one.fastest is not None
    more = (
        f"About {one.beyond} such devices would do."
        if one.beyond
        else "More such devices are no faster, with this batch: a larger global batch gives them work."
    )
    there, fastest = counted(one.devices, "device"), seconds(one.fastest.run.time_s.mid)
    return f"{one.named}: not within {limit} with {there}; the fastest is {fastest} on {one.fastest.devices}. {more}"


MOST_SIZES = 10
"""Rows of the table of sizes."""


def show_within(found: Sequence[WithinAnswer], about: str, assumed: Sequence[str]) -> None:
    """Print a row for each cluster, or for one the sizes around its answer; then plans, and what is recommended."""
    console = console_of(None)
    line = line_printer(console)

    tokens = next(each.tokens for each in found if not each.problem)
    line(f"{about}, {count(tokens)} tokens, within {seconds(found[0].within_s)}", "bold")
    for text in assumed:
        line(text, "dim")
    line("")
    console.print(_of_one(found[0]) if len(found) == 1 else _of_several(found), highlight=False)
    line("")
    for each in found:
        line(in_words(each), "red" if each.problem else "")
        shown = each.fewest or each.fastest
        if shown:
            line(f'  "{shown.plan}"')
    if len(found) > 1:
        best = recommended(found)
        line("")
        line(_recommendation(best, found) if best else "None of them does it. See above what would.", "bold")


def _of_several(found: Sequence[WithinAnswer]) -> Table:
    table = figures_table(
        "cluster", "devices", "of", "run (90 % interval)", "device-hours", "cost", "kWh", words=("cluster",)
    )
    for each in found:
        shown = each.fewest or each.fastest
        if shown is None:
            table.add_row(each.named, *6 * ["-"])
        else:
            late = "" if each.fewest else " (late)"
            table.add_row(
                each.named,
                str(shown.devices),
                "any" if each.is_open else str(each.devices),
                *_figures(shown, each.currency, late),
            )
    return table


def _of_one(found: WithinAnswer) -> Table:
    table = figures_table("devices", "run (90 % interval)", "device-hours", "cost", "kWh", "", words=("",))
    for size in _around(found):
        mark = "the fewest in time" if size is found.fewest else "nine times of ten" if size is found.surely else ""
        table.add_row(str(size.devices), *_figures(size, found.currency), mark)
    return table


def _around(found: WithinAnswer) -> list[Candidate]:
    """Return the answer, the sizes before it, and some larger ones."""
    sizes = list(found.sizes)
    at = sizes.index(found.fewest) if found.fewest else len(sizes) - 1
    before, after = sizes[max(0, at - 3) : at + 1], sizes[at + 1 :]
    larger = [size for size in after if size.devices in {found.sizes[at].devices * n for n in (2, 4, 8)}]
    sure = [found.surely] if found.surely and found.surely not in (*before, *larger) else []
    next_ones = [size for size in after[:2] if size not in larger and size not in sure]
    return sorted([*before, *next_ones, *sure, *larger], key=lambda size: size.devices)[:MOST_SIZES]


def _figures(shown: Candidate, currency: str, late: str = "") -> tuple[str, ...]:
    run = shown.run
    return (
        within(run.time_s, seconds) + late,
        count(run.device_hours.mid),
        f"{within(run.money, count)} {currency}" if run.money else "?",
        count(run.energy_kwh.mid) if run.energy_kwh else "?",
    )


def _recommendation(best: WithinAnswer, found: Sequence[WithinAnswer]) -> str:
    assert best.fewest is not None
    others = [each for each in found if each.fewest and each is not best]
    why = "it costs least" if best.fewest.run.money else "it takes the fewest device-hours"
    surely = best.surely
    safe = (
        f" To be done nine times of ten, take {surely.devices}."
        if surely and surely.devices != best.fewest.devices
        else ""
    )
    of_them = f" of the {len(others) + 1} that do it" if others else ", the only one that does it"
    return f"Take {counted(best.fewest.devices, 'device')} of {best.named}: {why}{of_them}.{safe}"
