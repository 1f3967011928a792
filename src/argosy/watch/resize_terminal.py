"""The ways to go on with a run, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from argosy.observe.terminal import printable
from argosy.plan.cost.formatting import count, seconds, within
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report.terminal import PIPE_WIDTH
from argosy.watch.gather import facts_of
from argosy.watch.reader import RunReader
from argosy.watch.resize import Option, Resizing, resizing
from argosy.watch.rules.planner import Planner


def resizing_of(reader: RunReader, others: Sequence[tuple[str, Cluster]], limit_s: float | None) -> Resizing:
    """Return the ways to go on with the run as of the reader's last `refresh`. Raises: UserError, as `resizing`."""
    facts = facts_of(reader)
    return resizing(facts, Planner(facts), others, limit_s)


def show(found: Resizing, folder: Path, console: Console | None = None) -> None:
    """Print a row for each way to go on, and the recommendation."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH

    def line(text: str, style: str = "") -> None:
        console.print(printable(text), style=style, highlight=False, soft_wrap=True, markup=False)

    limit = "" if found.limit_s is None else f", to be done within {seconds(found.limit_s)}"
    line(f"{folder}: {found.steps_left} steps are left{limit}", "bold")
    line("")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "devices", "step", "left (nine times of ten)", "device-hours", "cost", "plan"):
        table.add_column(name, justify="left" if name in ("", "plan") else "right", no_wrap=True)
    for option in found.options:
        table.add_row(*map(printable, _row(option, option is found.recommended)))
    console.print(table, highlight=False, crop=False)
    line("")
    line(found.words, "bold")


def _row(option: Option, is_best: bool) -> tuple[str, ...]:
    where = "as it is" if option.is_measured else option.where or "these devices"
    return (
        f"{'* ' if is_best else '  '}{where}",
        str(option.devices),
        seconds(option.step_s.mid),
        within(option.left_s, seconds),
        count(option.device_hours.mid),
        f"{within(option.money, count)} {option.currency}" if option.money else "?",
        option.plan,
    )
