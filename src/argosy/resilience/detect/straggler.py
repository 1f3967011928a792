"""A straggler: a rank that is slower than its peers, always or repeatedly.

The time of a rank's own work in a step, without waiting for others, is compared with the median of its peers in the
same step: what slows all of them down, a longer batch or a busy machine, blames none. A step in which a rank takes
`factor` times as long counts against it. Noise makes slow steps too, perhaps with heavy tails, but spreads them evenly
over ranks, so that the test is how unevenly they fall:

- *always*: most of the last `steps` steps are slow, and so many more than of other ranks that a random distribution
  would do so with a chance of 10^-5;
- *repeatedly*: the same in a window ten times as long, with a chance of 10^-8, and the rank takes a tenth longer than
  its peers in total.

A rank that stays slow for four times as long after it was found should be avoided.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from argosy.observe.heartbeat import HeartbeatReading
from argosy.resilience.detect.finding import Action, Finding, Latch, Sample

LONG = 10
"""The window for repeatedly slow ranks, over that for ranks that are always slow."""
BY_CHANCE, LONG_BY_CHANCE = 1e-5, 1e-8
COSTS = 0.1
MOST = 10.0
"""A step counts at most as this many times its peers': a single one of a hundred times is an accident."""
AVOID_AFTER = 4
SKIPPED = 2
"""The first steps of a world compile and warm up."""


@dataclass(frozen=True)
class _Step:
    step: int
    at_s: float
    ratios: dict[int, float]
    """Rank -> its time over the median of its peers', without ranks for which the step no longer counts."""


class StragglerDetector:
    """Watch the ranks of a world; peers are ranks that do the same work, by default all."""

    def __init__(
        self, factor: float = 1.5, steps: int = 20, seconds: float = 10.0, peers: Sequence[Sequence[int]] = ()
    ):
        """Arguments as the keys of [resilience]: slow is `factor` times; windows have `steps` steps and `seconds`."""
        self._factor, self._steps, self._seconds, self._peers = factor, steps, seconds, peers
        self._generation = -1
        self._start(-1)

    def observe(self, sample: Sample) -> list[Finding]:
        """Return what is found in the newest sample."""
        readings = {rank: seen.reading for rank, seen in sample.workers.items()}
        generations = {reading.generation for reading in readings.values()}
        if len(generations) != 1 or len(readings) < 2:
            return []
        if generations != {self._generation}:
            self._start(generations.pop())
        if not self._take_in(readings, sample.at_s):
            return []
        self._in_all = self._slow.total()
        return [finding for rank in sorted(readings) if (finding := self._finding(rank)) is not None]

    def _start(self, generation: int) -> None:
        self._generation, self._seen, self._last = generation, 0, -1
        self._window: deque[_Step] = deque()
        self._slow: Counter[int] = Counter()
        self._in_all = 0
        self._latch = Latch()
        self._found_at: dict[int, int] = {}

    def _take_in(self, readings: Mapping[int, HeartbeatReading], at_s: float) -> bool:
        """Add the steps that all ranks have finished; return True if there were any."""
        common = set.intersection(*(set(reading.busy_s) for reading in readings.values()))
        fresh = sorted(step for step in common if step > self._last)
        for step in fresh:
            self._seen, self._last = self._seen + 1, step
            if self._seen > SKIPPED:
                ratios = self._ratios({rank: reading.busy_s[step] for rank, reading in readings.items()})
                self._window.append(_Step(step, at_s, ratios))
                self._slow.update(self._slow_in(ratios))
        # The window has this many steps, or more if they span too little time.
        while len(self._window) > LONG * self._steps and at_s - self._window[1].at_s >= LONG * self._seconds:
            self._slow.subtract(self._slow_in(self._window.popleft().ratios))
        return bool(fresh)

    def _slow_in(self, ratios: Mapping[int, float]) -> list[int]:
        return [rank for rank, ratio in ratios.items() if ratio >= self._factor]

    def _ratios(self, busy_s: Mapping[int, float]) -> dict[int, float]:
        ratios: dict[int, float] = {}
        for peers in self._peers or [list(busy_s)]:
            ranks = sorted((rank for rank in peers if rank in busy_s), key=busy_s.__getitem__)
            times = [busy_s[rank] for rank in ranks]
            if len(ranks) > 1:
                ratios |= {rank: times[at] / max(_median_without(times, at), 1e-9) for at, rank in enumerate(ranks)}
        return ratios

    def _finding(self, rank: int) -> Finding | None:
        evidence = self._always(rank) or self._repeatedly(rank)
        if not evidence:
            if self._found_at.pop(rank, None) is not None:
                self._forget(rank)
            return None
        since = self._found_at.setdefault(rank, self._seen)
        action: Action = "avoid" if self._seen - since >= AVOID_AFTER * self._steps else "alarm"
        if not self._latch.rises((rank, action), is_wrong=True):
            return None
        why = (
            f"rank {rank} takes {evidence['factor']:.1f} times as long as its peers for its own work: slow in "
            f"{evidence['slow_steps']} of {evidence['steps']} steps"
        )
        return Finding("straggler", action, why, (rank,), evidence)

    def _forget(self, rank: int) -> None:
        """Forget the slow steps of a rank that is no longer slow."""
        for step in self._window:
            step.ratios.pop(rank, None)
        self._slow[rank] = 0
        self._latch.rises((rank, "alarm"), is_wrong=False)
        self._latch.rises((rank, "avoid"), is_wrong=False)

    def _always(self, rank: int) -> dict[str, float]:
        if 2 * self._slow[rank] < self._steps:
            return {}  # nearly always: look no further
        steps: list[_Step] = []
        for step in reversed(self._window):
            if len(steps) >= self._steps and steps[0].at_s - steps[-1].at_s >= self._seconds:
                break
            steps.append(step)
        evidence = self._evidence(rank, steps)
        is_enough = evidence["steps"] >= self._steps and steps[0].at_s - steps[-1].at_s >= self._seconds
        if not is_enough or 2 * evidence["slow_steps"] <= evidence["steps"]:
            return {}
        slow, in_all = int(evidence["slow_steps"]), sum(len(self._slow_in(step.ratios)) for step in steps)
        return evidence if chance_of(slow, in_all, len(steps[0].ratios)) <= BY_CHANCE else {}

    def _repeatedly(self, rank: int) -> dict[str, float]:
        if (
            not self._slow[rank]
            or chance_of(self._slow[rank], self._in_all, len(self._window[-1].ratios)) > LONG_BY_CHANCE
        ):
            return {}
        lately = islice(reversed(self._window), self._steps)
        if not any(step.ratios.get(rank, 0.0) >= self._factor for step in lately):
            return {}
        evidence = self._evidence(rank, self._window)
        spans_enough = self._window[-1].at_s - self._window[0].at_s >= self._seconds
        is_enough = spans_enough and evidence["steps"] >= self._steps and evidence["factor"] >= 1 + COSTS
        return evidence if is_enough else {}

    def _evidence(self, rank: int, steps: Collection[_Step]) -> dict[str, float]:
        ratios = [step.ratios[rank] for step in steps if rank in step.ratios]
        return {
            "factor": round(sum(min(ratio, MOST) for ratio in ratios) / max(1, len(ratios)), 2),
            "slow_steps": sum(ratio >= self._factor for ratio in ratios),
            "steps": len(ratios),
            "last_step": self._last,
        }


def _median_without(times: Sequence[float], at: int) -> float:
    """Return the median of ascending `times` without the one at index `at`."""
    others = len(times) - 1
    low, high = ((i if i < at else i + 1) for i in ((others - 1) // 2, others // 2))
    return (times[low] + times[high]) / 2


def chance_of(hits: int, of: int, ranks: int) -> float:
    """Return the chance that any of `ranks` gets `hits` or more of `of` things that are distributed at random.

    The tail of a binomial distribution by its largest term and a geometric series, an upper bound; 1 where `hits` is no
    more than its share.
    """
    if ranks < 2 or hits <= of / ranks:
        return 1.0
    p = 1 / ranks
    log_term = (
        math.lgamma(of + 1) - math.lgamma(hits + 1) - math.lgamma(of - hits + 1)
        + hits * math.log(p) + (of - hits) * math.log1p(-p)
    )  # fmt: skip
    ratio = (of - hits) / (hits + 1) * p / (1 - p)
    return min(1.0, ranks * math.exp(log_term) / (1 - ratio))
