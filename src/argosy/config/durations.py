"""Lengths of time as people type them: 90m, 12h, 30d, 2w."""

from __future__ import annotations

import re

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
DURATION = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([smhdw])\s*", re.IGNORECASE)


def seconds_of(word: str) -> float:
    """Return the seconds that `word` says. Raises: ValueError."""
    parts = DURATION.fullmatch(word)
    found = float(parts[1]) * UNITS[parts[2].lower()] if parts else 0.0
    if not found:
        raise ValueError(f"{word!r} is no length of time; try 90m, 12h, 30d or 2w")
    return found
