"""A terminal in which a run is shown: lines that stay, and below them the panel, or one line where it has no room.

Each frame is one write: the cursor goes up to the panel's first line, lines are written over, the rest is erased, and
the cursor rests below the panel. So no state is left in the terminal when the process is killed at any moment: no
hidden cursor, no other screen, no scrolling region (rich's `Live` hides the cursor). The shell's prompt then stands
below the last frame.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from dataclasses import replace
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from argosy.observe.panel import fits, one_line, panel
from argosy.observe.run_view import RunView
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
