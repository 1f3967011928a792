"""Numbers as people type them: counts (30k, 161B, 1.5T) and lengths of time (90m, 12h, 30d, 2w)."""

from __future__ import annotations

import math
import re
from typing import Annotated

FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
COUNT = re.compile(r"([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*([kmbgt]?)", re.IGNORECASE)


def count_of(word: str) -> int | float:
    """Return the number that `word` says: 1000, 1e6, 30k, 7.1M, 161B or 1T; whole if it can be.

    Raises: ValueError.
    """
    if word.lower() in ("nan", "inf", "-inf"):
        return float(word)  # a number, for the option to refuse
    if (parts := COUNT.fullmatch(word.strip())) is None:
        raise ValueError(f"{word!r} is no number; try 30000, 30k, 7.1M, 161B or 1T")
    value = float(parts[1]) * FACTORS[parts[2].lower()]
    if not math.isfinite(value):
        raise ValueError(f"{word!r} is too large")
    if parts[2]:
        value = round(value, 3)  # 4.1M must not be 4,099,999.9999999995
    return int(value) if value.is_integer() else value


IS_COUNT = "count"
"""Marks options that take a large number."""
Count = Annotated[float, IS_COUNT]
WholeCount = Annotated[int, IS_COUNT]


UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
DURATION = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([smhdw])\s*", re.IGNORECASE)


def seconds_of(word: str) -> float:
    """Return the seconds that `word` says. Raises: ValueError."""
    parts = DURATION.fullmatch(word)
    found = float(parts[1]) * UNITS[parts[2].lower()] if parts else 0.0
    if not found:
        raise ValueError(f"{word!r} is no length of time; try 90m, 12h, 30d or 2w")
    return found
