"""The plot of a sweep: an SVG with a panel for the trials in their order, and one for each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from argosy.sweep.load import Sweep
from argosy.sweep.space import SweepParameter, short
from argosy.sweep.study import Trial

WIDTH, HEIGHT, MARGIN, GAP = 300, 220, 56, 18
COLUMNS = 3
DOT = 4
COLOURS = {"done": "#2563eb", "stopped": "#94a3b8", "best": "#ea580c"}
PADDING = 0.05
"""Share of an axis that is left free at each end."""
MOST_TICKS = 6
WIDE_RATIO = 20
"""Numbers of a list that are so far apart stand on a logarithmic axis."""


@dataclass(frozen=True)
class Axis:
    """An axis of a panel: positions from 0 to 1, and what is written at some of them."""

    low: float
    high: float
    is_log: bool = False
    values: tuple[float, ...] = ()
    """Values that are written; empty: both ends and the middle."""
    names: tuple[str, ...] = ()
    """Names of values that are no numbers, in order; they stand at 0, 1, 2, ..."""

    def place(self, value: float) -> float:
        """Return where a value stands, 0 to 1."""
        low, high, at = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        return PADDING + (1 - 2 * PADDING) * (at - low) / (high - low) if high > low else 0.5

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """(place, text) of what is written."""
        if self.names:
            return [(self.place(at), name) for at, name in enumerate(self.names)]
        if self.values:
            return [(self.place(value), f"{value:.3g}") for value in self.values]
        middle = math.sqrt(self.low * self.high) if self.is_log else (self.low + self.high) / 2
        return [(self.place(v), f"{v:.3g}") for v in dict.fromkeys((self.low, middle, self.high))]


def plot(sweep: Sweep, trials: Sequence[Trial], best: Trial | None) -> str:
    """Return the SVG. Trials that failed, or have no metric yet, are left out."""
    shown = [trial for trial in trials if trial.metric is not None and trial.state in ("done", "stopped")]
    metric = sweep.config.metric
    y = _axis([trial.metric for trial in shown if trial.metric is not None])
    panels = [_panel("trial", metric, _axis([float(t.number) for t in trials]), y,
                     [(float(t.number), t) for t in shown], best)]  # fmt: skip
    for parameter in sweep.parameters:
        x = _axis_of(parameter)
        panels.append(_panel(parameter.key, metric, x, y, [(_x(parameter, x, t), t) for t in shown], best))
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width, height = columns * (WIDTH + MARGIN + GAP), rows * (HEIGHT + MARGIN + GAP) + 24
    placed = [
        f'<g transform="translate({at % columns * (WIDTH + MARGIN + GAP) + MARGIN},'
        f'{at // columns * (HEIGHT + MARGIN + GAP) + 36})">{panel}</g>'
        for at, panel in enumerate(panels)
    ]
    title = escape(f"sweep {sweep.config.name}: {sweep.config.direction} {metric}")
    if any(trial.state == "stopped" for trial in shown):
        title += " (grey: not promoted, at its last rung)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="20" font-size="14">{title}</text>{"".join(placed)}</svg>\n'
    )


def _panel(name: str, metric: str, x: Axis, y: Axis, points: Sequence[tuple[float, Trial]], best: Trial | None) -> str:
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#cbd5e1"/>']
    for at, text in x.ticks:
        parts.append(
            f'<text x="{at * WIDTH:.1f}" y="{HEIGHT + 14}" text-anchor="middle" fill="#475569">{escape(text)}</text>'
        )
    for at, text in y.ticks:
        down = (1 - at) * HEIGHT
        parts.append(f'<text x="-5" y="{down + 4:.1f}" text-anchor="end" fill="#475569">{escape(text)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 30}" text-anchor="middle">{escape(name)}</text>')
    ordered = sorted(points, key=lambda point: best is not None and point[1].number == best.number)
    for value, trial in ordered:
        assert trial.metric is not None
        is_best = best is not None and trial.number == best.number
        colour = COLOURS["best" if is_best else trial.state]
        about = escape(f"trial {trial.number:04d}: {metric} {trial.metric:.6g}, {name} {short(value)}")
        parts.append(
            f'<circle cx="{x.place(value) * WIDTH:.1f}" cy="{(1 - y.place(trial.metric)) * HEIGHT:.1f}" '
            f'r="{DOT + 2 * is_best}" fill="{colour}" fill-opacity="0.8"><title>{about}</title></circle>'
        )
    return "".join(parts)


def _axis(values: Sequence[float]) -> Axis:
    """Return an axis that all these values stand on."""
    return Axis(min(values), max(values)) if values else Axis(0.0, 1.0)


def _axis_of(parameter: SweepParameter) -> Axis:
    if not parameter.is_list:
        return Axis(parameter.low, parameter.high, parameter.log)
    numbers = _numbers(parameter)
    if not numbers:
        return Axis(0.0, max(1.0, len(parameter.values) - 1.0), names=tuple(short(v) for v in parameter.values))
    low, high = min(numbers), max(numbers)
    written = tuple(sorted(numbers)) if len(numbers) <= MOST_TICKS else ()
    return Axis(low, high, low > 0 and high / low >= WIDE_RATIO, written)


def _numbers(parameter: SweepParameter) -> list[float]:
    """Return the values of a list if all are numbers; else none."""
    found = [float(v) for v in parameter.values if isinstance(v, int | float) and not isinstance(v, bool)]
    return found if len(found) == len(parameter.values) else []


def _x(parameter: SweepParameter, axis: Axis, trial: Trial) -> float:
    value = trial.values[parameter.key]
    return float(parameter.values.index(value)) if axis.names else float(value)
