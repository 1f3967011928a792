"""The charts of a design space, as SVG files: the front, bottlenecks along a figure, a speed-up's factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720.0, 400.0, 80.0, 60.0, 40.0, 170.0
SERIES_COLOURS = ("#3b6fb6", "#c8553d", "#588157", "#e09f3e", "#7b5ea7", "#8d99ae", "#2a9d8f", "#b56576")
CHART_STYLE = "text{font:12px sans-serif;fill:#333}.title{font-size:14px;font-weight:bold}.axis{stroke:#888;fill:none}"


def scatter(title: str, x: tuple[str, Sequence[float]], y: tuple[str, Sequence[float]], names: Sequence[str]) -> str:
    """Return points on logarithmic axes; `names` are shown when a pointer rests on them."""
    to_x, x_ticks = _log_scale(x[1], LEFT, WIDTH - 30)
    to_y, y_ticks = _log_scale(y[1], HEIGHT - BOTTOM, TOP)
    parts = [_axes(x[0], y[0], WIDTH - 30)]
    parts += [_tick_x(to_x(value), f"{value:.3g}") for value in x_ticks]
    parts += [_tick_y(to_y(value), f"{value:.3g}") for value in y_ticks]
    for at_x, at_y, name in zip(x[1], y[1], names, strict=True):
        parts.append(
            f'<circle cx="{to_x(at_x):.1f}" cy="{to_y(at_y):.1f}" r="4" fill="{SERIES_COLOURS[0]}" fill-opacity="0.7">'
            f"<title>{escape(name)}</title></circle>"
        )
    return _svg(title, parts)


def stacked(title: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]], unit: str) -> str:
    """Return a bar for each label, of parts on top of each other."""
    most = max(sum(values[i] for values in parts.values()) for i in range(len(labels)))
    step = (WIDTH - RIGHT - LEFT) / len(labels)
    high, drawn = HEIGHT - BOTTOM - TOP, _from_zero_to(most, unit)
    for i, label in enumerate(labels):
        at, x = HEIGHT - BOTTOM, LEFT + i * step + 0.15 * step
        for colour, (name, values) in zip(_colours(parts), parts.items(), strict=True):
            size = high * values[i] / most
            at -= size
            drawn.append(
                f'<rect x="{x:.1f}" y="{at:.1f}" width="{0.7 * step:.1f}" height="{size:.1f}" fill="{colour}">'
                f"<title>{escape(f'{label}, {name}: {values[i]:.3g} {unit}')}</title></rect>"
            )
        drawn.append(_tick_x(x + 0.35 * step, label))
    return _svg(title, [*drawn, *_legend(list(parts))])


def lines(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str) -> str:
    """Return a line for each series over the labels, from 0 upwards."""
    most = max(max(values) for values in series.values()) or 1.0
    step = (WIDTH - RIGHT - LEFT) / max(1, len(labels))
    high, drawn = HEIGHT - BOTTOM - TOP, _from_zero_to(most, unit)
    drawn += [_tick_x(LEFT + (i + 0.5) * step, label) for i, label in enumerate(labels)]
    for colour, values in zip(_colours(series), series.values(), strict=True):
        points = " ".join(
            f"{LEFT + (i + 0.5) * step:.1f},{HEIGHT - BOTTOM - high * max(0.0, value) / most:.1f}"
            for i, value in enumerate(values)
        )
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
    return _svg(title, [*drawn, *_legend(list(series))])


def bars(title: str, values: dict[str, float]) -> str:
    """Return a horizontal bar for each factor, on a logarithmic axis from 1."""
    most = max(math.log(max(value, 1.0)) for value in values.values()) or 1.0
    row = (HEIGHT - TOP - 20) / len(values)
    parts = []
    for i, (name, value) in enumerate(values.items()):
        y, size = TOP + i * row, (WIDTH - 320) * math.log(max(value, 1.0)) / most
        parts.append(
            f'<text x="20" y="{y + row / 2 + 4:.1f}">{escape(name)}</text>'
            f'<rect x="160" y="{y + 6:.1f}" width="{max(size, 1):.1f}" height="{row - 12:.1f}" '
            f'fill="{SERIES_COLOURS[i % len(SERIES_COLOURS)]}"/>'
            f'<text x="{168 + max(size, 1):.1f}" y="{y + row / 2 + 4:.1f}">{value:.2f} x</text>'
        )
    return _svg(title, parts)


def _colours(parts: Mapping[str, Sequence[float]]) -> list[str]:
    return [SERIES_COLOURS[i % len(SERIES_COLOURS)] for i in range(len(parts))]


def _log_scale(values: Sequence[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    low, high = math.log10(min(values)) - 0.02, math.log10(max(values)) + 0.02

    def place(value: float) -> float:
        return begin + (end - begin) * (math.log10(value) - low) / (high - low)

    return place, [10 ** (low + 0.02 + (high - low - 0.04) * share) for share in (0, 1 / 3, 2 / 3, 1)]


def _axes(x: str, y: str, right: float) -> str:
    return (
        f'<path class="axis" d="M{LEFT} {TOP} V{HEIGHT - BOTTOM} H{right}"/>'
        f'<text x="{right}" y="{HEIGHT - 14}" text-anchor="end">{escape(x)}</text>'
        f'<text x="8" y="{TOP - 6}">{escape(y)}</text>'
    )


def _from_zero_to(most: float, unit: str) -> list[str]:
    """Return the axes of a chart whose values are 0 to `most`."""
    high = HEIGHT - BOTTOM - TOP
    ticks = [_tick_y(HEIGHT - BOTTOM - high * share, f"{share * most:.3g}") for share in (0, 0.25, 0.5, 0.75, 1)]
    return [_axes("", unit, WIDTH - RIGHT), *ticks]


def _tick_x(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(text)}</text>'


def _tick_y(y: float, text: str) -> str:
    return f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'


def _legend(names: Sequence[str]) -> list[str]:
    return [
        f'<rect x="{WIDTH - RIGHT + 14}" y="{TOP + 20 * i}" width="12" height="12" '
        f'fill="{SERIES_COLOURS[i % len(SERIES_COLOURS)]}"/>'
        f'<text x="{WIDTH - RIGHT + 32}" y="{TOP + 20 * i + 10}">{escape(name)}</text>'
        for i, name in enumerate(names)
    ]


def _svg(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img">'
        f'<style>{CHART_STYLE}</style><rect width="100%" height="100%" fill="white"/>'
        f'<text class="title" x="{WIDTH / 2}" y="18" text-anchor="middle">{escape(title)}</text>'
        f"{''.join(parts)}</svg>\n"
    )
