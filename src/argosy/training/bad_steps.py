"""The bad-step policy: it decides whether a step may change the weights, from numbers that are the same on all ranks.

A step is bad if its loss or its gradient's norm is not finite, or far above those of the steps before it. "Far" is
measured robustly, so that neither a spike nor a slow change moves the measure: the distance from the median of a window
of applied steps, in standard deviations as their median absolute deviation estimates them (Leys et al. 2013,
"Detecting outliers: do not use standard deviation around the mean"). Values far below are never bad. Norms vary by
factors, so their logarithms are compared. PaLM (Chowdhery et al. 2022, section 5.1) went back to a checkpoint before a
spike and skipped the data around it, which did not bring the spike back: hence the policy "rewind". ZClip (Kumar et
al. 2025) and AdaGC (Wang et al. 2025) see spikes of the norm by z-scores as well, and clip instead; here
optimizer.grad_clip does that, and the thresholds are such that only what no clipping mends is left.

A step that looks bad is done again once with the same samples: a bit that flipped on the way is gone then. Only if it
looks bad again is the step bad.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from argosy.config.schema import SIGMAS_OF_MAD, ResilienceConfig

MOST_BAD_STEPS = 5
"""The run ends after so many bad steps in a row."""
MOST_REWINDS = 2
"""A run goes back to the same step so often; then it ends."""
LEAST_LOSS_SIGMA = 0.01
"""The least standard deviation of losses, over their median: where the loss hardly varies, 1 % is still no spike."""
LEAST_NORM_SIGMA = 0.1
"""The least standard deviation of the norm's logarithm: 10 % is no outlier."""
BAD_STEPS_REMEDY = (
    'Try a smaller optimizer.lr, more schedule.warmup_steps, or plan = "auto,precision=fp32"; if these numbers are as '
    "they should be, a larger resilience.loss_spike_sigmas or norm_outlier_sigmas."
)

Reason = Literal["not_finite", "norm_outlier", "loss_spike"]


class Action(Enum):
    """The decision about a step."""

    APPLY = "apply"
    """Its gradient is applied."""
    RETRY = "retry"
    """Its gradient is dropped, and the step is done again with the same samples."""
    SKIP = "skip"
    """Its gradient is dropped, its samples are skipped, and the step is done with the next ones."""
    REWIND = "rewind"
    """Skip the step, and go back to a checkpoint."""
    STOP = "stop"
    """The run ends."""


@dataclass(frozen=True)
class BadStep:
    """The fault of a step that looks bad."""

    step: int
    """0-based."""
    reason: Reason
    loss: float
    gradient_norm: float
    largest_loss: float
    """The largest that would not have been bad."""
    largest_gradient_norm: float
    """Likewise."""
    in_a_row: int
    """Bad steps in a row so far, with this one if it was done twice."""


@dataclass(frozen=True)
class BadStepCounts:
    """Counts of one world's policy, from which the next goes on."""

    decisions: int
    in_a_row: int
    first_try: BadStep | None
    rewinds: dict[int, int]
    """Step -> how often the run went back there."""


class BadStepPolicy:
    """Tells bad steps from good ones. It compares with a window of applied steps, which `remember` restores."""

    def __init__(
        self,
        settings: ResilienceConfig,
        stage_of: Callable[[int], int] = lambda step: 0,
        counted: BadStepCounts | None = None,
    ):
        """`stage_of` gives the number of the mixture that a step's data come from: losses of two are not compared.

        counted: what the policy of an earlier world has counted (`counts`).
        """
        self._settings, self._stage_of = settings, stage_of
        self._stage: int | None = None
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self._log_norms: deque[float] = deque(maxlen=settings.spike_window)
        self._compares_from = min(settings.spike_warmup_steps, settings.spike_window)
        self._decisions = 0
        self._in_a_row = 0
        self._first_try: BadStep | None = None
        self._rewinds: Counter[int] = Counter()
        if counted is not None:
            self.load_counts(counted)

    def decide(self, step: int, loss: float, gradient_norm: float) -> tuple[Action, BadStep | None]:
        """Decide what is done with `step` (0-based), and return what is wrong with it, if anything.

        A step that is applied although its first try looked bad is returned with what was wrong with that.
        """
        largest_loss, largest_norm = self.limits(step)
        reason = _reason(loss, gradient_norm, largest_loss, largest_norm)
        first_try = self._first_try if self._first_try is not None and self._first_try.step == step else None
        self._decisions += 1
        self._first_try = None
        if reason is None:
            self._in_a_row = 0
            self._add(step, loss, gradient_norm)
            return Action.APPLY, first_try
        if first_try is not None:
            self._in_a_row += 1
        bad = BadStep(step, reason, loss, gradient_norm, largest_loss, largest_norm, self._in_a_row)
        if first_try is None:
            self._first_try = bad
            return Action.RETRY, bad
        return self._action(), bad

    def limits(self, step: int) -> tuple[float, float]:
        """Return the largest loss and gradient norm of `step` that are not bad; infinite while there is no telling."""
        if len(self._losses) < self._compares_from or self._stage_of(step) != self._stage:
            return math.inf, math.inf
        least_sigma = LEAST_LOSS_SIGMA * abs(statistics.median(self._losses))
        loss = _limit(self._losses, self._settings.loss_spike_sigmas, least_sigma)
        log_norm = _limit(self._log_norms, self._settings.norm_outlier_sigmas, LEAST_NORM_SIGMA)
        return loss, math.exp(min(log_norm, 700.0))

    def remember(self, steps: Iterable[tuple[int, float, float]]) -> None:
        """Compare with these applied steps alone: (step, loss, gradient norm) of each, in order."""
        self._losses.clear()
        self._log_norms.clear()
        for step, loss, norm in steps:
            self._add(step, loss, norm)

    def forget_bad_steps(self) -> None:
        """Start the count of bad steps in a row again: the state is an older one, and those are done again."""
        self._in_a_row, self._first_try = 0, None

    def rewound(self, step: int) -> bool:
        """Note that the run went back to `step`. Returns False if that was too often: it is not the data then."""
        self.forget_bad_steps()
        self._rewinds[step] += 1
        return self._rewinds[step] <= MOST_REWINDS

    def counts(self) -> BadStepCounts:
        return BadStepCounts(self._decisions, self._in_a_row, self._first_try, dict(self._rewinds))

    def load_counts(self, counted: BadStepCounts) -> None:
        """Go on from what another policy has counted."""
        self._decisions, self._in_a_row = counted.decisions, counted.in_a_row
        self._first_try, self._rewinds = counted.first_try, Counter(counted.rewinds)

    def load_newest(self, everyone: Iterable[BadStepCounts]) -> None:
        """Go on from what the ranks of a new world have counted: the newest counts, as new processes have none."""
        self.load_counts(max(everyone, key=lambda counted: counted.decisions))

    def _add(self, step: int, loss: float, norm: float) -> None:
        if (stage := self._stage_of(step)) != self._stage:
            self._stage = stage
            self._losses.clear()
            self._log_norms.clear()
        self._losses.append(loss)
        self._log_norms.append(math.log(max(norm, 1e-30)))

    def _action(self) -> Action:
        policy, rewind_after = self._settings.on_bad_step, self._settings.rewind_after
        # Without a checkpoint to go back to, steps are skipped after the one that asked for it.
        most = max(MOST_BAD_STEPS, rewind_after + 1) if policy == "rewind" else MOST_BAD_STEPS
        if policy == "stop" or self._in_a_row >= most:
            return Action.STOP
        return Action.REWIND if policy == "rewind" and self._in_a_row == rewind_after else Action.SKIP


def _reason(loss: float, gradient_norm: float, largest_loss: float, largest_norm: float) -> Reason | None:
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        return "not_finite"
    if gradient_norm > largest_norm:
        return "norm_outlier"
    return "loss_spike" if loss > largest_loss else None


def _limit(values: Sequence[float], sigmas: float, least_sigma: float) -> float:
    if not sigmas:
        return math.inf
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return middle + sigmas * max(SIGMAS_OF_MAD * deviation, least_sigma)
