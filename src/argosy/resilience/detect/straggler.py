"""A straggler: a rank that is slower than its peers, always or repeatedly.

The time of a rank's own work in a step, without waiting for others, over the work that its plan gives it (microbatches,
and layers where peers have unlike ones), is compared with the median of its peers in the same step: what slows all of
them down, a longer batch or a busy machine, blames none, and neither does a larger share of the work. A step in which a
rank takes `factor` times as long counts against it. Noise makes slow steps too, perhaps with heavy tails, but spreads
them evenly over ranks, so that the test is how unevenly they fall:

- *always*: most of the last `steps` steps are slow, and so many more than of other ranks that a random distribution
  would do so with a chance of 10^-5;
- *repeatedly*: the same in a window ten times as long, with a chance of 10^-8, and the rank takes a tenth longer than
  its peers in total.

A rank that stays slow for four times as long after it was found should be avoided, if the others wait for it: one whose
share of the work is as small as its speed holds nobody up.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from argosy.plan.dealing import RankWork
from argosy.resilience.detect.finding import Action, Finding, Latch
from argosy.resilience.detect.sample import Flags, Sample, StepTimes

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
    at_s: float
    ratios: np.ndarray
    """Rank -> its time for a unit of work over the median of its peers'; NaN for ranks for which the step does not
    count. In fp32, since a window has hundreds of steps."""
    holds: np.ndarray
    """Rank -> its time of the step over that median, whatever it had to do."""


class StragglerDetector:
    """Watch the ranks of a world; peers are ranks that do the same work, by default all."""

    def __init__(self, factor: float = 1.5, steps: int = 20, seconds: float = 10.0):
        """Arguments as the keys of [resilience]: slow is `factor` times; windows have `steps` steps and `seconds`."""
        self._factor, self._steps, self._seconds = factor, steps, seconds
        self._generation = -1
        self._start(-1, 0)

    def observe(self, sample: Sample, work: RankWork | None = None) -> list[Finding]:
        """Return what is found in the newest sample. `work` says what ranks do in a microbatch; None: all the same."""
        if sample.size < 2:
            return []
        if (sample.generation, sample.size) != (self._generation, len(self._slow)):
            self._start(sample.generation, sample.size)
        self._work = work if work is not None and len(work.least) == sample.size else RankWork.alike(sample.size)
        for times in sample.took:
            self._take_in(times, sample.at_s)
        if not sample.took or not self._window:
            return []
        self._in_all = int(self._slow.sum())
        return [finding for rank in self._suspects() if (finding := self._finding(rank)) is not None]

    def _start(self, generation: int, ranks: int) -> None:
        self._generation, self._seen, self._last = generation, 0, -1
        self._window: deque[_Step] = deque()
        self._slow = np.zeros(ranks, dtype=np.int64)
        """Rank -> how many steps of the window it was slow in."""
        self._in_all = 0
        self._latch = Latch()
        self._found_at: dict[int, int] = {}

    def _take_in(self, times: StepTimes, at_s: float) -> None:
        """Add a step that all ranks have finished."""
        self._seen, self._last = self._seen + 1, times.step
        if self._seen > SKIPPED:
            ratios, holds = self._work.over_peers(times.busy_s, times.microbatches)
            step = _Step(at_s, ratios.astype(np.float32), holds.astype(np.float32))
            self._window.append(step)
            self._slow += self._slow_in(step)
        # The window has this many steps, or more if they span too little time.
        while len(self._window) > LONG * self._steps and at_s - self._window[1].at_s >= LONG * self._seconds:
            self._slow -= self._slow_in(self._window.popleft())

    def _slow_in(self, step: _Step) -> Flags:
        return step.ratios >= self._factor  # NaN is not

    def _suspects(self) -> list[int]:
        """Return the ranks that a look is worth: those found before, and those that were slow too often for chance."""
        enough = min(_least(self._in_all, _counted(self._window[-1]), LONG_BY_CHANCE), -(-self._steps // 2))
        often = np.flatnonzero(self._slow >= max(1, enough)).tolist()
        return sorted({*often, *self._found_at})

    def _finding(self, rank: int) -> Finding | None:
        evidence = self._always(rank) or self._repeatedly(rank)
        if not evidence:
            if self._found_at.pop(rank, None) is not None:
                self._forget(rank)
            return None
        since = self._found_at.setdefault(rank, self._seen)
        lasts = self._seen - since >= AVOID_AFTER * self._steps
        action: Action = "avoid" if lasts and evidence["step_factor"] >= 1 + COSTS else "alarm"
        if not self._latch.rises((rank, action), is_wrong=True):
            return None
        why = (
            f"rank {rank} takes {evidence['factor']:.1f} times as long as its peers for the same work: slow in "
            f"{evidence['slow_steps']} of {evidence['steps']} steps"
        )
        return Finding("straggler", action, why, (rank,), evidence)

    def _forget(self, rank: int) -> None:
        """Forget the slow steps of a rank that is no longer slow."""
        for step in self._window:
            step.ratios[rank] = np.nan
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
        slow, in_all = int(evidence["slow_steps"]), sum(int(self._slow_in(step).sum()) for step in steps)
        return evidence if chance_of(slow, in_all, _counted(steps[0])) <= BY_CHANCE else {}

    def _repeatedly(self, rank: int) -> dict[str, float]:
        slow = int(self._slow[rank])
        if not slow or chance_of(slow, self._in_all, _counted(self._window[-1])) > LONG_BY_CHANCE:
            return {}
        lately = islice(reversed(self._window), self._steps)
        if not any(step.ratios[rank] >= self._factor for step in lately):
            return {}
        evidence = self._evidence(rank, self._window)
        spans_enough = self._window[-1].at_s - self._window[0].at_s >= self._seconds
        is_enough = spans_enough and evidence["steps"] >= self._steps and evidence["factor"] >= 1 + COSTS
        return evidence if is_enough else {}

    def _evidence(self, rank: int, steps: Collection[_Step]) -> dict[str, float]:
        counted = [step for step in steps if not np.isnan(step.ratios[rank])]
        ratios = [float(step.ratios[rank]) for step in counted]
        return {
            "factor": _mean(ratios),
            "step_factor": _mean([float(step.holds[rank]) for step in counted]),
            "slow_steps": sum(ratio >= self._factor for ratio in ratios),
            "steps": len(ratios),
            "last_step": self._last,
        }


def _mean(ratios: Sequence[float]) -> float:
    return round(sum(min(ratio, MOST) for ratio in ratios) / max(1, len(ratios)), 2)


def _counted(step: _Step) -> int:
    """Return how many ranks a step counts for."""
    return int(np.count_nonzero(~np.isnan(step.ratios)))


def _least(of: int, ranks: int, chance: float) -> int:
    """Return the least number of hits whose `chance_of` is at most `chance`."""
    return bisect_left(range(of + 1), True, key=lambda hits: chance_of(hits, of, ranks) <= chance)


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
