"""The source of each sample of a mixture, and the number of earlier samples from it: closed form, no state.

Sample i falls at x(i) = (A i + shift) mod 2^64 on a circle that is cut into one arc for each source, as long as its
weight. A / 2^64 is next to the golden ratio's fractional part, so the x(i) spread evenly at every scale (a
Kronecker sequence): after n samples each source's count is within O(log n) of n times its weight (Kuipers &
Niederreiter 1974, chapter 2, theorem 3.4), and over 2^64 samples it is exact, A being odd.

The number of the first n that fall below a threshold T can be computed without a loop. With y = A i + shift, the number
floor(y / M) - floor((y - T) / M) is 1 if y mod M < T and 0 if not, so the count is a difference of two floor sums

    floor_sum(n, M, A, B) = sum over i < n of floor((A i + B) / M)

each of which Euclid's algorithm computes in O(log M) steps (Graham, Knuth & Patashnik 1994, section 3.5, counts the
lattice points under the line; the iteration is the one of the AtCoder Library).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

CIRCLE = 2**64
STEP = 0x9E3779B97F49AB6D
"""A: odd, near 2^64 / golden ratio; no partial quotient of STEP / 2^64 exceeds 5, which bounds the discrepancy
(those of the usual constant, the nearest odd number, go up to 121)."""


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum over i in range(n) of floor((a i + b) / m), for m > 0 and any a, b."""
    total = 0
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            return total
        n, b, m, a = top // m, top % m, a, m  # the same points, counted by columns


class Mixture:
    """A fixed mixture of sources.

    Args:
        weights: one for each source, in any unit; 0 leaves a source out. At least one is positive.
        shift: place of the first sample on the circle, below 2^64.
    """

    def __init__(self, weights: Sequence[float], shift: int):
        self._shift = shift
        self._sources = len(weights)
        self._drawn = np.flatnonzero(weights)
        exact = [Fraction(weight) for weight in weights if weight]
        ends = [round(part / sum(exact) * CIRCLE) for part in accumulate(exact)]
        self._inner = [min(end, CIRCLE - 1) for end in ends[:-1]]  # where one arc ends and the next begins

    def sources(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the sources of samples `start` to `stop`, int64 [stop - start]."""
        first = np.uint64((STEP * start + self._shift) % CIRCLE)
        x = np.arange(stop - start, dtype=np.uint64) * np.uint64(STEP) + first  # wraps around, as it should
        return self._drawn[np.searchsorted(np.array(self._inner, np.uint64), x, side="right")]

    def counts(self, n: int) -> list[int]:
        """Count how many of the first `n` samples come from each source."""
        below = [0, *(self._count_below(end, n) for end in self._inner), n]
        counts = [0] * self._sources
        for source, (start, stop) in zip(self._drawn, pairwise(below), strict=True):
            counts[source] = stop - start
        return counts

    def _count_below(self, threshold: int, n: int) -> int:
        return floor_sum(n, CIRCLE, STEP, self._shift) - floor_sum(n, CIRCLE, STEP, self._shift - threshold)
