"""Whoever shows a run to a person: one thread of one process, to which the run's other processes pass what they say.

Rank 0 may be another process after a recovery, libraries print in any of them, and the agent outlives them all. So the
agent's process has the terminal to itself: workers write to a pipe, and what they print stands above the panel. They
never wait for the terminal: a reader takes all that comes, also while Ctrl-S holds the terminal.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol, Self

from argosy.observe import terminal
from argosy.observe.folder_view import FolderView
from argosy.observe.panel import one_line
from argosy.observe.run_view import RunView

MARK, END = "\x1b_argosy ", "\x1b\\"
"""Around a message that is meant for the screen, among what a process prints: an application program command (ECMA-48
APC ... ST), of which a terminal shows nothing.
"""
REFRESH_S = 0.5
"""How often the panel is drawn if nothing happens."""
LEAST_S = 0.1
"""It is not drawn more often."""
MOST_LINES = 10_000
"""Most lines that wait for a terminal that takes none; older ones are lost."""
END_S = 10.0
"""How long a terminal that takes nothing is waited for at the end."""
Line = tuple[str, str]
"""Text, and its style as rich names it."""
LAST_STEP: Line = ("", "the last step")
"""Stands for the line of the last step, as it is when it is printed."""


class Surface(Protocol):
    """Where a run is shown."""

    def show(self, lines: list[Line], view: RunView) -> None:
        """Print lines that stay, and show the run as it is now. Raises: OSError, ValueError if it is gone."""

    def close(self, lines: list[Line], view: RunView, is_told: bool) -> None:
        """Print the last lines, and leave the run as it ended; `is_told`: the line of its last step was printed."""


def packed(message: dict[str, Any]) -> str:
    """Return a message as a line that a process can print."""
    return f"{MARK}{json.dumps(message, default=str)}{END}\n"


class Screen:
    """Shows a run on a surface, in a thread."""

    def __init__(self, surface: Surface):
        self._surface = surface
        self._lines: deque[Line] = deque(maxlen=MOST_LINES)
        self._doing: dict[str, str] = {}
        self._told: dict[str, Any] = {}
        self._folder: FolderView | None = None
        self._is_closed = False
        self._wake, self._is_over = Event(), Event()
        self._thread = Thread(target=self._keep_drawing, name="argosy-screen", daemon=True)

    def __enter__(self) -> Self:
        terminal.owner = self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        terminal.owner = None
        self._is_over.set()
        self._wake.set()
        self._thread.join(END_S)

    def begin(self, run_dir: Path) -> None:
        """Show the run in this folder from now on."""
        self._folder, self._is_closed = FolderView(run_dir), False
        self._wake.set()

    def take(self, message: dict[str, Any]) -> None:
        """Take a message of `observe.progress`. Any thread may call this; it waits for nothing."""
        who = message.get("by", "")
        match message:
            case {"close": True}:
                self._is_closed, self._doing = True, {}
                if self._folder is not None:
                    self._lines.append(LAST_STEP)
            case {"say": str(text)}:
                self._lines.append((text, str(message.get("style", ""))))
            case {"doing": str(doing)}:
                self._doing[who] = doing
            case {"heartbeats": str(folder)} if self._folder is not None:
                self._folder.heartbeats = Path(folder)
            case {"steps": _, "left_s": _}:
                self._is_closed = False
                self._told = {"steps": message["steps"], "left_s": message["left_s"], "at": time.monotonic()}
                self._doing = {}
                return  # the next drawing will do
        self._wake.set()

    def printed(self, line: str) -> None:
        """Take a line that a process of the run printed: messages, and what is meant for the terminal itself."""
        text, mark, packed_message = line.rstrip("\r\n").partition(MARK)
        if text:
            self._lines.append((text, ""))
            self._wake.set()
        if mark:
            with suppress(ValueError):
                message = json.loads(packed_message.partition(END)[0])
                if isinstance(message, dict):
                    self.take(message)

    def _keep_drawing(self) -> None:
        is_over = False
        while not is_over:
            self._wake.wait(REFRESH_S)
            self._wake.clear()
            is_over = self._is_over.is_set()
            is_closed = self._is_closed
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            view = self._view()
            last: Line = one_line(replace(view, doing="")).plain, "bold"
            lines = [last if line is LAST_STEP else line for line in lines]
            try:
                if is_over:
                    self._surface.close(lines, view, is_closed)
                else:
                    self._surface.show(lines, RunView(doing=self._now()) if is_closed else view)
            except (OSError, ValueError):  # the terminal is gone; the run goes on
                return
            self._is_over.wait(LEAST_S)

    def _view(self) -> RunView:
        if self._folder is None:
            return RunView(doing=self._now())
        view = self._folder.look()
        told = self._told
        if told and view.left_s is None and told["left_s"] is not None:
            left_s = max(0.0, told["left_s"] - (time.monotonic() - told["at"]))
            view = replace(view, left_s=left_s, steps=told["steps"] or view.steps)
        return replace(view, doing=self._now())

    def _now(self) -> str:
        """Return what is done beside training; the agent's word comes first: it speaks while no worker trains."""
        return self._doing.get("agent") or next(filter(None, self._doing.values()), "")


def read_lines_of(descriptor: int, screen: Screen) -> None:
    """Pass on all that comes through a pipe, until its last writer has closed it."""
    rest = b""
    with suppress(OSError):
        while chunk := os.read(descriptor, 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                screen.printed(line.decode(errors="replace"))
    if rest:
        screen.printed(rest.decode(errors="replace"))
    os.close(descriptor)
