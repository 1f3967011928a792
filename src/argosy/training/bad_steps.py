"""Whether a step may change the weights: decided from numbers that all processes share, hence alike on all.

A step is bad if its loss or its gradient's norm is not finite, or far above those of the steps before it. "Far" is
measured robustly, so that neither a spike nor a slow change moves the measure: the distance from the median of a window
of committed steps, in standard deviations as their median absolute deviation estimates them (Leys et al. 2013,
"Detecting outliers: do not use standard deviation around the mean"). Only what lies above is judged. Norms vary by
factors, so their logarithms are compared. PaLM (Chowdhery et al. 2022, section 5.1) went back to a checkpoint before a
spike and skipped the data around it, which did not bring the spike back: hence the policy "rewind". ZClip (Kumar et
al. 2025) and AdaGC (Wang et al. 2025) see spikes of the norm by z-scores as well, and clip instead; here
optimizer.grad_clip does that, and the thresholds are such that only what no clipping mends is left.

What looks bad is done again once, with the same samples: a bit that flipped on the way is gone then. Only if it is bad
again is the step bad.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from argosy.config.schema import ResilienceConfig

MOST_IN_A_ROW = 5
"""Bad steps that a run skips one after the other before it ends."""
MOST_REWINDS = 2
"""How often a run goes back to the same step before it ends."""
SIGMAS_OF_MAD = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
LEAST_LOSS_SIGMA = 0.01
"""Of the median loss: where the loss hardly varies, what is 1 % off is still no spike."""
LEAST_NORM_SIGMA = 0.1
"""Of the norm's logarithm: likewise for 10 %."""
REMEDY = (
    'Try a smaller optimizer.lr, more schedule.warmup_steps, or plan = "auto,precision=fp32"; if these numbers are as '
    "they should be, a larger resilience.loss_spike_sigmas or norm_outlier_sigmas."
)


class Verdict(Enum):
    """What becomes of a step."""

    COMMIT = "commit"
    """Its gradient is applied."""
    RETRY = "retry"
    """Its gradient is dropped, and the step done again with the same samples."""
    SKIP = "skip"
    """Its gradient is dropped, its samples are skipped, and the step is done with the next ones."""
    REWIND = "rewind"
    """As SKIP, and the state goes back to a checkpoint."""
    STOP = "stop"
    """The run ends."""


class Reason(Enum):
    """What is wrong with a step."""

    NOT_FINITE = "not finite"
    NORM_OUTLIER = "of a gradient norm far above that of the steps before"
    LOSS_SPIKE = "of a loss far above that of the steps before"


@dataclass(frozen=True)
class Limits:
    """The largest loss and gradient norm that are not bad now; infinite where nothing is judged yet."""

    loss: float = math.inf
    gradient_norm: float = math.inf


@dataclass(frozen=True)
class Doubt:
    """What a step looked like at first, when it looked bad."""

    step: int
    reason: Reason
    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class Ruling:
    """A verdict, and why."""

    verdict: Verdict
    reason: Reason | None
    """None if nothing is wrong."""
    limits: Limits
    in_a_row: int
    """Bad steps until now, this one with them."""
    doubt: Doubt | None
    """What the same step looked like before it was done again with the same samples, if it was."""


@dataclass
class Counts:
    """What a judge counts; it goes on from one world to the next."""

    rulings: int = 0
    """In all: of two ranks' counts those of more rulings are the newer."""
    in_a_row: int = 0
    """Bad steps until now."""
    doubt: Doubt | None = None
    """Of the step that is being done again."""
    rewinds: Counter[int] = field(default_factory=Counter)
    """How often the run went back to a step."""


class BadStepPolicy:
    """Tells bad steps from good ones. It remembers the committed steps of a window, which `remember` brings back."""

    def __init__(
        self,
        settings: ResilienceConfig,
        stage_of: Callable[[int], int] = lambda step: 0,
        counts: Counts | None = None,
    ):
        """`stage_of`: number of the mixture that a step's data come from: losses of two are not to be compared.

        counts: what to count on from, in place.
        """
        self._settings, self._stage_of = settings, stage_of
        self._stage: int | None = None
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self._log_norms: deque[float] = deque(maxlen=settings.spike_window)
        self._judged_from = min(settings.spike_warmup_steps, settings.spike_window)
        self._counts = counts or Counts()

    def rule(self, step: int, loss: float, gradient_norm: float) -> Ruling:
        """What becomes of step `step` (0-based), whose loss and gradient norm are these."""
        counts, limits = self._counts, self.limits(step)
        reason = _reason(loss, gradient_norm, limits)
        doubt = counts.doubt if counts.doubt is not None and counts.doubt.step == step else None
        counts.rulings += 1
        counts.doubt = None
        if reason is None:
            counts.in_a_row = 0
            self._commit(step, loss, gradient_norm)
        elif doubt is None:
            counts.doubt = Doubt(step, reason, loss, gradient_norm)
            return Ruling(Verdict.RETRY, reason, limits, counts.in_a_row, None)
        else:
            counts.in_a_row += 1
        return Ruling(self._verdict(reason), reason, limits, counts.in_a_row, doubt)

    def go_on_from(self, everyone: Iterable[Counts]) -> None:
        """Count on from what the ranks of a new world have counted: from the newest, which new processes lack."""
        newest = max(everyone, key=lambda counts: counts.rulings)
        mine = self._counts
        mine.rulings, mine.in_a_row, mine.doubt = newest.rulings, newest.in_a_row, newest.doubt
        mine.rewinds = Counter(newest.rewinds)

    def rewound(self, step: int, steps: Iterable[tuple[int, float, float]]) -> bool:
        """The state is that after `step` steps again; `steps` as `remember` takes them.

        Returns whether the run may go on: not if it was there too often, as what is bad there is not the data.
        """
        self.went_back(steps)
        self._counts.rewinds[step] += 1
        return self._counts.rewinds[step] <= MOST_REWINDS

    def went_back(self, steps: Iterable[tuple[int, float, float]]) -> None:
        """The state is an older one, and what was bad after it is to come again; `steps` as `remember` takes them."""
        self._counts.in_a_row, self._counts.doubt = 0, None
        self.remember(steps)

    def remember(self, steps: Iterable[tuple[int, float, float]]) -> None:
        """Compare with these committed steps alone: (step, loss, gradient norm) of each, in order."""
        self._losses.clear()
        self._log_norms.clear()
        for step, loss, norm in steps:
            self._commit(step, loss, norm)

    def limits(self, step: int) -> Limits:
        """What the loss and the gradient norm of `step` may be at most."""
        if len(self._losses) < self._judged_from or self._stage_of(step) != self._stage:
            return Limits()
        least_sigma = LEAST_LOSS_SIGMA * statistics.median(self._losses)
        loss = _limit(self._losses, self._settings.loss_spike_sigmas, least_sigma)
        log_norm = _limit(self._log_norms, self._settings.norm_outlier_sigmas, LEAST_NORM_SIGMA)
        return Limits(loss, math.exp(min(log_norm, 700.0)))

    def _commit(self, step: int, loss: float, norm: float) -> None:
        if (stage := self._stage_of(step)) != self._stage:
            self._stage = stage
            self._losses.clear()
            self._log_norms.clear()
        self._losses.append(loss)
        self._log_norms.append(math.log(max(norm, 1e-30)))

    def _verdict(self, reason: Reason | None) -> Verdict:
        policy, rewind_after = self._settings.on_bad_step, self._settings.rewind_after
        if reason is None:
            return Verdict.COMMIT
        # Without a checkpoint to go back to, steps are skipped after the one that asked for it.
        most = max(MOST_IN_A_ROW, rewind_after + 1) if policy == "rewind" else MOST_IN_A_ROW
        if policy == "stop" or self._counts.in_a_row >= most:
            return Verdict.STOP
        return Verdict.REWIND if policy == "rewind" and self._counts.in_a_row == rewind_after else Verdict.SKIP


def _reason(loss: float, gradient_norm: float, limits: Limits) -> Reason | None:
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        return Reason.NOT_FINITE
    if gradient_norm > limits.gradient_norm:
        return Reason.NORM_OUTLIER
    return Reason.LOSS_SPIKE if loss > limits.loss else None


def _limit(values: Sequence[float], sigmas: float, least_sigma: float) -> float:
    if not sigmas:
        return math.inf
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return middle + sigmas * max(SIGMAS_OF_MAD * deviation, least_sigma)
