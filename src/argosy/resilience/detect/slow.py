"""Slow ranks, slow links and stages that do not fit their ranks: what makes steps take longer.

A straggler is a rank that is slower than its peers, always or repeatedly.

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

A link became slow if steps take longer than before, and not because of any rank's own work. A step without the own work
of its slowest rank is time that all ranks wait: for collectives, and for each other's data. It is compared with the
run's own best under the same plan: a step that is longer because of waiting counts against the links; a slow rank, a
longer batch or a busy machine does not. Waiting inside layers (tensor and context parallelism, fully sharded
parameters) counts too, but for that of experts, which is timed as the ranks' own work. With another batch
(train.batch_ramp) the comparison begins anew.

Pipeline stages may have layers that do not fit the speed of their ranks. A rank's own work of a step, in the layers
that it has, is its speed. With the speeds of all follows the deal of layers whose slowest rank ends first, and how long
a step would take under it (`plan.dealing`). It is told of if it saves `DEAL_LEAST_SAVED` of the step, by the medians of
a window of steps and in most of these steps by themselves: noise spreads over all ranks, so that no one deal saves that
much in many steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

import numpy as np

from argosy.config.schema import RunConfig
from argosy.observe.heartbeat import LAST_STEPS
from argosy.plan.dealing import COLD_STEPS, LEAST_HOLD, PipelineWork, RankWork
from argosy.plan.plan import Plan
from argosy.resilience.detect.finding import Action, Finding, Flags, Latch, Sample, StepTimes, Times

LONG_WINDOW = 10
"""The window for repeatedly slow ranks, over that for ranks that are always slow."""
BY_CHANCE, LONG_BY_CHANCE = 1e-5, 1e-8
MOST_COUNTED = 10.0
"""A step counts at most as this many times its peers': a single one of a hundred times is an accident."""
AVOID_AFTER = 4


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
        if self._seen > COLD_STEPS:
            ratios, holds = self._work.over_peers(times.busy_s, times.microbatches)
            step = _Step(at_s, ratios.astype(np.float32), holds.astype(np.float32))
            self._window.append(step)
            self._slow += self._slow_in(step)
        # The window has this many steps, or more if they span too little time.
        while (
            len(self._window) > LONG_WINDOW * self._steps and at_s - self._window[1].at_s >= LONG_WINDOW * self._seconds
        ):
            self._slow -= self._slow_in(self._window.popleft())

    def _slow_in(self, step: _Step) -> Flags:
        return step.ratios >= self._factor  # NaN is not

    def _suspects(self) -> list[int]:
        """Return the ranks that a look is worth: those found before, and those that were slow too often for chance."""
        enough = min(_least(self._in_all, _counted(self._window[-1])), -(-self._steps // 2))
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
        action: Action = "avoid" if lasts and evidence["step_factor"] >= 1 + LEAST_HOLD else "alarm"
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
        is_enough = spans_enough and evidence["steps"] >= self._steps and evidence["factor"] >= 1 + LEAST_HOLD
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
    return round(sum(min(ratio, MOST_COUNTED) for ratio in ratios) / max(1, len(ratios)), 2)


def _counted(step: _Step) -> int:
    """Return how many ranks a step counts for."""
    return int(np.count_nonzero(~np.isnan(step.ratios)))


def _least(of: int, ranks: int) -> int:
    """Return the least number of hits whose `chance_of` is at most `LONG_BY_CHANCE`."""
    return bisect_left(range(of + 1), True, key=lambda hits: chance_of(hits, of, ranks) <= LONG_BY_CHANCE)


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


GROWN_WAIT = 0.5
"""Waiting must have grown by this share of a usual step."""
LASTING = 4
"""Number of windows for which it must last."""
SLOW_STEPS_SHARE = 0.75
"""Share of the steps in a window that must be slow, or in which another deal of layers must save time."""


@dataclass(frozen=True)
class _LinkStep:
    at_s: float
    took_s: float
    waited_s: float


class SlowLinkDetector:
    """Watch the steps of one world after the other."""

    def __init__(self, steps: int = 20, seconds: float = 10.0):
        """Arguments as the keys straggler_steps and straggler_s of [resilience]."""
        self._steps, self._seconds = steps, seconds
        self._plan, self._microbatches = "", 0.0
        self._usual: _LinkStep | None = None
        self._start(-1)

    @property
    def step_s(self) -> float | None:
        """The usual time of a step of this world; None until there were enough of them."""
        return self._typical.took_s if len(self._window) >= self._steps else None

    def observe(self, sample: Sample, took_s: Mapping[int, float], plan: str) -> list[Finding]:
        """Return what is found in the newest sample. `took_s`: step -> how long it took, for the newest steps."""
        if sample.generation != self.generation:
            self._start(sample.generation)
            if plan != self._plan:
                self._plan, self._usual = plan, None
        self._own |= {t.step: (float(t.busy_s.max()), float(t.microbatches.sum())) for t in sample.took}
        for step in sorted(self._own)[:-LAST_STEPS]:
            del self._own[step]
        fresh = sorted(self._own.keys() & took_s.keys())
        for step in fresh:
            own_s, microbatches = self._own.pop(step)
            if microbatches != self._microbatches:  # of a batch that grew all waits have grown
                self._microbatches, self._usual = microbatches, None
                self._window.clear()
            self._take_in(step, _LinkStep(sample.at_s, took_s[step], max(0.0, took_s[step] - own_s)))
        return self._findings() if fresh and len(self._window) >= self._steps else []

    def _start(self, generation: int) -> None:
        self.generation, self._seen, self._last = generation, 0, -1
        self._window: deque[_LinkStep] = deque()
        self._own: dict[int, tuple[float, float]] = {}
        """Step -> the longest own work of a rank, and the microbatches of all, for steps of which it is not known yet
        how long they took."""
        self._latch = Latch()

    def _take_in(self, number: int, step: _LinkStep) -> None:
        self._seen, self._last = self._seen + 1, number
        if self._seen > COLD_STEPS:
            self._window.append(step)
        while len(self._window) > LASTING * self._steps and step.at_s - self._window[1].at_s >= LASTING * self._seconds:
            self._window.popleft()

    @property
    def _typical(self) -> _LinkStep:
        """The median step of the newest window."""
        steps = list(islice(reversed(self._window), self._steps))
        return _LinkStep(steps[-1].at_s, median(s.took_s for s in steps), median(s.waited_s for s in steps))

    def _findings(self) -> list[Finding]:
        now = self._typical
        if self._usual is None or now.took_s < self._usual.took_s:
            self._usual = now
        usual, steps = self._usual, self._window
        slow = sum(step.waited_s - usual.waited_s >= GROWN_WAIT * usual.took_s for step in steps)
        spans = steps[-1].at_s - steps[0].at_s >= LASTING * self._seconds
        lasts = len(steps) >= LASTING * self._steps and spans and slow >= SLOW_STEPS_SHARE * len(steps)
        if not self._latch.rises("slow", is_wrong=lasts, is_right=slow < (1 - SLOW_STEPS_SHARE) * len(steps)):
            return []
        waited_s = median(step.waited_s for step in steps)
        evidence = {
            "factor": round(1 + (waited_s - usual.waited_s) / usual.took_s, 2),
            "step_s": round(now.took_s, 6),
            "usual_step_s": round(usual.took_s, 6),
            "waiting_s": round(waited_s, 6),
            "usual_waiting_s": round(usual.waited_s, 6),
            "slow_steps": slow,
            "steps": len(steps),
            "last_step": self._last,
        }
        why = (
            f"ranks wait {waited_s * 1e3:.0f} ms of a step for each other, and used to wait "
            f"{usual.waited_s * 1e3:.0f} ms: the links between them are slow, not their own work"
        )
        return [Finding("slow_link", "alarm", why, (), evidence)]


DEAL_LEAST_SAVED = 0.1
"""Share of the pipeline's time that another deal must save."""
MOST_WATCHED_WINDOWS = 16
"""Times the first window: after each finding twice as many steps are watched, up to that."""


@dataclass(frozen=True)
class _StageStep:
    number: int
    at_s: float
    stage_s: Times
    """Own seconds of each pipeline rank for a microbatch: of its slowest rank. Shape: (pp,)."""


class UnevenStagesDetector:
    """Watch the stages of one world after the other."""

    def __init__(self, run: RunConfig):
        """Windows are those of stragglers: resilience.straggler_steps and straggler_s."""
        self._model, self._seq_len = run.model, run.data.seq_len
        self._steps, self._seconds = run.resilience.straggler_steps, run.resilience.straggler_s
        self._watched = 1
        self._start(-1, "", 0)

    def observe(self, sample: Sample, plan: str) -> list[Finding]:
        """Return what is found in the newest sample of a world that is laid out by `plan`."""
        if (sample.generation, plan) != (self._generation, self._said):
            self._start(sample.generation, plan, sample.size)
        work = self._work
        if work is None:
            return []
        for times in sample.took:
            self._take_in(times, sample.at_s)
        if not sample.took or not self._is_full:
            return []
        found = self._finding(work)
        if found is not None:
            self._watched = min(2 * self._watched, MOST_WATCHED_WINDOWS)
            self._window.clear()
        return [] if found is None else [found]

    def _start(self, generation: int, said: str, size: int) -> None:
        self._generation, self._said, self._seen, self._microbatches = generation, said, 0, 0
        self._window: deque[_StageStep] = deque()
        plan = Plan.parse(said)
        is_one = plan.pp > 1 and plan.world_size == size and not plan.has_servers
        self._work = PipelineWork.of(plan, self._model, self._seq_len) if is_one else None

    def _take_in(self, times: StepTimes, at_s: float) -> None:
        assert self._work is not None
        self._seen += 1
        microbatches = int(times.microbatches.max())
        if microbatches != self._microbatches:  # another batch, or other shares
            self._window.clear()
            self._microbatches = microbatches
        if self._seen > COLD_STEPS:
            own_s = times.busy_s.reshape(self._work.plan.pp, -1).max(axis=1)
            self._window.append(_StageStep(times.step, at_s, own_s / microbatches))
        while len(self._window) > self._watched * self._steps and self._spans(1):
            self._window.popleft()

    def _spans(self, first: int) -> bool:
        return self._window[-1].at_s - self._window[first].at_s >= self._watched * self._seconds

    @property
    def _is_full(self) -> bool:
        return len(self._window) >= self._watched * self._steps and self._spans(0)

    def _finding(self, work: PipelineWork) -> Finding | None:
        each = np.array([step.stage_s for step in self._window])
        stage_s = np.median(each, axis=0)
        if not stage_s.min() > 0:
            return None
        dealt = work.dealt_by_speed(stage_s)
        if dealt is None:
            return None
        saved = float(self._saves(work, dealt, stage_s))
        if saved < DEAL_LEAST_SAVED or np.mean(self._saves(work, dealt, each) >= DEAL_LEAST_SAVED) < SLOW_STEPS_SHARE:
            return None
        of_layer = stage_s / work.units
        slowest = int(of_layer.argmax())
        factor = float(of_layer.max() / of_layer.min())
        evidence = {
            "factor": round(factor, 2),
            "stage_s": [round(float(seconds), 6) for seconds in stage_s],
            "microbatches": self._microbatches,
            "layers": ":".join(f"{n:.0f}" for n in work.layers),
            "steps": len(each),
            "last_step": self._window[-1].number,
        }
        why = (
            f"pipeline rank {slowest} takes {factor:.1f} times as long for a layer as the fastest: layers "
            f"{dealt.plan.layers} in place of {evidence['layers']} save {saved:.0%} of the "
            "pipeline's time"
        )
        return Finding("uneven_stages", "alarm", why, (), evidence)

    def _saves(self, now: PipelineWork, dealt: PipelineWork, stage_s: Times) -> Any:
        now_s = now.takes_s(stage_s, now, self._microbatches)
        return 1 - dealt.takes_s(stage_s, now, self._microbatches) / np.maximum(now_s, 1e-9)
