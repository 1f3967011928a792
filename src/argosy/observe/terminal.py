"""A terminal that the processes of a run share. Any of them may print a message while something is shown there."""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol, TextIO

CLEAR_LINE = "\r\x1b[2K"
"""Back to the start of the line, and erase it (ECMA-48: CR, EL 2)."""


class Owner(Protocol):
    """Whoever has this process's terminal to itself: an `observe.screen.Screen`."""

    def take(self, message: dict[str, Any]) -> None:
        """Show a message of `observe.progress`; waits for nothing."""


owner: Owner | None = None
"""The owner of the terminal now, if it has one. There is one terminal."""


def has_live_line(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal in which a line can be written over."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def print_message(text: str) -> None:
    """Print to stderr, in place of the live line if there is one: whoever has that line writes it again below."""
    if owner is not None and has_live_line(sys.stderr):
        owner.take({"say": text})
        return
    start = CLEAR_LINE if has_live_line(sys.stderr) else ""
    sys.stderr.write(f"{start}{text}\n")  # at once: other processes write too
    sys.stderr.flush()
