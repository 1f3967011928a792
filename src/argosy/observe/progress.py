"""What a person sees while a run goes on: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""


class Progress:
    """The run's progress on standard output; silent on all processes but the first."""

    def __init__(self, enabled: bool):
        self._console = Console(quiet=not enabled, highlight=False, soft_wrap=True, emoji=False)
        self._live: Live | None = None
        self._last_plain = 0.0

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)

    def step(self, record: dict[str, Any], steps: int | None, validation_loss: float | None, left_s: float) -> None:
        """Show a finished step; `record` is its line of metrics.jsonl, `left_s` the seconds to the end."""
        self.note(_line(record, steps, validation_loss, left_s), last=record["step"] + 1 == steps)

    def note(self, line: str, last: bool = False) -> None:
        """Show how far something has got: in place in a terminal, else a line every few seconds and the last one."""
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(Text(line), refresh=True)
        elif last or time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self._console.print(line, markup=False)

    def close(self) -> None:
        """Leave the last line on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _line(record: dict[str, Any], steps: int | None, validation_loss: float | None, left_s: float) -> str:
    done = f"{record['step'] + 1:>5}/{steps if steps else '?'}"
    val = f"   val {validation_loss:.3f}" if validation_loss is not None else ""
    return (
        f" step {done}   loss {record['loss']:.3f}{val}   {_short(record['tokens_per_s'])} tok/s"
        f"   MFU {record['mfu']:.0%}   eta {duration(left_s)}   step {record['step_time_s'] * 1e3:.0f} ms"
    )


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
