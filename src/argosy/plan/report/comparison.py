"""The same question about several clusters, side by side: the best plan on each, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from argosy.errors import UserError
from argosy.plan.cost.estimate import count, gib, percent, seconds
from argosy.plan.report.report import PlanReport, PlanRequest, describe, plan_report
from argosy.plan.report.terminal import PIPE_WIDTH, headline


@dataclass(frozen=True)
class OnCluster:
    """The answer for one cluster."""

    named: str
    """The cluster as the user named it."""
    cluster: str
    """What it is made of."""
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


def show(found: Sequence[OnCluster], console: Console | None = None) -> None:
    """Print one row for each cluster, below them its best plan, or why it has none."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    reports = [one.report for one in found if one.report is not None]
    question = headline(reports[0]).replace(f" on {reports[0].cluster};", ";")
    assumed = list(dict.fromkeys(line for report in reports for line in report.assumed))
    plans = [_plan(one) for one in found]
    rule = Text("\nThe whole report of one: the same command with that --cluster alone.", style="dim")
    above = [Text(question, style="bold"), *(Text(line, style="dim") for line in assumed), Text()]
    advice = Text(f"\n{recommendation(found)}", style="bold")
    console.print(Group(*above, _table(found), Text(), *plans, advice, rule), highlight=False)


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


def _table(found: Sequence[OnCluster]) -> Table:
    currencies = list(dict.fromkeys(one.report.currency for one in found if one.report))
    money = currencies[0] if len(currencies) == 1 else "cost"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("cluster", overflow="fold")
    for name in ("devices", "step", "tokens/s", "MFU", "GiB", "run", money, "an hour", "kWh"):
        table.add_column(name, justify="right", no_wrap=True)
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


def _plan(one: OnCluster) -> Text:
    if one.report is None:
        return Text(f"{one.named}: {one.problem}", style="red")
    return Text(f'{one.named}: "{one.report.explanation.choice.plan}"')
