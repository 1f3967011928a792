"""When a run gives up: failures without progress in between are counted, and a crash that comes again is recognised."""

from __future__ import annotations

from argosy.errors import Poisoned, Retryable
from argosy.supervise.nodes import Cause
from argosy.supervise.orders import FinishRun


class Failures:
    """The failures of a run since it last made progress."""

    def __init__(self, max_restarts: int):
        self._max_restarts, self._failures = max_restarts, 0
        self._step = self._safe_step = -1
        self._last_crash: tuple[str, int] | None = None
        self._last_crash_generation = 0

    def made_step(self, step: int, safe_step: int) -> None:
        """The run is in `step`, and would go back to `safe_step` at most; -1: not known.

        It makes progress if either is further than ever: steps that are repeated do not count, unless the next failure
        costs fewer of them.
        """
        is_first = self._step < 0  # that this coordinator hears of: it does not know what was before
        if not is_first and (step > self._step or safe_step > self._safe_step):
            self._failures = 0
        self._step, self._safe_step = max(step, self._step), max(safe_step, self._safe_step)

    def count(self, cause: Cause, generation: int, is_same: bool = False) -> FinishRun | None:
        """Count a failure. Return how the run ends if going on would only repeat it, else None.

        is_same: it is a part of the failure that was counted last; it may still be a crash that was seen before.
        """
        crash, is_repeated = (cause.why, cause.step), generation > self._last_crash_generation
        if cause.is_own and cause.step >= 0 and crash == self._last_crash and is_repeated:
            return FinishRun(Poisoned.exit_code, f"the same crash twice at step {cause.step}: {cause.why}")
        self._last_crash, self._last_crash_generation = crash, generation
        self._failures += not is_same
        if self._failures <= self._max_restarts:
            return None
        times = f"{self._failures} times (launch.max_restarts = {self._max_restarts})"
        why = f"the workers died {times} without making progress; the last time: {cause.why}"
        return FinishRun(Retryable.exit_code, why)
