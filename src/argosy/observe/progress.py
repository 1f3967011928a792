"""What a person sees while a run goes on: one live line in a terminal, plain lines elsewhere.

Several processes write to the terminal: rank 0, which may be another after a recovery, and its agent. So the line is
only ever as long as the terminal is wide, each write begins by clearing it, and no state is left in the terminal when
its writer is killed (rich's `Live` hides the cursor).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

PLAIN_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""
CLEAR_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class Progress:
    """The run's progress on standard output; silent on all processes but the first."""

    def __init__(self, enabled: bool):
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True, emoji=False)
        self._step, self._doing, self._rest = "", "", ""
        self._last_plain = 0.0

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays, above the live line. style: as rich names it, e.g. "red"."""
        with self._console:  # one write: another process may print too
            if self._is_live:
                self._console.control(CLEAR_LINE)
            self._console.print(Text(text, style))
            self._draw()

    def step(
        self, record: dict[str, Any], steps: int | None, validation_loss: float | None, left_s: float | None
    ) -> None:
        """Show a finished step; `record` is its line of metrics.jsonl, `left_s` the seconds to the end, if known."""
        self._step, self._rest = _step(record, steps), _rest(record, validation_loss, left_s)
        self._doing = ""
        self._show(last=record["step"] + 1 == steps)

    def note(self, line: str, last: bool = False) -> None:
        """Show how far something has got: in place in a terminal, else a line every few seconds and the last one."""
        self._step, self._doing, self._rest = "", "", line
        self._show(last)

    def doing(self, what: str) -> None:
        """Show in the live line what is done now beside training, until the next step; "" if nothing is."""
        if what != self._doing:
            self._doing = what
            with self._console:
                self._draw()

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
        self._step, self._doing, self._rest = "", "", ""

    def close(self) -> None:
        """Leave the last line on the screen; what follows begins a new one."""
        if self._is_live and self._line():
            self._doing = ""
            with self._console:
                self._draw()
                self._console.print()
        self.hand_over()

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


def _step(record: dict[str, Any], steps: int | None) -> str:
    return f" step {record['step'] + 1:>5}/{steps if steps else '?'}"


def _rest(record: dict[str, Any], validation_loss: float | None, left_s: float | None) -> str:
    parts = [
        f"loss {record['loss']:.3f}",
        f"val {validation_loss:.3f}" if validation_loss is not None else "",
        f"{_short(record['tokens_per_s'])} tok/s",
        f"eta {'?' if left_s is None else duration(left_s)}",
        mfu_in_words(record["mfu"]),
        f"{record['step_time_s'] * 1e3:.0f} ms",
    ]
    return "".join(f"  {part}" for part in parts if part)


def mfu_in_words(mfu: float | None) -> str:
    """Return e.g. "MFU 61%"; "MFU n/a" above 100 %.

    Nothing computes faster than the peak: where it seems so, the peak was measured while the machine was busy.
    """
    return "MFU n/a" if mfu is None or mfu > 1 else f"MFU {mfu:.0%}"


def _short(number: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
