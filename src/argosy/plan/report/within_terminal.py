"""How many devices a run takes within a time, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from argosy.plan.cost.estimate import count, seconds, within
from argosy.plan.report.terminal import PIPE_WIDTH
from argosy.plan.report.within import Within, in_words, recommended
from argosy.plan.search.candidates import Candidate

MOST_SIZES = 10
"""Rows of the table of sizes."""


def show(found: Sequence[Within], about: str, assumed: Sequence[str], console: Console | None = None) -> None:
    """Print a row for each cluster, or for one the sizes around its answer; then plans, and what is recommended."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

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


def _of_several(found: Sequence[Within]) -> Table:
    table = _table("cluster", "devices", "of", "run (nine times of ten)", "device-hours", "cost", "kWh")
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


def _of_one(found: Within) -> Table:
    table = _table("devices", "run (nine times of ten)", "device-hours", "cost", "kWh", "")
    for size in _around(found):
        mark = "the fewest in time" if size is found.fewest else "nine times of ten" if size is found.surely else ""
        table.add_row(str(size.devices), *_figures(size, found.currency), mark)
    return table


def _around(found: Within) -> list[Candidate]:
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


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        is_words = name in ("cluster", "") and (number == 0 or not name)
        table.add_column(name, justify="left" if is_words else "right", no_wrap=True)
    return table


def _recommendation(best: Within, found: Sequence[Within]) -> str:
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
    return f"Take {best.fewest.devices} devices of {best.named}: {why}{of_them}.{safe}"
