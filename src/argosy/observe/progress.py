"""What a process of a run says to a person: to the screen, if one shows the run; else one live line, or plain lines.

Where a screen has the terminal (`observe.screen`), all that is said goes there: by a call within its process, as marked
lines from a worker, whose output it reads. Without one (under torchrun, `argosy prepare`) several processes may write
to the terminal. So the live line is only ever as long as the terminal is wide, each write begins by clearing it, and no
state is left in the terminal when its writer is killed (rich's `Live` hides the cursor).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from argosy.observe import terminal
from argosy.observe.panel import figures, step_in_words
from argosy.observe.run_view import duration
from argosy.observe.screen import packed

PLAIN_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""
SILENT_S, AGAIN_S = 5.0, 60.0
"""Where there is no terminal, what is done now is printed once it has taken so long, and then every so many seconds."""
CLEAR_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


SCREEN = "ARGOSY_SCREEN"
"""Environment variable of a worker: 1 if a screen reads what it prints."""
TELL_EVERY_S = 0.2
"""How often a worker tells the screen what only it knows."""


class Progress:
    """The run's progress on standard output; silent on all processes but the first."""

    def __init__(self, enabled: bool, by: str = ""):
        """`by`: who speaks; what "agent" does now is shown before what a worker does."""
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
                self._console.control(CLEAR_LINE)
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

    def evaluated(self, step: int, loss: float, bits_per_byte: float) -> None:
        """Print how well the weights after `step` predict held-out text."""
        self.say(f" step {step + 1:>5}  evaluated: loss {loss:.3f}, {bits_per_byte:.3f} bits per byte", "cyan")

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
        """Show in this block what is done now."""
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
                sys.stdout.write(packed(message))
                sys.stdout.flush()
        return True

    def _break_silence(self) -> None:
        """Print what is done now, if that takes long; end once nothing is."""
        told_since, told_s = 0.0, 0.0
        while self._doing:
            time.sleep(SILENT_S / 5)
            what, since, now = self._doing, self._doing_since, time.monotonic()
            if what and now - since >= SILENT_S and (since != told_since or now - told_s >= AGAIN_S):
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
        self._console.control(CLEAR_LINE)
        line = self._line()
        line.truncate(self._console.width - 1, overflow="ellipsis")  # a full line would go on in the next one
        self._console.print(line, end="")

    def _line(self) -> Text:
        """Return the line; what is done now stands first, where nothing crops it."""
        doing = f"  {self._doing}" if self._doing else ""
        return Text.assemble((self._step, "bold"), (doing, "yellow"), self._rest)
