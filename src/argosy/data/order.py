"""The order of samples: a pure function of the seed, the sample's index and the sizes of the sources.

A run's samples are numbered 0, 1, 2, ...; step s of a run with global batch G takes samples s G to (s + 1) G of
those that are not skipped (`kept`; usually none is). The order depends on nothing else, so it is the same for any
number of processes and after any number of restarts. A run's whole position in its data is one integer, and the short
list of ranges that it skipped because of bad steps. Sample i is found in two steps:

1. `mixture`: the source s that i comes from, and the number c of samples that came from s before i;
2. `permutation`: c = epoch * windows(s) + place; the window is the image of `place` under the permutation of
   (seed, s, epoch). So every window of a source is seen once in each of its epochs, each time in another order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from argosy.data.mixture import Mixture
from argosy.data.permutation import U64, key_of, mix, permute

I64 = npt.NDArray[np.int64]

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
    """How many times the sample's source had been read completely before it."""
    windows: I64

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, part: slice) -> Samples:
        return Samples(self.sources[part], self.epochs[part], self.windows[part])

    @classmethod
    def joined(cls, parts: Sequence[Samples]) -> Samples:
        """Concatenate parts, in order."""
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
    """Which sample comes when."""

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
        self._windows = list(windows)
        self._keys = np.array([key_of(seed, "source", s) for s in range(len(windows))], np.uint64)
        self._starts = [stage.first_sample for stage in stages]
        self._mixtures = [Mixture(s.weights, key_of(seed, "stage", k)) for k, s in enumerate(stages)]
        self._drawn_before = [[0] * len(windows)]  # by stage: how many samples came from each source before it
        for mixture, (start, stop) in zip(self._mixtures, pairwise(self._starts), strict=False):
            self._drawn_before.append(_add(self._drawn_before[-1], mixture.counts(stop - start)))

    def counts(self, n: int) -> list[int]:
        """Count how many of the first `n` samples come from each source, in O(log n) time."""
        stage = bisect_right(self._starts, n) - 1
        return _add(self._drawn_before[stage], self._mixtures[stage].counts(n - self._starts[stage]))

    def samples(self, start: int, stop: int) -> Samples:
        """Return samples `start` to `stop` of the run."""
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
        ends = [*self._starts[1:], stop]
        for first, end, mixture in zip(self._starts, ends, self._mixtures, strict=True):
            low, high = max(start, first), min(stop, end)
            if low < high:
                yield mixture.sources(low - first, high - first)

    def _visit(self, source: int, drawn: U64) -> tuple[U64, U64]:
        """Return epoch and window of the samples that come from `source` after `drawn` others."""
        n = np.uint64(self._windows[source])
        epochs, places = drawn // n, drawn % n
        return epochs, permute(places, int(n), mix(self._keys[source] ^ mix(epochs)))


def _add(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]
