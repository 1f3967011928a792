"""The places where a run is shown: a terminal, a notebook, any other output (`shown` finds out which).

In a terminal there are lines that stay, and below them the panel, or one line where it has no room.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from argosy.observe.panel import RunView, figures, fits, one_line, panel
from argosy.observe.screen import Line, RunFolder, Screen, read_lines_of
from argosy.observe.terminal import has_live_line

UP, ERASE_LINE_END, ERASE_BELOW = "\x1b[{}A", "\x1b[K", "\x1b[J"
"""ECMA-48: CUU, EL 0, ED 0."""
AWAY_S = 5.0
"""After so long without a frame the process was stopped, and the shell has printed below: the panel is drawn anew."""


class TerminalSurface:
    """The terminal that `stream` writes to."""

    def __init__(self, stream: TextIO, is_named: bool = False):
        """is_named: the run's name stands before the one line too: it is one of several."""
        self._stream, self._is_named = stream, is_named
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
        line = Text.assemble((f" {view.name} " if self._is_named else "", "bold"), one_line(view))
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


STANDARD = 1
END_S = 5.0
"""Time for which the last words are waited for: a process that outlives the run may still hold the pipe."""


@dataclass(frozen=True)
class RunDisplay:
    """The places where a run's processes print, and the screen that shows it."""

    stdout: int | None = None
    """A descriptor; None: this process's standard output."""
    stderr: int | None = None
    screen: Screen | None = None
    """Shows the run, if somebody looks."""


@contextmanager
def shown(folder_of: Callable[[Path], RunFolder], quiet: bool = False) -> Iterator[RunDisplay]:
    """Show in this block what processes print to the descriptors that it yields. folder_of: as of `Screen`.

    In a terminal and in a notebook a screen shows the run, unless it is to be `quiet`. In any other output without a
    descriptor (a StringIO) lines are passed on as they are; to any other, processes print themselves.
    """
    out = sys.stdout
    if out is None:
        yield RunDisplay()
    elif not quiet and is_in_notebook():
        with _screen(Screen(NotebookSurface(), folder_of), has_stderr=False) as found:
            yield found
    elif not _is_standard(out):
        with _pipe(lambda reader: _pass_on(reader, out)) as writer:
            yield RunDisplay(stdout=writer)
    elif not quiet and has_live_line(out):
        with _screen(Screen(TerminalSurface(out), folder_of), has_stderr=sys.stderr.isatty()) as found:
            yield found
    else:
        yield RunDisplay()


@contextmanager
def _screen(screen: Screen, has_stderr: bool) -> Iterator[RunDisplay]:
    with ExitStack() as held:
        held.enter_context(screen)
        writer = held.enter_context(_pipe(lambda reader: read_lines_of(reader, screen)))
        yield RunDisplay(stdout=writer, stderr=writer if has_stderr else None, screen=screen)


@contextmanager
def _pipe(read: Callable[[int], None]) -> Iterator[int]:
    """Yield the end of a pipe to write to; `read` is called in a thread with the other one, which it closes."""
    reader, writer = os.pipe()
    passing = Thread(target=read, args=(reader,), name="argosy-output", daemon=True)
    passing.start()
    try:
        yield writer
    finally:
        os.close(writer)
        passing.join(END_S)


def _is_standard(out: TextIO) -> bool:
    try:
        return out.fileno() == STANDARD
    except (AttributeError, OSError, ValueError):  # it has no descriptor, as a StringIO or a notebook's
        return False


def _pass_on(reader: int, out: TextIO) -> None:
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with suppress(OSError, ValueError):  # it was closed; the workers must not wait for it
                out.write(line)
                out.flush()
