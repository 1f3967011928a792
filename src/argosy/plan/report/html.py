"""The planner's report as one HTML page: charts are drawn here as inline SVG, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape

from argosy.plan.cost.estimate import count, gib, percent, seconds, within
from argosy.plan.hardware.devices import GIB
from argosy.plan.report.explain import MEANING, MEMORY_MEANING, burn_in_in_words, shown_stops, stops_in_words
from argosy.plan.report.network import AXIS_COLUMNS, NetworkReport, axis_cells, network_in_words
from argosy.plan.report.report import PlanReport, figures_of
from argosy.plan.report.terminal import LEAST_SHOWN, facts, headline, search_line, shares_in_words, stop_cells, why_not
from argosy.plan.search.candidates import Candidate
from argosy.plan.workload import Numbers

BARS_WIDTH, BAR_ROW, BAR_LABEL, BAR_VALUE = 760, 24, 120, 130
"""Sizes of a bar chart in pixels: its width, a row's height, room for names and for values."""
PLOT_WIDTH, PLOT_HEIGHT, PLOT_MARGIN = 760, 340, 56

REPORT_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --quiet: #5d6776; --paper: #fcfcfb; --line: #d9dde3;
  --bar: #2f6fb2; --ideal: #3d8b57; --mark: #c4552d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --quiet: #97a1b0; --paper: #14181e; --line: #323a45;
  --bar: #6aa5e2; --ideal: #6fbf8b; --mark: #f0875c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2.2rem; }
.quiet { color: var(--quiet); } .bad { color: var(--mark); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; }
td, th { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
td.text, th.text { text-align: left; } td.text { white-space: normal; min-width: 14rem; } code { font-size: 12px; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg .quiet { fill: var(--quiet); font-size: 12px; } svg .axis { stroke: var(--line); }
.bar { fill: var(--bar); } .ideal { fill: var(--ideal); } .loss { fill: var(--mark); } .point { fill: var(--bar); }
.chosen { fill: var(--mark); } .range { stroke: var(--quiet); }
"""


def page(report: PlanReport) -> str:
    about = report.explanation
    sections = [
        f"<h1>{escape(headline(report))}</h1>",
        *(f'<p class="quiet">{escape(line)}</p>' for line in (*report.assumed, *report.notes)),
        _facts(report),
        "<h2>Where a step's time goes</h2>" + _waterfall(about.waterfall),
        *_network(report.network),
        "<h2>Memory of the rank that needs most</h2>" + _bars(about.memory, MEMORY_MEANING, lambda b: f"{gib(b)} GiB"),
        f"<h2>What would change the step time: most of all, {escape(about.binding)}</h2>" + _sensitivities(report),
    ]
    if report.choices:
        sections += [f"<h2>{escape(search_line(report))}</h2>" + _choices(report, report.choices)]
    if report.pareto:
        sections += ["<h2>Step time against memory: no other plan is better in both</h2>" + _scatter(report)]
        sections += [_choices(report, report.pareto)]
    sections += ["<h2>What stops the whole run</h2>" + _stops(report), *_outlooks(report)]
    return document(headline(report), "\n" + "\n".join(sections) + "\n")


def document(title: str, body: str) -> str:
    """Return a whole page that loads nothing from elsewhere."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{REPORT_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[str] = ()) -> str:
    """Return a table whose columns `words` are texts, and the others figures; a plan may be broken after each comma."""
    kinds = [' class="text"' if head in words else "" for head in heads]

    def row(tag: str, cells: Sequence[str]) -> str:
        texts = [
            _code(cell) if head == "plan" and tag == "td" else escape(cell)
            for head, cell in zip(heads, cells, strict=True)
        ]
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    lines = [row("th", heads), *(row("td", cells) for cells in rows)]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _facts(report: PlanReport) -> str:
    about = report.explanation
    missing = f'<p class="bad">It {escape(why_not(about))}.</p>' if about.misfit else ""
    speed = "speed", f"{percent(about.choice.mfu)} MFU", f"{count(about.choice.tokens_per_s)} tokens/s"
    heads = ("of the plan", "figure", "note")
    return f"<p>{_code(about.choice.plan)}</p>{missing}{table(heads, (speed, *facts(report)), heads)}"


def _waterfall(values: dict[str, float]) -> str:
    """Return bars each of which begins where the one before ends."""
    whole = sum(values.values())
    scale = (BARS_WIDTH - BAR_LABEL - BAR_VALUE) / whole
    shown = {name: value for name, value in values.items() if value > LEAST_SHOWN * whole}
    parts, at = [], 0.0
    for i, (name, value) in enumerate([*shown.items(), ("predicted", whole)]):
        begin = 0.0 if name == "predicted" else at
        kind = "bar" if name == "predicted" else "ideal" if name == "ideal" else "loss"
        text = f"{seconds(value)}, {percent(value / whole)}"
        parts.append(_bar(i, name, begin * scale, value * scale, text, kind, MEANING.get(name, "all of it")))
        at += value
    return _svg(BARS_WIDTH, BAR_ROW * (len(shown) + 1), parts)


def _network(found: NetworkReport | None) -> list[str]:
    """Return where ranks are on the network, if its topology is known."""
    if found is None or not found.axes:
        return []
    words = [name for name, is_number in AXIS_COLUMNS.items() if not is_number]
    axes = table(tuple(AXIS_COLUMNS), map(axis_cells, found.axes), words)
    return [f"<h2>Where ranks are</h2><p>{escape(network_in_words(found))}</p>{axes}"]


def _bars(values: dict[str, float], meaning: dict[str, str], write: Callable[[Numbers], str]) -> str:
    whole, longest = sum(values.values()), max(values.values())
    shown = {name: value for name, value in values.items() if value > LEAST_SHOWN * whole}
    scale = (BARS_WIDTH - BAR_LABEL - BAR_VALUE) / longest
    parts = [
        _bar(i, name, 0.0, value * scale, f"{write(value)}, {percent(value / whole)}", "bar", meaning[name])
        for i, (name, value) in enumerate(shown.items())
    ]
    return _svg(BARS_WIDTH, BAR_ROW * len(shown), parts)


def _sensitivities(report: PlanReport) -> str:
    changes = report.explanation.sensitivities
    label = 230
    longest = max(1e-9, *(abs(change.change) for change in changes))
    scale = (BARS_WIDTH - label - BAR_VALUE) / longest
    parts = [
        _bar(i, c.what, 0.0, abs(c.change) * scale, percent(c.change, signed=True), "ideal", c.note or c.what, label)
        for i, c in enumerate(changes)
    ]
    return _svg(BARS_WIDTH, BAR_ROW * len(changes), parts)


def _bar(
    row: int, name: str, begin: float, length: float, text: str, kind: str, title: str, label: float = BAR_LABEL
) -> str:
    y = row * BAR_ROW
    return (
        f'<g><title>{escape(title)}</title><text x="0" y="{y + 16}">{escape(name)}</text>'
        f'<rect class="{kind}" x="{label + begin:.1f}" y="{y + 4}" width="{max(length, 1):.1f}" '
        f'height="{BAR_ROW - 8}"/>'
        f'<text class="quiet" x="{label + begin + max(length, 1) + 6:.1f}" y="{y + 16}">{escape(text)}</text></g>'
    )


def _scatter(report: PlanReport) -> str:
    """Return a chart of step time against memory with their intervals, for the plans of both tables."""
    points = list({choice.plan: choice for choice in (*report.pareto, *report.choices)}.values())
    most_s = max(float(p.step_s.high) for p in points)
    most_gib = max(report.memory_bytes, *(float(p.memory_bytes.high) for p in points)) / GIB
    wide, high = PLOT_WIDTH - 2 * PLOT_MARGIN, PLOT_HEIGHT - 2 * PLOT_MARGIN

    def x(value: Numbers) -> float:
        return PLOT_MARGIN + wide * float(value) / GIB / most_gib

    def y(value: Numbers) -> float:
        return PLOT_MARGIN + high * (1 - float(value) / most_s)

    limit = x(report.memory_bytes)
    parts = [
        f'<line class="axis" x1="{PLOT_MARGIN}" y1="{y(0):.1f}" x2="{PLOT_MARGIN + wide}" y2="{y(0):.1f}"/>',
        f'<line class="axis" x1="{PLOT_MARGIN}" y1="{PLOT_MARGIN}" x2="{PLOT_MARGIN}" y2="{y(0):.1f}"/>',
        f'<line class="range" stroke-dasharray="4 4" x1="{limit:.1f}" y1="{PLOT_MARGIN}" x2="{limit:.1f}" '
        f'y2="{y(0):.1f}"/>',
        f'<text class="quiet" x="{limit:.1f}" y="{PLOT_MARGIN - 8}" text-anchor="end">the device has '
        f"{gib(report.memory_bytes)} GiB</text>",
        f'<text class="quiet" x="{PLOT_MARGIN + wide}" y="{PLOT_HEIGHT - 12}" text-anchor="end">memory, GiB</text>',
        f'<text class="quiet" x="{PLOT_MARGIN}" y="{PLOT_MARGIN - 8}">step</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        time, at_x, at_y = share * most_s, x(share * most_gib * GIB), y(share * most_s)
        parts.append(
            f'<text class="quiet" x="{at_x:.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">{share * most_gib:.0f}</text>'
            f'<text class="quiet" x="{PLOT_MARGIN - 6}" y="{at_y + 4:.1f}" text-anchor="end">{seconds(time)}</text>'
        )
    chosen = report.explanation.choice.plan
    parts += [_point(p, x, y, p.plan == chosen) for p in points]
    return _svg(PLOT_WIDTH, PLOT_HEIGHT, parts)


def _point(choice: Candidate, x: Callable[[Numbers], float], y: Callable[[Numbers], float], chosen: bool) -> str:
    at_x, at_y = x(choice.memory_bytes.mid), y(choice.step_s.mid)
    left, right = x(choice.memory_bytes.low), x(choice.memory_bytes.high)
    title = f"{choice.plan}: {seconds(choice.step_s.mid)}, {gib(choice.memory_bytes.mid)} GiB"
    return (
        f"<g><title>{escape(title)}</title>"
        f'<line class="range" stroke-opacity=".35" x1="{at_x:.1f}" x2="{at_x:.1f}" y1="{y(choice.step_s.low):.1f}" '
        f'y2="{y(choice.step_s.high):.1f}"/>'
        f'<line class="range" stroke-opacity=".35" y1="{at_y:.1f}" y2="{at_y:.1f}" x1="{left:.1f}" x2="{right:.1f}"/>'
        f'<circle class="{"chosen" if chosen else "point"}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="5"/></g>'
    )


def _code(plan: str) -> str:
    """Return a plan's text, which may be broken after each comma."""
    return f"<code>{escape(plan).replace(',', ',<wbr>')}</code>"


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    inner = "".join(parts)
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img">{inner}</svg>'


def _choices(report: PlanReport, choices: Sequence[Candidate]) -> str:
    rows = ((choice.plan, *figures_of(choice, within)) for choice in choices)
    return table(("plan", *report.columns), rows, words=("plan",))


def _stops(report: PlanReport) -> str:
    about = report.explanation.reliability
    stops = table(
        ("component", "expected", "90 % interval"), map(stop_cells, shown_stops(about.components)), ("component",)
    )
    return f"<p>{stops_in_words(about)}. By the catalogue {burn_in_in_words(about.burn_in)}.</p>{stops}"


def _outlooks(report: PlanReport) -> list[str]:
    parts = []
    if report.uneven:
        lines = "".join(
            f"<li>{seconds(split.step_s)} a step with {_code(split.plan)}: {escape(shares_in_words(split))}</li>"
            for split in report.uneven
        )
        parts.append(f"<h2>Work dealt out by the speed of devices</h2><ul>{lines}</ul>")
    if report.exchanges:
        rows = (
            (str(way.inner_steps), f"{way.bytes_per_step / GIB:.3g}", seconds(way.step_s), way.plan)
            for way in report.exchanges
        )
        parts.append(
            "<h2>Sites that sum gradients in every step (H = 1), or agree every H steps (sync=diloco)</h2>"
            + table(("H", "GiB a step and site", "step", "plan"), rows, words=("plan",))
        )
    return parts
