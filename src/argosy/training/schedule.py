"""The length of a run, if it was given in minutes, the time to its end, and the learning rate of each step."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

import torch

from argosy.config.optimizer import ScheduleConfig
from argosy.config.schema import RunConfig
from argosy.observe.report import SLOW_STEP
from argosy.parallel.world import World


def learning_rate(run: RunConfig, step: int, steps: int | None) -> float:
    """Return the learning rate at 0-based `step` of `steps`; see `learning_rate_factor`."""
    return run.optimizer.lr * learning_rate_factor(step, steps, run.schedule)


def learning_rate_factor(step: int, steps: int | None, config: ScheduleConfig) -> float:
    """Return the share of the peak learning rate at 0-based `step` of `steps`.

    During warmup it does not depend on `steps`, which may still be None (a time budget fixes it later).
    """
    warmup = config.warmup_of(steps)
    if step < warmup:
        return (step + 1) / warmup
    if steps is None:
        return 1.0
    match config.kind:
        case "constant":
            return 1.0
        case "cosine":
            done = (step - warmup) / max(1, steps - warmup)
            return _between(config.final_ratio, 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        case "wsd":
            decay_steps = max(1, round(config.decay_fraction * steps))
            return _between(config.final_ratio, min(1.0, (steps - step) / decay_steps))


def _between(final: float, share: float) -> float:
    return final + (1 - final) * share


SLACK = 0.92
"""Share of the budget for steps and evaluations; saves and the sample at the end take the rest."""
STARTING_STEPS, COMPILING_STEPS = 1, 2
"""First steps of a world, which say nothing of those to come: they fill caches, or compile."""
FORWARD = 0.4
"""About the time of a forward pass over that of a training step on as many tokens."""


class Pace:
    """The number of steps, and the time to the end.

    A run given in minutes gets its number of steps once, at the end of warmup, from the speed so far. Until then
    the learning rate does not depend on it, so a resumed run, which takes the number over, repeats the same steps.
    """

    def __init__(self, run: RunConfig, held_out_tokens: int = 0, compiles: bool = False):
        """`held_out_tokens`: the tokens that an evaluation reads. `compiles`: the first steps compile the model."""
        self.steps: int | None = run.train.steps or None
        self._batches = run.train.batches
        self._decide_at = run.schedule.warmup_of(self.steps)
        self._budget_s, self._pause_at = run.train.minutes * 60, run.train.pause_at
        self._began = time.monotonic()
        self._recent: deque[float] = deque(maxlen=20)
        self._steady: deque[float] = deque(maxlen=20)
        self._first_steps_left = COMPILING_STEPS if compiles else STARTING_STEPS
        evaluation = FORWARD * held_out_tokens / run.tokens_per_step  # in steps' time
        self._evaluation_per_step = evaluation / run.evaluate.every_steps if run.evaluate.every_steps else 0.0

    def took(self, step_s: float, step: int = 0) -> None:
        """Note how long a step took, all of it. `step`: its number, of which the size of its batch follows."""
        self._recent.append(step_s)
        if self._first_steps_left:
            self._first_steps_left -= 1
        else:
            self._steady.append(step_s * self._batches.largest / self._batches.at(step))

    def go_on(self, before_s: float) -> None:
        """Take off the budget what the steps have taken that earlier worlds made."""
        self._began -= before_s

    def is_paused(self, done: int) -> bool:
        """True if the run is to stop after `done` steps, for now (train.pause_at)."""
        return 0 < self._pause_at <= done

    def is_over(self, done: int) -> bool:
        """True if no step comes after `done` steps, for now or for good."""
        return self.is_paused(done) or (self.steps is not None and done >= self.steps)

    @property
    def step_s(self) -> float | None:
        """Median seconds of the recent steps; None before the first."""
        return statistics.median(self._recent) if self._recent else None

    def decide_length(self, done: int, world: World) -> int | None:
        """Turn the budget of minutes into a number of steps, if `done` steps are enough to tell, and it is undecided.

        All processes of `world` call it together, and get the same. Returns the number if it was decided now.
        """
        steps = self.steps_if_due(done)
        if steps is not None:
            first = torch.tensor(steps if world.is_first else 0, device=world.device)
            self.steps = steps = int(world.sum(first))
        return steps

    def steps_if_due(self, done: int) -> int | None:
        """Return the number of steps, if it is undecided and `done` steps are enough to tell."""
        if self.steps is not None or done < self._decide_at or not self._recent:  # no step may have counted yet
            return None
        left_s = SLACK * self._budget_s - (time.monotonic() - self._began)
        step_s = statistics.median(self._recent) * (1 + self._evaluation_per_step)
        return done + max(1, int(left_s / step_s))

    def left_s(self, done: int) -> float | None:
        """Return the seconds to the end at the recent speed, without slow steps (mostly those that compiled).

        None as long as only first steps were made.
        """
        if self.steps is None:
            return max(0.0, self._budget_s - (time.monotonic() - self._began))
        if not self._steady:
            return None if done < self.steps else 0.0
        slow = SLOW_STEP * statistics.median(self._steady)
        step_s = statistics.mean(s for s in self._steady if s <= slow)
        left = self._batches.steps_like(self.steps - 1, done, self.steps)  # smaller batches take less time
        return left * step_s * (1 + self._evaluation_per_step)
