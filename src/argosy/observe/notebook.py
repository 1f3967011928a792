"""A notebook's cell in which a run is shown: a progress bar, curves drawn as SVG here, and the last messages."""

from __future__ import annotations

import html
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from argosy.observe.panel import figures, one_line
from argosy.observe.run_view import RunView
from argosy.observe.screen import Line

WIDTH, HEIGHT = 640, 180
"""Size of the curves, in pixels."""
LEFT, BOTTOM = 44, 18
"""Room for the numbers at the axes, in pixels."""
MOST_POINTS = 600
MESSAGES = 6
"""Last messages that stand below the curves."""
LOSS, VALIDATION = "#1f77b4", "#ff7f0e"


def is_in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook, which can show more than text."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookSurface:
    """The output of the cell that runs now; it is replaced as the run goes on."""

    def __init__(self) -> None:
        display = import_module("IPython.display").display  # there, since this is its kernel
        self._messages: deque[str] = deque(maxlen=MESSAGES)
        self._handle: Any = display(_Html(), display_id=True)
        self._view, self._last = RunView(), ""

    def show(self, lines: list[Line], view: RunView) -> None:
        """Show the run as it is now, with the last messages."""
        self._messages.extend(text for text, _ in lines)
        if view.record:
            self._view = view
        self._update(replace(self._view, doing=view.doing), self._messages)

    def close(self, lines: list[Line], view: RunView, is_told: bool) -> None:
        """Leave the curves, and print the last messages below them as text."""
        self._update(replace(view, doing=""), ())
        for text in (*self._messages, *(text for text, _ in lines)):
            print(text)

    def _update(self, view: RunView, messages: Iterable[str]) -> None:
        page = in_html(view, messages)
        if page != self._last:
            self._last = page
            self._handle.update(_Html(page, one_line(view).plain))


class _Html:
    """What IPython shows as HTML, or as text where there is no HTML."""

    def __init__(self, page: str = "", text: str = ""):
        self._page, self._text = page, text

    def _repr_html_(self) -> str:
        return self._page

    def __repr__(self) -> str:
        return self._text


def in_html(view: RunView, messages: Iterable[str]) -> str:
    """Return the run at one moment as a piece of HTML, which needs nothing from elsewhere."""
    step = f"step {view.step}/{view.steps or '?'}" if view.record else ""
    what = f" <i>{html.escape(view.doing)}</i>" if view.doing else ""
    text = (
        f"<b>{html.escape(view.name)}</b> {step}{html.escape(figures(view.record, view.validation_loss, view.left_s))}"
    )
    bar = f'<progress value="{view.step}" max="{view.steps or 1}" style="width:{WIDTH}px"></progress>'
    words = "".join(f"<div>{html.escape(message)}</div>" for message in messages)
    said = f'<div style="font-family:monospace;white-space:pre-wrap">{words}</div>' if words else ""
    shown = f"{bar}{curves(view)}" if view.record else ""
    return f"<div>{text}{what}</div>{shown}{said}"


def curves(view: RunView) -> str:
    """Return the curves of the losses as SVG; "" before there are two points."""
    lines = [(_thinned(view.losses), LOSS, "loss"), (list(view.validation), VALIDATION, "validation")]
    points = [point for line, _, _ in lines for point in line]
    if len(view.losses) < 2:
        return ""
    x0, x1 = view.losses[0][0], view.losses[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    width, height = WIDTH - LEFT - 8, HEIGHT - BOTTOM - 8

    def place(x: float, y: float) -> str:
        across = (x - x0) / max(1, x1 - x0)
        up = (y - low) / (high - low) if high > low else 0.5
        return f"{LEFT + width * min(1.0, max(0.0, across)):.1f},{8 + height * (1 - up):.1f}"

    drawn, key = [], []
    for at, (line, colour, name) in enumerate(lines):
        path = " ".join(itertools.starmap(place, line))
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        key.append(f'<text x="{WIDTH - 150 + 60 * at}" y="16" fill="{colour}">{name}</text>')
    labels = [
        (LEFT - 4, 14, "end", f"{high:.2f}"), (LEFT - 4, HEIGHT - BOTTOM, "end", f"{low:.2f}"),
        (LEFT, HEIGHT - 4, "start", str(x0 + 1)), (WIDTH - 8, HEIGHT - 4, "end", str(x1 + 1)),
    ]  # fmt: skip
    axes = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#888">{label}</text>' for x, y, anchor, label in labels
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11">{axes}{"".join(drawn)}{"".join(key if view.validation else key[:1])}</svg>'
    )


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most about MOST_POINTS points, each the mean of its neighbours."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
