"""How often the state is copied to host memory: so often that copies and what is lost between them cost least.

With copies that hold training up for c seconds, and a failure every M seconds on average, copies are made every
sqrt(2 c M) seconds of work (Young 1974; to higher order Daly 2006: `plan.cost.goodput`), or more often as long as they
take no more than a thousandth of the time. c is measured with each copy, M follows from the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from argosy.plan.cost.goodput import copy_interval_s

TOLD_AGAIN = 2.0
"""The interval is told of again when it has changed by this factor."""


class CopyPace:
    """When a copy is due. One rank asks it; the others hear of it in the step's exchange (`training.step.Wishes`)."""

    def __init__(
        self, every_steps: int | Literal["auto"], mtbf_s: float, predicted_s: float, tell: Callable[..., None]
    ):
        """`mtbf_s`: seconds between failures of the job; `predicted_s`: what a copy takes, until one was measured.

        tell: hears of the interval that was chosen, as facts of an event.
        """
        self._fixed = None if every_steps == "auto" else every_steps
        self._mtbf_s, self._predicted_s, self._tell = mtbf_s, predicted_s, tell
        self._made: int | None = None
        self._told: int | None = None

    def is_due(self, done: int, step_s: float | None, measured_s: float | None) -> bool:
        """Whether the state after `done` steps is to be copied.

        step_s: of a step, as a rule; measured_s: what the newest copy took; None: not known yet. By the measure, the
        first is due at once: it shows what copies take, and a new world may have lost those of the one before.
        """
        if self._fixed is not None:
            return done % self._fixed == 0
        if self._made is None or step_s is None:
            return self._made is None
        return done - self._made >= self._every(step_s, measured_s)

    def made(self, done: int) -> None:
        """The state after `done` steps was copied."""
        self._made = done

    def _every(self, step_s: float, measured_s: float | None) -> int:
        copy_s = self._predicted_s if measured_s is None else measured_s
        seconds = float(copy_interval_s(copy_s, self._mtbf_s))
        every = max(1, round(seconds / step_s))
        told = self._told
        if measured_s is not None and (told is None or not told / TOLD_AGAIN < every < told * TOLD_AGAIN):
            self._told = every
            facts: dict[str, Any] = {"copy_s": round(copy_s, 6), "step_s": round(step_s, 6), "mtbf_s": self._mtbf_s}
            self._tell("memory_interval", steps=every, seconds=round(every * step_s, 3), **facts)
        return every
