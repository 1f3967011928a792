"""Divisors of a size, and those near to a number: what a rule proposes instead."""

from __future__ import annotations

import math
from functools import cache


@cache
def divisors(number: int) -> list[int]:
    """Return all divisors, sorted."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def neighbours(size: int, good: list[int]) -> list[int]:
    """Return the sorted `good` sizes next to `size`: the largest up to it, and the smallest from it on."""
    below, above = [n for n in good if n <= size], [n for n in good if n >= size]
    return sorted({*below[-1:], *above[:1]})


def around(size: int, good: list[int]) -> str:
    """Return the neighbours of a size, as a message names them."""
    return " or ".join(map(str, neighbours(size, good)))
