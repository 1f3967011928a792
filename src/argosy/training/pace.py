"""How long a run is, when it was given in minutes, and how long it still takes."""

from __future__ import annotations

import statistics
import time
from collections import deque

from argosy.config.schema import RunConfig

SLACK = 0.92
"""Share of the remaining budget given to steps; evaluations, saves and the sample at the end take the rest."""


class Pace:
    """The number of steps, and the time to the end.

    A run given in minutes gets its number of steps once, at the end of warmup, from the speed so far. Until then
    the learning rate does not depend on it, so a resumed run, which takes the number over, repeats the same steps.
    """

    def __init__(self, run: RunConfig):
        self.steps: int | None = run.train.steps or None
        self._decide_at = run.schedule.warmup_steps
        self._budget_s = run.train.minutes * 60
        self._began = time.monotonic()
        self._recent: deque[float] = deque(maxlen=20)

    def took(self, step_s: float) -> None:
        """Hear how long a step took, all of it."""
        self._recent.append(step_s)

    def steps_if_due(self, done: int) -> int | None:
        """The number of steps, if it is undecided and now is the time (`done` steps are done)."""
        if self.steps is not None or done < self._decide_at:
            return None
        left_s = SLACK * self._budget_s - (time.monotonic() - self._began)
        return done + max(1, int(left_s / statistics.median(self._recent)))

    def left_s(self, done: int) -> float:
        """Seconds to the end at the recent speed."""
        if self.steps is None:
            return max(0.0, self._budget_s - (time.monotonic() - self._began))
        return (self.steps - done) * statistics.mean(self._recent) if self._recent else 0.0
