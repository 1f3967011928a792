"""The planner's report for the terminal; and the same question about several clusters, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from argosy.errors import UserError
from argosy.plan.cost.estimate import count, gib, percent, seconds, within
from argosy.plan.cost.heterogeneous import UnevenSplit
from argosy.plan.cost.reliability import ExpectedStops
from argosy.plan.hardware.devices import GIB
from argosy.plan.report.explain import (
    MEANING,
    MEMORY_MEANING,
    burn_in_in_words,
    count_of_stops,
    shown_stops,
    spares_in_words,
    stops_in_words,
    unlike,
)
from argosy.plan.report.network import AXIS_COLUMNS, NetworkReport, axis_cells, network_in_words
from argosy.plan.report.report import Explanation, PlanReport, PlanRequest, describe, figures_of, plan_report
from argosy.plan.search.candidates import Candidate
from argosy.plan.workload import Numbers

BAR = 12
"""Characters in the longest bar."""
LEAST_SHOWN = 0.001
"""Share of the whole below which a category is left out."""
LEAST_CHANGE = 0.0005
"""Relative change of the step below which it counts as none."""
HOLDERS = {"microbatches": "replicas", "layers": "pipeline ranks"}
"""Unit of work -> the ranks that it is dealt to."""
PIPE_WIDTH = 200
"""Characters in a line if the output is no terminal."""


def console_of(console: Console | None) -> Console:
    """Return the console to print to, `console` or the usual one; wide where it is no terminal."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def line_printer(console: Console) -> Callable[..., None]:
    """Return what prints a text, and a style if it is given, as it is: no markup, and no line is broken."""

    def line(text: str | Text, style: str = "") -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    return line


def figures_table(*columns: str, words: Collection[str] = ()) -> Table:
    """Return a table without lines, and without a head if no columns are named. All but `words` are figures."""
    table = Table(box=None, show_header=bool(columns), pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right", overflow="fold")
    return table


def plans_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], plans: Sequence[str], width: int, words: Collection[str] = ()
) -> Iterator[RenderableType]:
    """Yield a table with a plan at the end of each row, for a terminal of `width` characters.

    Where plans do not fit into its lines, they follow it by number, one in a line.
    """
    figures = sum(max(map(len, column)) + 2 for column in zip(columns, *rows, strict=True))
    is_narrow = width < figures + max(map(len, plans))
    table = figures_table(*columns, "plan", words=("plan", *words))
    for number, (row, plan) in enumerate(zip(rows, plans, strict=True), 1):
        table.add_row(*row, f"{number}" if is_narrow else plan)
    yield table
    if is_narrow:
        yield Text()
        for number, plan in enumerate(plans, 1):
            yield _line(f"{number:>2}  {plan}")


def show(report: PlanReport, console: Console | None = None) -> None:
    console = console_of(console)
    console.print(Group(*_parts(report, console.width)), highlight=False, crop=False)


def _parts(report: PlanReport, width: int) -> Iterator[RenderableType]:
    """Yield the parts of the report for a terminal of `width` characters."""
    yield Text(headline(report), style="bold")
    for line in (*report.assumed, *report.notes):
        yield Text(line, style="dim")
    if report.choices:
        yield Text(f"\n{search_line(report)}")
        yield from _choices(report, report.choices, width)
    if len(report.pareto) > 1:
        yield Text("\nNo other plan is faster with as little memory on as few devices:")
        yield from _choices(report, report.pareto, width)
    yield from _explained(report)
    yield from _outlooks(report)


def headline(report: PlanReport) -> str:
    active = report.active_parameters
    of_them = "" if active == report.parameters else f", {count(active)} active"
    return (
        f"{report.model} ({count(report.parameters)} parameters{of_them}) on {report.cluster}; a step is "
        f"{report.global_batch} sequences of {report.seq_len} tokens, the run {count(report.tokens)} tokens"
    )


def search_line(report: PlanReport) -> str:
    by = {"time": "step time", "cost": "cost", "energy": "energy", "goodput": "tokens a day, failures included"}
    return (
        f"{report.looked_at:,} plans looked at, {report.fitting:,} fit in {gib(report.memory_bytes)} GiB a device; "
        f"the best by {by[report.objective]}, one for each mesh:"
    )


def _choices(report: PlanReport, choices: tuple[Candidate, ...], width: int) -> Iterator[RenderableType]:
    rows = [figures_of(choice) for choice in choices]
    yield from plans_table(report.columns, rows, [choice.plan for choice in choices], width)


def _line(text: str, style: str = "") -> Text:
    """Return a text that stays one line, so that it can be copied: the terminal may wrap it, rich does not."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def _explained(report: PlanReport) -> Iterator[RenderableType]:
    about = report.explanation
    yield Text()
    yield _line(f'"{about.choice.plan}"', style="bold")
    if about.misfit:
        yield Text(why_not(about), style="red")
    table = figures_table()
    for row in facts(report):
        table.add_row(*row)
    yield table
    yield Text("\nWhere a step's time goes, from the ideal on:")
    yield _bars(about.waterfall, MEANING, seconds)
    if report.network is not None and report.network.axes:
        yield from _network(report.network)
    yield Text("\nMemory of the rank that needs most, GiB:")
    yield _bars(about.memory, MEMORY_MEANING, gib)
    yield Text(f"\nThe step time depends most on {about.binding}:")
    table = figures_table()
    for change in about.sensitivities:
        if abs(change.change) >= LEAST_CHANGE:
            table.add_row(change.what, percent(change.change, signed=True), change.note)
    yield table
    if idle := [change.what for change in about.sensitivities if abs(change.change) < LEAST_CHANGE]:
        yield Text(f"no change: {', '.join(idle)}", style="dim")
    of_components = bool(shown_stops(about.reliability.components))
    yield Text(f"\nWhat stops the whole run: {stops_in_words(about.reliability)}{':' if of_components else '.'}")
    if of_components:
        yield stops_table(about.reliability.components)
    yield Text(f"By the catalogue {burn_in_in_words(about.reliability.burn_in)}.", style="dim")


def why_not(about: Explanation) -> str:
    """Return why the plan does not fit, and the nearest that does."""
    missing, near = about.misfit, about.near
    assert missing is not None
    nearest = f'; the nearest that fits: "{near.plan}" ({seconds(near.step_s.mid)})' if near else ""
    return (
        f"does not fit: {gib(missing.excess_bytes)} GiB too much, most of it {missing.largest} "
        f"({gib(missing.largest_bytes)} GiB){nearest}"
    )


def facts(report: PlanReport) -> Iterator[tuple[str, str, str]]:
    """Yield the figures of the explained plan: what it is, the figure with its interval, and a remark."""
    about, choice, run = report.explanation, report.explanation.choice, report.explanation.choice.run
    failures = about.failures
    yield "step", within(choice.step_s, seconds), "90 % interval"
    yield "memory", f"{within(choice.memory_bytes, gib)} GiB", f"of {gib(report.memory_bytes)} GiB"
    yield "whole run", within(run.time_s, seconds), f"{within(run.device_hours, count)} device-hours"
    if run.money:
        yield "cost", f"{within(run.money, count)} {report.currency}", prices(report)
    if run.energy_kwh and run.co2_kg:
        yield "energy", f"{within(run.energy_kwh, count)} kWh", f"{within(run.co2_kg, count)} kg CO2"
    if about.sums:
        yield "sums", *about.sums
    productive = f"{within(failures.effective, percent)} of the time is productive"
    yield "failures", f"one in {within(failures.mtbf_s, seconds)}", productive
    saved = f"save every {within(failures.interval_s, seconds)}, in memory every {seconds(failures.copy_interval_s)}"
    yield "against them", saved, spares_in_words(about.reliability)


def stops_table(components: Sequence[ExpectedStops]) -> Table:
    """Return expected stops by component, beside those that were seen if somebody looked."""
    looked = any(each.seen is not None for each in components)
    figures = ("component", "expected", "90 % interval", *("seen", "") * looked)
    table = figures_table(*figures, words=("component", ""))
    for each in shown_stops(components):
        table.add_row(*stop_cells(each), *((str(each.seen or 0), unlike(each)) if looked else ()))
    return table


def stop_cells(stops: ExpectedStops) -> tuple[str, str, str]:
    """Return a component, its expected stops, and their interval."""
    return stops.called, count_of_stops(stops.expected), f"{stops.low:.0f} to {stops.high:.0f}"


def prices(report: PlanReport) -> str:
    """Return the price of an hour of a device and its date, in words."""
    price = report.price_per_device_h
    if price is None:
        return ""
    exact = price.low == price.high
    each = f"at {price.mid:.3g} {report.currency}" if exact else f"at {within(price, _money)} {report.currency}"
    dated = f", prices of {report.prices_of}" if report.prices_of else ""
    return f"{each} an hour of a device{dated}{'' if exact else '; --price sets yours'}"


def _money(value: Numbers) -> str:
    return f"{float(value):.3g}"


def _network(found: NetworkReport) -> Iterator[RenderableType]:
    """Yield where ranks are on the network, and what a message of each axis takes there."""
    yield Text(f"\n{network_in_words(found)}")
    words = [name for name, is_number in AXIS_COLUMNS.items() if not is_number]
    table = figures_table(*AXIS_COLUMNS, words=words)
    for axis in found.axes:
        table.add_row(*axis_cells(axis))
    yield table


def _bars(values: dict[str, float], meaning: dict[str, str], write: Callable[[Numbers], str]) -> Table:
    whole = sum(values.values())
    longest = max(values.values())
    table = figures_table()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for name, value in values.items():
        if value > LEAST_SHOWN * whole:
            bar = "█" * max(1, round(BAR * value / longest))
            table.add_row(name, write(value), percent(value / whole), bar, meaning[name])
    return table


def shares_in_words(split: UnevenSplit) -> str:
    many = HOLDERS[split.what]
    return "; ".join(f"{s.holders} {many} on {s.device}: {s.range} {split.what} each" for s in split.shares)


def _outlooks(report: PlanReport) -> Iterator[RenderableType]:
    if report.uneven:
        yield Text("\nWork dealt out by the speed of devices:")
        for split in report.uneven:
            yield Text(f'  {seconds(split.step_s)} a step with "{split.plan}": {shares_in_words(split)}')
    if report.exchanges:
        yield Text("\nSites that sum gradients in every step (H = 1), or agree every H steps (sync=diloco):")
        table = figures_table("H", "GiB a step and site", "step")
        table.add_column(Text("[sync], of a run with [[sites]]"))
        for way in report.exchanges:
            keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in way.sync.items())
            table.add_row(str(way.inner_steps), f"{way.bytes_per_step / GIB:.3g}", seconds(way.step_s), Text(keys))
        yield table
        for plan in dict.fromkeys(way.plan for way in report.exchanges):
            many = [str(way.inner_steps) for way in report.exchanges if way.plan == plan]
            yield _line(f'H = {", ".join(many)}: plan = "{plan}"')


@dataclass(frozen=True)
class OnCluster:
    """The answer for one cluster."""

    named: str
    """The cluster as the user named it."""
    cluster: str
    """The cluster in words."""
    report: PlanReport | None
    """None if no plan fits, or none is legal."""
    problem: str = ""
    """Why there is no report."""


def compare(requests: Sequence[tuple[str, PlanRequest]]) -> tuple[OnCluster, ...]:
    """Return the answer for each (cluster as named, request); one without a plan does not keep the others from theirs.

    Raises: UserError if no cluster has a plan.
    """
    found = tuple(_answer(named, request) for named, request in requests)
    if all(one.report is None for one in found):
        raise UserError("\n".join(f"{one.named}: {one.problem}" for one in found))
    return found


def _answer(named: str, request: PlanRequest) -> OnCluster:
    try:
        return OnCluster(named, describe(request.cluster), plan_report(request))
    except UserError as error:
        return OnCluster(named, describe(request.cluster), None, str(error))


def show_side_by_side(found: Sequence[OnCluster]) -> None:
    """Print one row for each cluster, below them its best plan, or why it has none."""
    console = console_of(None)
    reports = [one.report for one in found if one.report is not None]
    question = headline(reports[0]).replace(f" on {reports[0].cluster};", ";")
    assumed = list(dict.fromkeys(line for report in reports for line in report.assumed))
    plans = [_plan_on(one) for one in found]
    rule = Text("\nThe whole report of one: the same command with that --cluster alone.", style="dim")
    above = [Text(question, style="bold"), *(Text(line, style="dim") for line in assumed), Text()]
    advice = Text(f"\n{recommendation(found)}", style="bold")
    console.print(Group(*above, _of_clusters(found), Text(), *plans, advice, rule), highlight=False)


def recommendation(found: Sequence[OnCluster]) -> str:
    """Return which cluster is the fastest, and which the cheapest, in a sentence."""
    able = [(one.named, one.report.explanation.choice, one.report.currency) for one in found if one.report is not None]
    name, fast, currency = min(able, key=lambda each: float(each[1].run.time_s.mid))
    priced = [(each, choice.run.money) for each, choice, _ in able if choice.run.money]
    if len(priced) < len(able) or len({each[2] for each in able}) > 1:
        return f"The fastest is {name}. Costs cannot be compared: a price is unknown, or in another currency (--price)."
    cheap, least = min(priced, key=lambda each: float(each[1].mid))
    if cheap == name:
        return f"Take {name}: it is the fastest, and costs least."
    choice = next(choice for each, choice, _ in able if each == cheap)
    assert fast.run.money is not None
    saves = 1 - float(least.mid) / float(fast.run.money.mid)
    return (
        f"Take {cheap} if cost counts: it saves {percent(saves)} ({count(least.mid)} in place of "
        f"{count(fast.run.money.mid)} {currency}); take {name} if time counts: {seconds(fast.run.time_s.mid)} in place "
        f"of {seconds(choice.run.time_s.mid)}."
    )


def _of_clusters(found: Sequence[OnCluster]) -> Table:
    currencies = list(dict.fromkeys(one.report.currency for one in found if one.report))
    money = currencies[0] if len(currencies) == 1 else "cost"
    figures = ("devices", "step", "tokens/s", "MFU", "GiB", "run", money, "an hour", "kWh")
    table = figures_table("cluster", *figures, words=("cluster",))
    for one in found:
        if one.report is None:
            table.add_row(one.named, *9 * ["-"])
            continue
        report, best = one.report, one.report.explanation.choice
        unit = "" if len(currencies) == 1 else f" {report.currency}"
        price = report.price_per_device_h
        table.add_row(
            one.named,
            str(best.devices),
            seconds(best.step_s.mid),
            count(best.tokens_per_s),
            percent(best.mfu),
            gib(best.memory_bytes.mid),
            seconds(best.run.time_s.mid),
            count(best.run.money.mid) + unit if best.run.money else "?",
            count(float(price.mid) * best.devices) + unit if price else "?",
            count(best.run.energy_kwh.mid) if best.run.energy_kwh else "?",
        )
    return table


def _plan_on(one: OnCluster) -> Text:
    if one.report is None:
        return Text(f"{one.named}: {one.problem}", style="red")
    return Text(f'{one.named}: "{one.report.explanation.choice.plan}"')
