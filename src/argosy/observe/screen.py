"""The screen thread, which shows a run to a person, and `Progress`, by which the run's processes pass it what they say.

Rank 0 may be another process after a recovery, libraries print in any of them, and the agent outlives them all. So the
agent's process has the terminal to itself: workers write to a pipe, and what they print stands above the panel. They
never wait for the terminal: a reader takes all that comes, also while Ctrl-S holds the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol, Self

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from argosy.observe import terminal
from argosy.observe.panel import RunView, duration, figures, one_line, step_in_words

TITLE_MARK, TITLE_END = "\x1b_argosy ", "\x1b\\"
"""Around a message that is meant for the screen, among what a process prints: an application program command (ECMA-48
APC ... ST), of which a terminal shows nothing.
"""
PANEL_REFRESH_S = 0.5
"""Seconds between two drawings of the panel if nothing happens."""
LEAST_S = 0.1
"""Least time between two drawings."""
WAITING_LINES = 10_000
"""Most lines that wait for a terminal that takes none; older ones are lost."""
LAST_WORDS_S = 10.0
"""Most seconds to wait at the end for a terminal that takes nothing."""
Line = tuple[str, str]
"""Text, and its style as rich names it."""
LAST_STEP: Line = ("", "the last step")
"""Stands for the line of the last step, as it is when it is printed."""


class Surface(Protocol):
    """A place where a run is shown: a terminal, a notebook."""

    def show(self, lines: list[Line], view: RunView) -> None:
        """Print lines that stay, and show the run as it is now. Raises: OSError, ValueError if it is gone."""

    def close(self, lines: list[Line], view: RunView, is_told: bool) -> None:
        """Print the last lines, and leave the run as it ended; `is_told`: the line of its last step was printed."""


class RunFolder(Protocol):
    """A run's folder, which is read anew at each look."""

    heartbeats: Path | None

    def look(self) -> RunView:
        """Return the run as it is now."""


def as_line(message: dict[str, Any]) -> str:
    """Return a message as a line that a process can print."""
    return f"{TITLE_MARK}{json.dumps(message, default=str)}{TITLE_END}\n"


class Screen:
    """Shows a run on a surface, in a thread. `folder_of` opens a run's folder."""

    def __init__(self, surface: Surface, folder_of: Callable[[Path], RunFolder]):
        self._surface, self._folder_of = surface, folder_of
        self._lines: deque[Line] = deque(maxlen=WAITING_LINES)
        self._doing: dict[str, str] = {}
        self._told: dict[str, Any] = {}
        self._folder: RunFolder | None = None
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
        self._thread.join(LAST_WORDS_S)

    def begin(self, run_dir: Path) -> None:
        self._folder, self._is_closed = self._folder_of(run_dir), False
        self._wake.set()

    def take(self, message: dict[str, Any]) -> None:
        """Take a message of `Progress`. Any thread may call this; it waits for nothing."""
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
        text, mark, packed_message = line.rstrip("\r\n").partition(TITLE_MARK)
        if text:
            self._lines.append((text, ""))
            self._wake.set()
        if mark:
            with suppress(ValueError):
                message = json.loads(packed_message.partition(TITLE_END)[0])
                if isinstance(message, dict):
                    self.take(message)

    def _keep_drawing(self) -> None:
        is_over = False
        while not is_over:
            self._wake.wait(PANEL_REFRESH_S)
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


LONGEST_LINE_BYTES = 1 << 20
"""A longer one is cut: the bar of a library may print for days without an end of line."""


def read_lines_of(descriptor: int, screen: Screen) -> None:
    """Pass on all that comes through a pipe, until its last writer has closed it."""
    rest = b""
    with suppress(OSError):
        while chunk := os.read(descriptor, 1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                screen.printed(line.decode(errors="replace"))
    if rest:
        screen.printed(rest.decode(errors="replace"))
    os.close(descriptor)


PLAIN_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""
BREAK_SILENCE_S, SCREEN_REPEAT_S = 5.0, 60.0
"""Without a terminal, what is done now is printed once it has taken so long, and then every so many seconds."""
CLEAR = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


SCREEN = "ARGOSY_SCREEN"
"""Environment variable of a worker: 1 if a screen reads what it prints."""
TELL_EVERY_S = 0.2
"""Seconds between two messages of a worker about what only it knows."""


class Progress:
    """The run's progress on standard output; silent on all processes but the first."""

    def __init__(self, enabled: bool, by: str = ""):
        """`by`: the process that reports; an "agent" is shown before a worker."""
        self._enabled, self._by = enabled, by
        self._has_reader = os.environ.get(SCREEN) == "1"
        self._last_told = 0.0
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True, emoji=False)
        self._step, self._doing, self._rest = "", "", ""
        self._last_plain = 0.0
        self._watcher: threading.Thread | None = None
        self._doing_since = 0.0

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays, above the live line. style: as rich names it, e.g. "red"."""
        if self._tell(say=text, style=style):
            return
        with self._console:  # one write: another process may print too
            if self._is_live:
                self._console.control(CLEAR)
            self._console.print(Text(text, style))
            self._draw()

    def step(
        self, record: dict[str, Any], steps: int | None, validation_loss: float | None, left_s: float | None
    ) -> None:
        """Show a finished step; `record` is its line of metrics.jsonl, `left_s` the seconds to the end, if known."""
        if self._has_screen:  # it reads the line from the file
            if time.monotonic() - self._last_told >= TELL_EVERY_S or self._doing:
                self._last_told, self._doing = time.monotonic(), ""
                self._tell(steps=steps, left_s=left_s)
            return
        self._step, self._rest = step_in_words(record, steps), figures(record, validation_loss, left_s)
        self._doing = ""
        self._show(last=record["step"] + 1 == steps)

    def evaluated(self, step: int, score: str, tasks: Sequence[str] = ()) -> None:
        """Print how well the weights after `step` predict held-out text, and their scores of tasks, in words."""
        self.say(f" step {step + 1:>5}  evaluated: {score}", "cyan")
        for words in tasks:
            self.say(f"             {words}", "cyan")

    def note(self, line: str, last: bool = False) -> None:
        """Show how far something has got: in place in a terminal, else a line every few seconds and the last one."""
        if self._tell(**({"say": line} if last else {}), doing="" if last else line.strip()):
            return
        self._step, self._doing, self._rest = "", "", line
        self._show(last)

    def doing(self, what: str) -> None:
        """Show in the live line what is done now beside training, until the next step; "" if nothing is."""
        if what != self._doing:
            self._doing, self._doing_since = what, time.monotonic()
            if self._tell(doing=what):
                return
            with self._console:
                self._draw()
            if what and not self._is_live and not (self._watcher and self._watcher.is_alive()):
                self._watcher = threading.Thread(target=self._break_silence, name="argosy-progress", daemon=True)
                self._watcher.start()

    def heartbeats(self, folder: Path) -> None:
        """Name the folder of this machine's heartbeats, for a screen."""
        self._tell(heartbeats=str(folder))

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        self.doing(what)
        try:
            yield
        finally:
            self.doing("")

    def hand_over(self) -> None:
        """Leave the live line as it is: another process writes it from now on."""
        if self._doing:
            self._tell(doing="")
        self._step, self._doing, self._rest = "", "", ""

    def close(self) -> None:
        """Leave the last line on the screen; what follows begins a new one."""
        if self._has_screen:
            self._doing = ""
            self._tell(close=True, doing="")
            return
        if self._is_live and self._line():
            self._doing = ""
            with self._console:
                self._draw()
                self._console.print()
        self.hand_over()

    @property
    def _has_screen(self) -> bool:
        return self._enabled and (terminal.owner is not None or self._has_reader)

    def _tell(self, **message: Any) -> bool:
        """Pass a message to the screen. Return False if there is none."""
        if not self._has_screen:
            return not self._enabled
        message["by"] = self._by
        if terminal.owner is not None:
            terminal.owner.take(message)
        else:
            with suppress(OSError):  # the reader is gone, and this process goes with it
                sys.stdout.write(as_line(message))
                sys.stdout.flush()
        return True

    def _break_silence(self) -> None:
        """Print what is done now, if that takes long; end once nothing is."""
        told_since, told_s = 0.0, 0.0
        while self._doing:
            time.sleep(BREAK_SILENCE_S / 5)
            what, since, now = self._doing, self._doing_since, time.monotonic()
            if what and now - since >= BREAK_SILENCE_S and (since != told_since or now - told_s >= SCREEN_REPEAT_S):
                told_since, told_s = since, now
                with suppress(OSError, ValueError):  # nobody reads any more
                    self._console.print(f" {what} ({duration(now - since)})", markup=False)

    @property
    def _is_live(self) -> bool:
        return self._console.is_terminal and not self._console.is_dumb_terminal and not self._console.quiet

    def _show(self, last: bool) -> None:
        if self._is_live:
            with self._console:
                self._draw()
        elif last or time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self._console.print(self._line(), markup=False)

    def _draw(self) -> None:
        """Write the live line over the one that is there."""
        if not self._is_live:
            return
        self._console.control(CLEAR)
        line = self._line()
        line.truncate(self._console.width - 1, overflow="ellipsis")  # a full line would go on in the next one
        self._console.print(line, end="")

    def _line(self) -> Text:
        """Return the line; what is done now stands first, where nothing crops it."""
        doing = f"  {self._doing}" if self._doing else ""
        return Text.assemble((self._step, "bold"), (doing, "yellow"), self._rest)
