"""The order of samples: a pure function of the seed, the sample's index and the sizes of the sources.

A run's samples are numbered 0, 1, 2, ...; step s of a run with global batch G takes samples s G to (s + 1) G of
those that are not skipped (`kept`; usually none is). The order depends on nothing else, so it is the same for any
number of processes and after any number of restarts. A run's whole position in its data is one integer, and the short
list of ranges that it skipped because of bad steps. Sample i is found in two steps:

1. `mixture`: the source s that i comes from, and the number c of samples that came from s before i;
2. `permutation`: c = epoch * windows(s) + place; the window is the image of `place` under the permutation of
   (seed, s, epoch). So every window of a source is seen once in each of its epochs, each time in another order.

The source of each sample of a mixture, and the number of earlier samples from it: closed form, no state.

Sample i falls at x(i) = (A i + shift) mod 2^64 on a circle that is cut into one arc for each source, as long as its
weight. A / 2^64 is next to the golden ratio's fractional part, so the x(i) spread evenly at every scale (a
Kronecker sequence): after n samples each source's count is within O(log n) of n times its weight (Kuipers &
Niederreiter 1974, chapter 2, theorem 3.4), and over 2^64 samples it is exact, A being odd.

The number of the first n that fall below a threshold T can be computed without a loop. With y = A i + shift, the number
floor(y / M) - floor((y - T) / M) is 1 if y mod M < T and 0 if not, so the count is a difference of two floor sums

    floor_sum(n, M, A, B) = sum over i < n of floor((A i + B) / M)

each of which Euclid's algorithm computes in O(log M) steps (Graham, Knuth & Patashnik 1994, section 3.5, counts the
lattice points under the line; the iteration is the one of the AtCoder Library).

The permutation is an alternating Feistel network on the smallest power of two that holds n, computed one element at a
time: the halves of a number take turns at being XORed with a keyed hash of the other. Each turn is its own inverse, so
the whole is a bijection for any hash (Luby & Rackoff 1988). A result outside range(n) is permuted again until it lies
inside ("cycle walking": Black & Rogaway 2002); the power of two is less than 2n, so that takes two rounds on average.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

TURNS = 8
"""Luby & Rackoff need four. There are more, since the hash is not cryptographic and small domains mix poorly."""

SPLITMIX_STEP = 0x9E3779B97F4A7C15  # what SplitMix64 adds to its state
_TURN_OFFSETS = np.arange(1, TURNS + 1, dtype=np.uint64) * np.uint64(SPLITMIX_STEP)


def key_of(*parts: int | str) -> int:
    """Return a 64-bit key that depends on all of `parts` (integers of any size)."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def mix(x: U64) -> U64:
    """Hash each element: the finaliser of SplitMix64 (Steele, Lea & Flood 2014), itself a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: U64, n: int, key: U64) -> U64:
    """Map each `index` (uint64 [k], below n <= 2**63) through the permutation of range(n) with its `key` [k].

    Different elements with equal keys go to different places.
    """
    bits = max((n - 1).bit_length(), 1)
    turn_keys = mix(key + _TURN_OFFSETS[:, None])
    where = _feistel(index, bits, turn_keys)
    outside = np.flatnonzero(where >= n)
    while outside.size:
        where[outside] = _feistel(where[outside], bits, turn_keys[:, outside])
        outside = outside[where[outside] >= n]
    return where


def _feistel(x: U64, bits: int, turn_keys: U64) -> U64:
    """Permute the numbers of `bits` bits by keys [TURNS, k]; the right half has floor(bits / 2) of them."""
    right_bits = np.uint64(bits // 2)
    right_mask = np.uint64((1 << (bits // 2)) - 1)
    left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    left, right = x >> right_bits, x & right_mask
    for left_key, right_key in zip(turn_keys[::2], turn_keys[1::2], strict=True):
        left = left ^ (mix(right + left_key) & left_mask)
        right = right ^ (mix(left + right_key) & right_mask)
    return (left << right_bits) | right


CIRCLE = 2**64
GOLDEN_STEP = 0x9E3779B97F49AB6D
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
        first = np.uint64((GOLDEN_STEP * start + self._shift) % CIRCLE)
        x = np.arange(stop - start, dtype=np.uint64) * np.uint64(GOLDEN_STEP) + first  # wraps around, as it should
        return self._drawn[np.searchsorted(np.array(self._inner, np.uint64), x, side="right")]

    def counts(self, n: int) -> list[int]:
        """Count how many of the first `n` samples come from each source."""
        below = [0, *(self._count_below(end, n) for end in self._inner), n]
        counts = [0] * self._sources
        for source, (start, stop) in zip(self._drawn, pairwise(below), strict=True):
            counts[source] = stop - start
        return counts

    def _count_below(self, threshold: int, n: int) -> int:
        return floor_sum(n, CIRCLE, GOLDEN_STEP, self._shift) - floor_sum(
            n, CIRCLE, GOLDEN_STEP, self._shift - threshold
        )


Range = tuple[int, int]
"""The first sample, and the one after the last."""


@dataclass(frozen=True)
class MixtureStage:
    """From `first_sample` on, draw from the sources by these weights (one for each source; 0 leaves it out)."""

    first_sample: int
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Samples:
    """The places of consecutive samples, in three arrays of the same length."""

    sources: I64
    epochs: I64
    """The number of times that the sample's source had been read completely before it."""
    windows: I64

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, part: slice) -> Samples:
        return Samples(self.sources[part], self.epochs[part], self.windows[part])

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.sources for part in parts]),
            np.concatenate([part.epochs for part in parts]),
            np.concatenate([part.windows for part in parts]),
        )


def kept(start: int, stop: int, skipped: Sequence[Range] = ()) -> list[Range]:
    """Return the numbers, among all samples, of samples `start` to `stop` of those that are not skipped, in order.

    `skipped`: ranges, in any order, that do not overlap.
    """
    ranges: list[Range] = []
    for first, end in sorted(skipped):
        if stop <= first:
            break
        if start < first:
            ranges.append((start, first))
        passed = max(start, first) + end - first
        start, stop = passed, stop + end - first
    return [*ranges, (start, stop)] if start < stop else ranges


def skipped_by(start: int, stop: int, skipped: Sequence[Range]) -> list[Range]:
    """Return the skipped ranges right before or among samples `start` to `stop` of those that are not skipped.

    So each range belongs to exactly one step: the first that goes past it.
    """
    begin = kept(start - 1, start, skipped)[0][1] if start else 0
    end = kept(stop - 1, stop, skipped)[0][1]
    return [(first, last) for first, last in sorted(skipped) if begin <= first < end]


class Order(Protocol):
    """The order of a run's samples."""

    def samples(self, start: int, stop: int) -> Samples:
        """Return samples `start` to `stop`."""


class SampleOrder:
    """The order of a run's samples.

    Args:
        seed: any integer >= 0; another seed is another order.
        windows: the number of windows of each source, at least 1. A source's place here is part of the order:
            sources may be added at the end, for later stages, without changing what came before.
        stages: ordered by `first_sample`, the first at 0.
    """

    def __init__(self, seed: int, windows: Sequence[int], stages: Sequence[MixtureStage]):
        self.windows = list(windows)
        """Windows of each source."""
        self._keys = np.array([key_of(seed, "source", s) for s in range(len(windows))], np.uint64)
        self.starts = [stage.first_sample for stage in stages]
        """The first sample of each stage."""
        self._mixtures = [Mixture(s.weights, key_of(seed, "stage", k)) for k, s in enumerate(stages)]
        self._drawn_before = [[0] * len(windows)]  # by stage: how many samples came from each source before it
        for mixture, (start, stop) in zip(self._mixtures, pairwise(self.starts), strict=False):
            self._drawn_before.append(_add(self._drawn_before[-1], mixture.counts(stop - start)))

    def as_of(self, number: int) -> SampleOrder:
        """Return the order that goes on with the mixture of sample `number`, without later stages."""
        other, stages = copy(self), bisect_right(self.starts, number)
        other.starts, other._mixtures = self.starts[:stages], self._mixtures[:stages]
        return other

    def counts(self, n: int) -> list[int]:
        """Count how many of the first `n` samples come from each source, in O(log n) time."""
        stage = bisect_right(self.starts, n) - 1
        return _add(self._drawn_before[stage], self._mixtures[stage].counts(n - self.starts[stage]))

    def samples(self, start: int, stop: int) -> Samples:
        sources = np.concatenate([np.empty(0, np.int64), *self._sources(start, stop)])
        epochs, windows = np.empty_like(sources), np.empty_like(sources)
        for source, drawn_before in enumerate(self.counts(start)):
            here = np.flatnonzero(sources == source)
            if here.size:
                drawn = np.arange(drawn_before, drawn_before + here.size, dtype=np.uint64)
                epochs[here], windows[here] = self._visit(source, drawn)
        return Samples(sources, epochs, windows)

    def _sources(self, start: int, stop: int) -> Iterator[I64]:
        """Return the sources of samples `start` to `stop`, stage by stage."""
        ends = [*self.starts[1:], stop]
        for first, end, mixture in zip(self.starts, ends, self._mixtures, strict=True):
            low, high = max(start, first), min(stop, end)
            if low < high:
                yield mixture.sources(low - first, high - first)

    def _visit(self, source: int, drawn: U64) -> tuple[U64, U64]:
        """Return epoch and window of the samples that come from `source` after `drawn` others."""
        n = np.uint64(self.windows[source])
        epochs, places = drawn // n, drawn % n
        return epochs, permute(places, int(n), mix(self._keys[source] ^ mix(epochs)))


def _add(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]
