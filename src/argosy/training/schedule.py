"""The learning rate of each step."""

from __future__ import annotations

import math

from argosy.config.optimizer import ScheduleConfig
from argosy.config.schema import RunConfig


def learning_rate(run: RunConfig, step: int, steps: int | None) -> float:
    """Return the learning rate at 0-based `step` of `steps`; see `learning_rate_factor`."""
    return run.optimizer.lr * learning_rate_factor(step, steps, run.schedule)


def learning_rate_factor(step: int, steps: int | None, config: ScheduleConfig) -> float:
    """Return the share of the peak learning rate at 0-based `step` of `steps`.

    During warmup it does not depend on `steps`, which may still be None (a time budget fixes it later).
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if steps is None:
        return 1.0
    match config.kind:
        case "constant":
            return 1.0
        case "cosine":
            done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
            return _between(config.final_ratio, 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        case "wsd":
            decay_steps = max(1, round(config.decay_fraction * steps))
            return _between(config.final_ratio, min(1.0, (steps - step) / decay_steps))


def _between(final: float, share: float) -> float:
    return final + (1 - final) * share
