"""A terminal that the processes of a run share: rank 0 has a live line there, and any of them may print a message."""

from __future__ import annotations

import os
import sys
from typing import TextIO

CLEAR_LINE = "\r\x1b[2K"
"""Back to the start of the line, and erase it (ECMA-48: CR, EL 2)."""


def has_live_line(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal in which a line can be written over."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def print_message(text: str) -> None:
    """Print to stderr, in place of the live line if there is one: whoever has that line writes it again below."""
    start = CLEAR_LINE if has_live_line(sys.stderr) else ""
    sys.stderr.write(f"{start}{text}\n")  # at once: other processes write too
    sys.stderr.flush()
