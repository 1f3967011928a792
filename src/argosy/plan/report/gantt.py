"""A schedule of jobs as a Gantt chart: in the terminal, and as a page of SVG that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from argosy.errors import counted
from argosy.plan.cost.estimate import DAY, HOUR, count, percent, seconds, within
from argosy.plan.report.html import document, table
from argosy.plan.report.jobs import JobSchedule, ScheduledJob, after_now
from argosy.plan.report.terminal import console_of, figures_table, line_printer

BARS = " ▁▂▃▄▅▆▇█"
"""A bar is as high as the job's share of the cluster."""
LEAST_BAR, MOST_BAR = 24, 100
"""Characters of the chart."""
HEADS = (
    *("job", "cluster", "devices", "begins", "takes", "ends (90 % interval)"),
    *("deadline", "in time", "late", "late costs"),
)
"""Columns of the table; the last one, the price of devices, is headed by the currency."""
WORDS = ("job", "cluster")
GANTT_WIDTH, GANTT_LABEL, GANTT_LAST, GANTT_ROW = 900, 150, 50, 34
"""Sizes of the page's chart in pixels: its width, room for names, for the last time's label, a row's height."""
LEGEND = "a bar is as high as the job's share of the cluster"
TICKS = (HOUR, 2 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 5 * DAY, 10 * DAY, 30 * DAY, 90 * DAY, 365 * DAY)


def show(found: JobSchedule, console: Console | None = None) -> None:
    """Print the chart, the figures of each job, and the commands by their time."""
    console = console_of(console)
    line = line_printer(console)
    names = max(len(job.name) for job in found.jobs)
    wide = max(LEAST_BAR, min(MOST_BAR, console.width - names - 4))
    span_s = _span_s(found)

    line(headline(found), "bold")
    for name, devices in found.clusters.items():
        line(f"\n{name}: {found.described[name]}, {percent(found.used[name])} used until {after_now(found.end_s)}")
        for job in (job for job in found.jobs if job.cluster == name):
            bar = Text(f"{job.name:<{names}}  ")
            bar.append(_bar(job, devices, span_s, wide), "red" if job.late_s else "blue")
            line(bar)
        line(f"{'':<{names}}  {_axis(span_s, wide)}", "dim")
    line(f"  |: the deadline; {LEGEND}\n", "dim")
    console.print(_figures(found), highlight=False, crop=False)
    line("\nCommands, for the clusters' own schedulers:")
    for text in _commands(found):
        line(text, "dim" if text.startswith("#") else "")


def _commands(found: JobSchedule) -> list[str]:
    """Return the lines of all commands, by their time."""
    commands = sorted((each for job in found.jobs for each in job.commands), key=lambda each: each.at_s)
    return [*found.once, *(line for each in commands for line in each.lines)]


def headline(found: JobSchedule) -> str:
    late = [job.name for job in found.jobs if job.late_s]
    money = ""
    if found.late_cost >= 0.5:
        money = f"; being late costs {count(found.late_cost)} {found.currency} on average"
    words = f"{len(late)} late: {', '.join(late)}" if late else "none late"
    return f"{counted(len(found.jobs), 'job')}, done at {after_now(found.end_s)}; {words}{money}"


def _bar(job: ScheduledJob, devices: int, span_s: float, wide: int) -> str:
    cells = [" "] * wide
    for stint in job.stints:
        first, last = int(stint.begin_s / span_s * wide), int(stint.end_s / span_s * wide)
        height = max(1, round(stint.devices / devices * (len(BARS) - 1)))
        cells[first : max(first + 1, last)] = [BARS[height]] * (max(first + 1, last) - first)
    if job.deadline_s is not None and job.deadline_s < span_s:
        cells[int(job.deadline_s / span_s * wide)] = "|"
    return "".join(cells[:wide])


def _axis(span_s: float, wide: int) -> str:
    cells = [" "] * (wide + 12)
    for at_s in _ticks(span_s):
        text, first = after_now(at_s) if at_s else "now", int(at_s / span_s * wide)
        cells[first : first + len(text)] = text
    return "".join(cells).rstrip()


def _ticks(span_s: float) -> list[float]:
    step_s = next((tick for tick in TICKS if span_s / tick <= 8), TICKS[-1])
    return [k * step_s for k in range(int(span_s / step_s) + 1)]


def _span_s(found: JobSchedule) -> float:
    """Return how long the chart is: all jobs, and deadlines that are not far beyond."""
    near = [job.deadline_s for job in found.jobs if job.deadline_s and job.deadline_s < 1.5 * found.end_s]
    return 1.02 * max([found.end_s, *near])


def _figures(found: JobSchedule) -> Table:
    figures = figures_table(*HEADS, found.currency, words=WORDS)
    for job in found.jobs:
        figures.add_row(*_row(job))
    return figures


def _row(job: ScheduledJob) -> tuple[str, ...]:
    return (
        job.name,
        job.cluster,
        ", ".join(dict.fromkeys(str(stint.devices) for stint in job.stints)),
        after_now(job.begin_s),
        seconds(job.stints[-1].end_s - job.begin_s),
        within(job.end_s, lambda value: after_now(float(value))),
        "-" if job.deadline_s is None else after_now(job.deadline_s),
        "-" if job.in_time is None else f"{100 * job.in_time:.0f} %",
        seconds(job.late_s) if job.late_s else "-",
        "-" if job.late_cost is None else count(job.late_cost),
        "?" if job.money is None else count(job.money),
    )


def page(found: JobSchedule) -> str:
    """Return the schedule as one HTML page."""
    title = headline(found)
    commands = escape("\n".join(_commands(found)))
    charts = "".join(
        f"<h2>{escape(name)}: {escape(found.described[name])}, {percent(found.used[name])} used</h2>"
        + _chart([job for job in found.jobs if job.cluster == name], devices, _span_s(found))
        for name, devices in found.clusters.items()
    )
    return document(
        title,
        f"<h1>{escape(title)}</h1>{charts}"
        f'<p class="quiet">A line before or behind a bar is its deadline; {LEGEND}.</p>'
        f"<h2>Jobs</h2>{table((*HEADS, found.currency), map(_row, found.jobs), WORDS)}"
        f"<h2>Commands, for the clusters' own schedulers</h2><pre>{commands}</pre>",
    )


def _chart(jobs: Sequence[ScheduledJob], devices: int, span_s: float) -> str:
    def x(at_s: float) -> float:
        return GANTT_LABEL + at_s / span_s * (GANTT_WIDTH - GANTT_LABEL - GANTT_LAST)

    parts, bottom = [], GANTT_ROW * len(jobs)
    for at_s in _ticks(span_s):
        parts.append(
            f'<line class="axis" x1="{x(at_s):.1f}" x2="{x(at_s):.1f}" y1="0" y2="{bottom}"/>'
            f'<text class="quiet" x="{x(at_s):.1f}" y="{bottom + 16}">{after_now(at_s)}</text>'
        )
    for row, job in enumerate(jobs):
        low = (row + 1) * GANTT_ROW - 4
        parts.append(f'<text x="0" y="{low - 8}">{escape(job.name)}</text>')
        for stint in job.stints:
            high = max(2.0, stint.devices / devices * (GANTT_ROW - 8))
            when = f"{after_now(stint.begin_s)} to {after_now(stint.end_s)}"
            says = f"{job.name}: {counted(stint.devices, 'device')}, {when}"
            parts.append(
                f'<g><title>{escape(says)}</title><rect class="{"loss" if job.late_s else "bar"}" '
                f'x="{x(stint.begin_s):.1f}" y="{low - high:.1f}" height="{high:.1f}" '
                f'width="{max(1.0, x(stint.end_s) - x(stint.begin_s)):.1f}"/></g>'
            )
        if job.deadline_s is not None and job.deadline_s <= span_s:
            at = x(job.deadline_s)
            parts.append(
                f"<g><title>{escape(job.name)}: deadline {after_now(job.deadline_s)}</title>"
                f'<line class="range" x1="{at:.1f}" x2="{at:.1f}" y1="{row * GANTT_ROW}" y2="{low}"/></g>'
            )
    return f'<svg viewBox="0 0 {GANTT_WIDTH} {bottom + 24}" width="{GANTT_WIDTH}" role="img">{"".join(parts)}</svg>'
