"""Whether a step may change the weights: decided from numbers that all processes share, hence alike on all."""

from __future__ import annotations

import math
from enum import Enum

from argosy.errors import RunFailed

MOST_IN_A_ROW = 5


class Verdict(Enum):
    """What becomes of a step."""

    COMMIT = "commit"
    SKIP = "skip"


class Judge:
    """Skips steps whose loss or gradient norm is not finite, and ends the run if that does not stop."""

    def __init__(self) -> None:
        self._bad_in_a_row = 0

    def rule(self, step: int, loss: float, gradient_norm: float) -> Verdict:
        """Raises: RunFailed after `MOST_IN_A_ROW` bad steps in a row."""
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            self._bad_in_a_row = 0
            return Verdict.COMMIT
        self._bad_in_a_row += 1
        if self._bad_in_a_row >= MOST_IN_A_ROW:
            raise RunFailed(
                f"loss {loss}, gradient norm {gradient_norm} at step {step}: the last {MOST_IN_A_ROW} steps were not "
                "finite, and were skipped. Try a smaller optimizer.lr, more schedule.warmup_steps, or plan = "
                '"auto,precision=fp32".'
            )
        return Verdict.SKIP
