"""The planner's report as one HTML page: charts are drawn here as inline SVG, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from argosy.plan.cost.estimate import count, gib, percent, seconds, within
from argosy.plan.hardware.devices import GIB
from argosy.plan.report.explain import (
    MEANING,
    MEMORY_MEANING,
    burn_in_in_words,
    count_of_stops,
    shown_stops,
    spares_in_words,
    stops_in_words,
)
from argosy.plan.report.network import AXIS_COLUMNS, NetworkReport, axis_cells, network_in_words
from argosy.plan.report.report import PlanReport
from argosy.plan.report.terminal import LEAST_SHOWN, headline, prices, search_line, shares_in_words
from argosy.plan.search.candidates import Candidate
from argosy.plan.workload import Numbers

WIDTH, ROW, LABEL, VALUE = 760, 24, 120, 130
"""Sizes of a bar chart in pixels: its width, a row's height, room for names and for values."""
PLOT_WIDTH, PLOT_HEIGHT, MARGIN = 760, 340, 56

STYLE = """
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
        f"<style>{STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _facts(report: PlanReport) -> str:
    about = report.explanation
    choice, run = about.choice, about.choice.run
    rows = [
        ("step", f"{within(choice.step_s, seconds)}; {percent(choice.mfu)} MFU, {count(choice.tokens_per_s)} tokens/s"),
        ("memory", f"{within(choice.memory_bytes, gib)} of {gib(report.memory_bytes)} GiB"),
        ("whole run", f"{within(run.time_s, seconds)}; {within(run.device_hours, count)} device-hours"),
        (
            "failures",
            f"one in {within(about.failures.mtbf_s, seconds)}; {within(about.failures.effective, percent)} of the time "
            f"is productive; {stops_in_words(about.reliability)}",
        ),
        (
            "against them",
            f"save every {within(about.failures.interval_s, seconds)}, in-memory checkpoint every "
            f"{seconds(about.failures.copy_interval_s)}; {spares_in_words(about.reliability)}; "
            f"{burn_in_in_words(about.reliability.burn_in)}",
        ),
    ]
    if run.money:
        rows.append(("cost", f"{within(run.money, count)} {report.currency} {prices(report)}".rstrip()))
    if run.energy_kwh and run.co2_kg:
        rows.append(("energy", f"{within(run.energy_kwh, count)} kWh, {within(run.co2_kg, count)} kg CO2"))
    missing = ""
    if about.misfit:
        near = f" The nearest that fits: <code>{escape(about.near.plan)}</code>." if about.near else ""
        missing = (
            f'<p class="bad">It does not fit: {gib(about.misfit.excess_bytes)} GiB too much, most of it '
            f"{escape(about.misfit.largest)} ({gib(about.misfit.largest_bytes)} GiB).{near}</p>"
        )
    table = "".join(f'<tr><th class="text">{n}</th><td class="text">{escape(v)}</td></tr>' for n, v in rows)
    return f"<p><code>{_breakable(choice.plan)}</code></p>{missing}<table>{table}</table>"


def _waterfall(values: dict[str, float]) -> str:
    """Return bars each of which begins where the one before ends."""
    whole = sum(values.values())
    scale = (WIDTH - LABEL - VALUE) / whole
    shown = {name: value for name, value in values.items() if value > LEAST_SHOWN * whole}
    parts, at = [], 0.0
    for i, (name, value) in enumerate([*shown.items(), ("predicted", whole)]):
        begin = 0.0 if name == "predicted" else at
        kind = "bar" if name == "predicted" else "ideal" if name == "ideal" else "loss"
        text = f"{seconds(value)}, {percent(value / whole)}"
        parts.append(_bar(i, name, begin * scale, value * scale, text, kind, MEANING.get(name, "all of it")))
        at += value
    return _svg(WIDTH, ROW * (len(shown) + 1), parts)


def _network(found: NetworkReport | None) -> list[str]:
    """Return where ranks are on the network, if its topology is known."""
    if found is None or not found.axes:
        return []
    kinds = ["" if is_number else ' class="text"' for is_number in AXIS_COLUMNS.values()]

    def row(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    rows = "".join(f"<tr>{row('td', axis_cells(axis))}</tr>" for axis in found.axes)
    table = f'<div class="wide"><table><tr>{row("th", tuple(AXIS_COLUMNS))}</tr>{rows}</table></div>'
    return [f"<h2>Where ranks are</h2><p>{escape(network_in_words(found))}</p>{table}"]


def _bars(values: dict[str, float], meaning: dict[str, str], write: Callable[[Numbers], str]) -> str:
    whole, longest = sum(values.values()), max(values.values())
    shown = {name: value for name, value in values.items() if value > LEAST_SHOWN * whole}
    scale = (WIDTH - LABEL - VALUE) / longest
    parts = [
        _bar(i, name, 0.0, value * scale, f"{write(value)}, {percent(value / whole)}", "bar", meaning[name])
        for i, (name, value) in enumerate(shown.items())
    ]
    return _svg(WIDTH, ROW * len(shown), parts)


def _sensitivities(report: PlanReport) -> str:
    changes = report.explanation.sensitivities
    label = 230
    longest = max(1e-9, *(abs(change.change) for change in changes))
    scale = (WIDTH - label - VALUE) / longest
    parts = [
        _bar(i, c.what, 0.0, abs(c.change) * scale, percent(c.change, signed=True), "ideal", c.note or c.what, label)
        for i, c in enumerate(changes)
    ]
    return _svg(WIDTH, ROW * len(changes), parts)


def _bar(
    row: int, name: str, begin: float, length: float, text: str, kind: str, title: str, label: float = LABEL
) -> str:
    y = row * ROW
    return (
        f'<g><title>{escape(title)}</title><text x="0" y="{y + 16}">{escape(name)}</text>'
        f'<rect class="{kind}" x="{label + begin:.1f}" y="{y + 4}" width="{max(length, 1):.1f}" height="{ROW - 8}"/>'
        f'<text class="quiet" x="{label + begin + max(length, 1) + 6:.1f}" y="{y + 16}">{escape(text)}</text></g>'
    )


def _scatter(report: PlanReport) -> str:
    """Return a chart of step time against memory with their intervals, for the plans of both tables."""
    points = list({choice.plan: choice for choice in (*report.pareto, *report.choices)}.values())
    most_s = max(float(p.step_s.high) for p in points)
    most_gib = max(report.memory_bytes, *(float(p.memory_bytes.high) for p in points)) / GIB
    wide, high = PLOT_WIDTH - 2 * MARGIN, PLOT_HEIGHT - 2 * MARGIN

    def x(value: Numbers) -> float:
        return MARGIN + wide * float(value) / GIB / most_gib

    def y(value: Numbers) -> float:
        return MARGIN + high * (1 - float(value) / most_s)

    limit = x(report.memory_bytes)
    parts = [
        f'<line class="axis" x1="{MARGIN}" y1="{y(0):.1f}" x2="{MARGIN + wide}" y2="{y(0):.1f}"/>',
        f'<line class="axis" x1="{MARGIN}" y1="{MARGIN}" x2="{MARGIN}" y2="{y(0):.1f}"/>',
        f'<line class="range" stroke-dasharray="4 4" x1="{limit:.1f}" y1="{MARGIN}" x2="{limit:.1f}" y2="{y(0):.1f}"/>',
        f'<text class="quiet" x="{limit:.1f}" y="{MARGIN - 8}" text-anchor="end">the device has '
        f"{gib(report.memory_bytes)} GiB</text>",
        f'<text class="quiet" x="{MARGIN + wide}" y="{PLOT_HEIGHT - 12}" text-anchor="end">memory, GiB</text>',
        f'<text class="quiet" x="{MARGIN}" y="{MARGIN - 8}">step</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        time, at_x, at_y = share * most_s, x(share * most_gib * GIB), y(share * most_s)
        parts.append(
            f'<text class="quiet" x="{at_x:.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">{share * most_gib:.0f}</text>'
            f'<text class="quiet" x="{MARGIN - 6}" y="{at_y + 4:.1f}" text-anchor="end">{seconds(time)}</text>'
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


def _breakable(plan: str) -> str:
    """Return a plan's text that may be broken after each comma."""
    return escape(plan).replace(",", ",<wbr>")


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    inner = "".join(parts)
    return f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img">{inner}</svg>'


def _choices(report: PlanReport, choices: Sequence[Candidate]) -> str:
    heads = ("step", "GiB", "MFU", "tokens/s", "devices", "run", report.currency, "kWh")
    head = '<th class="text">plan</th>' + "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = []
    for choice in choices:
        run = choice.run
        cells = (
            within(choice.step_s, seconds),
            within(choice.memory_bytes, gib),
            percent(choice.mfu),
            count(choice.tokens_per_s),
            str(choice.devices),
            seconds(run.time_s.mid),
            within(run.money, count) if run.money else "?",
            within(run.energy_kwh, count) if run.energy_kwh else "?",
        )
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body.append(f'<tr><td class="text"><code>{_breakable(choice.plan)}</code></td>{row}</tr>')
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _stops(report: PlanReport) -> str:
    rows = "".join(
        f'<tr><th class="text">{escape(each.called)}</th><td>{count_of_stops(each.expected)}</td>'
        f"<td>{each.low:.0f} to {each.high:.0f}</td></tr>"
        for each in shown_stops(report.explanation.reliability.components)
    )
    return f'<table><tr><th class="text">component</th><th>expected</th><th>nine times of ten</th></tr>{rows}</table>'


def _outlooks(report: PlanReport) -> list[str]:
    parts = []
    if report.uneven:
        lines = "".join(
            f"<li>{seconds(split.step_s)} a step with <code>{escape(split.plan)}</code>: "
            f"{escape(shares_in_words(split))}</li>"
            for split in report.uneven
        )
        parts.append(f"<h2>Work dealt out by the speed of devices</h2><ul>{lines}</ul>")
    if report.exchanges:
        rows = "".join(
            f"<tr><td>{e.inner_steps}</td><td>{e.bytes_per_step / GIB:.3g}</td><td>{seconds(e.step_s)}</td>"
            f'<td class="text"><code>{_breakable(e.plan)}</code></td></tr>'
            for e in report.exchanges
        )
        parts.append(
            "<h2>Sites that sum gradients in every step (H = 1), or agree every H steps (sync=diloco)</h2>"
            f"<table><tr><th>H</th><th>GiB a step and site</th><th>step</th><th>plan</th></tr>{rows}</table>"
        )
    return parts
