"""Whole numbers: ratios in a plan, such as 3:1; divisors of a size, and those near to it, which a rule proposes."""

from __future__ import annotations

import math
import re
from functools import cache, lru_cache

RATIO = re.compile(r"([1-9][0-9]*(:[1-9][0-9]*)*)?")
"""The form of a ratio; it may be empty."""


def checked(text: str) -> str:
    """Return `text` if it is a ratio. Raises: ValueError."""
    if not RATIO.fullmatch(text):
        raise ValueError("must be whole numbers from 1 on, joined by colons, such as 3:1")
    return text


@lru_cache(1024)
def numbers_of(ratio: str) -> tuple[int, ...]:
    """Return the numbers of a ratio such as 3:1; none if it is empty."""
    return tuple(map(int, ratio.split(":"))) if ratio else ()


def lowest(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return these numbers in lowest terms: 6 and 2 are as 3 and 1."""
    common = math.gcd(*numbers)
    return tuple(number // common for number in numbers)


def ratio_of(numbers: tuple[int, ...]) -> str:
    """Return the numbers of some holders as a ratio in lowest terms, with one for each block of holders that are alike.

    Blocks have one size: those of 6, 6, 2, 2 are 3:1. Empty if all are alike.
    """
    if len(set(numbers)) < 2:
        return ""
    blocks = (size for size in range(len(numbers), 0, -1) if len(numbers) % size == 0)
    block = next(b for b in blocks if all(len(set(numbers[i : i + b])) == 1 for i in range(0, len(numbers), b)))
    return ":".join(map(str, lowest(numbers[::block])))


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
