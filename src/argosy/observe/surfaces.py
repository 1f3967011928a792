"""A terminal in which a run is shown: lines that stay, and below them the panel, or one line where it has no room.

Each frame is one write: the cursor goes up to the panel's first line, lines are written over, the rest is erased, and
the cursor rests below the panel. So no state is left in the terminal when the process is killed at any moment: no
hidden cursor, no other screen, no scrolling region (rich's `Live` hides the cursor). The shell's prompt then stands
below the last frame.
"""

from __future__ import annotations

import html
import io
import itertools
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from argosy.observe.panel import RunView, figures, fits, one_line, panel
from argosy.observe.screen import Line

UP, ERASE_LINE_END, ERASE_BELOW = "\x1b[{}A", "\x1b[K", "\x1b[J"
"""ECMA-48: CUU, EL 0, ED 0."""
AWAY_S = 5.0
"""After so long without a frame the process was stopped, and the shell has printed below: the panel is drawn anew."""


class TerminalSurface:
    """The terminal that `stream` writes to."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._drawn: list[str] = []
        """The lines of the last frame as they stand in the terminal, below which the cursor is."""
        self._drawn_at = time.monotonic()
        self._last_frame = ""

    def show(self, lines: list[Line], view: RunView) -> None:
        """Print lines that stay, and draw the run below them."""
        if not self._is_in_foreground():
            self._drawn = []
            self._print(lines)
            return
        size = shutil.get_terminal_size()
        frame = [] if view == RunView() else self._frame(view, size)
        self._write(lines, frame, size)

    def close(self, lines: list[Line], view: RunView, is_told: bool) -> None:
        """Print the last lines; of the panel one line stays above them."""
        last = [] if is_told or not view.record else [(one_line(replace(view, doing="")).plain, "bold")]
        self._write([*last, *lines], [], shutil.get_terminal_size())

    def _frame(self, view: RunView, size: os.terminal_size) -> list[Text]:
        is_unicode = self._stream.encoding.lower().replace("-", "").startswith("utf")
        if fits(*size) and view.name and view.record and is_unicode:
            return panel(view, *size)
        line = one_line(view)
        line.truncate(size.columns - 1, overflow="ellipsis")
        return [line] if line.plain else []

    def _write(self, lines: list[Line], frame: list[Text], size: os.terminal_size) -> None:
        now = time.monotonic()
        if now - self._drawn_at > AWAY_S:
            self._drawn, self._last_frame = [], ""
        out, console = io.StringIO(), self._console(size)
        if up := self._rows(size.columns):
            out.write(UP.format(up))
        out.write("\r")
        for text, style in lines:
            for part in self._rendered(console, Text(text, style)).split("\n"):
                out.write(f"{part}{ERASE_LINE_END}\n")
        for line in frame:
            out.write(f"{self._rendered(console, line)}{ERASE_LINE_END}\n")
        out.write(ERASE_BELOW)
        self._drawn, self._drawn_at = [line.plain for line in frame], now
        if lines or out.getvalue() != self._last_frame:
            self._last_frame = out.getvalue()
            self._stream.write(self._last_frame)
            self._stream.flush()

    def _print(self, lines: list[Line]) -> None:
        for text, _ in lines:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def _rows(self, columns: int) -> int:
        """Return how many rows the last frame takes: terminals break its lines anew when they become narrower."""
        return sum(max(1, -(-cell_len(line) // columns)) for line in self._drawn)

    def _console(self, size: os.terminal_size) -> Console:
        return Console(file=io.StringIO(), force_terminal=True, width=size.columns, highlight=False, emoji=False)

    @staticmethod
    def _rendered(console: Console, text: Text) -> str:
        with console.capture() as captured:
            console.print(text, end="", soft_wrap=True)
        return captured.get()

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return True


CURVE_WIDTH, CURVE_HEIGHT = 640, 180
"""Size of the curves, in pixels."""
CURVE_LEFT, CURVE_BOTTOM = 44, 18
"""Room for the numbers at the axes, in pixels."""
SVG_POINTS = 600
MESSAGES_SHOWN = 6
"""Last messages that stand below the curves."""
LOSS_STROKE, VALIDATION_STROKE = "#1f77b4", "#ff7f0e"


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
        self._messages: deque[str] = deque(maxlen=MESSAGES_SHOWN)
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
    """A display object for IPython: HTML, or text where there is no HTML."""

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
    bar = f'<progress value="{view.step}" max="{view.steps or 1}" style="width:{CURVE_WIDTH}px"></progress>'
    words = "".join(f"<div>{html.escape(message)}</div>" for message in messages)
    said = f'<div style="font-family:monospace;white-space:pre-wrap">{words}</div>' if words else ""
    shown = f"{bar}{curves(view)}" if view.record else ""
    return f"<div>{text}{what}</div>{shown}{said}"


def curves(view: RunView) -> str:
    """Return the curves of the losses as SVG; "" before there are two points."""
    lines = [(_thinned(view.losses), LOSS_STROKE, "loss"), (list(view.validation), VALIDATION_STROKE, "validation")]
    points = [point for line, _, _ in lines for point in line]
    if len(view.losses) < 2:
        return ""
    x0, x1 = view.losses[0][0], view.losses[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    width, height = CURVE_WIDTH - CURVE_LEFT - 8, CURVE_HEIGHT - CURVE_BOTTOM - 8

    def place(x: float, y: float) -> str:
        across = (x - x0) / max(1, x1 - x0)
        up = (y - low) / (high - low) if high > low else 0.5
        return f"{CURVE_LEFT + width * min(1.0, max(0.0, across)):.1f},{8 + height * (1 - up):.1f}"

    drawn, key = [], []
    for at, (line, colour, name) in enumerate(lines):
        path = " ".join(itertools.starmap(place, line))
        drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        key.append(f'<text x="{CURVE_WIDTH - 150 + 60 * at}" y="16" fill="{colour}">{name}</text>')
    labels = [
        (CURVE_LEFT - 4, 14, "end", f"{high:.2f}"), (CURVE_LEFT - 4, CURVE_HEIGHT - CURVE_BOTTOM, "end", f"{low:.2f}"),
        (CURVE_LEFT, CURVE_HEIGHT - 4, "start", str(x0 + 1)), (CURVE_WIDTH - 8, CURVE_HEIGHT - 4, "end", str(x1 + 1)),
    ]  # fmt: skip
    axes = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#888">{label}</text>' for x, y, anchor, label in labels
    )
    return (
        f'<svg viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" width="{CURVE_WIDTH}" height="{CURVE_HEIGHT}" '
        f'font-family="sans-serif" font-size="11">{axes}{"".join(drawn)}'
        f"{''.join(key if view.validation else key[:1])}</svg>"
    )


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most about SVG_POINTS points, each the mean of its neighbours."""
    size = -(-len(points) // SVG_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
