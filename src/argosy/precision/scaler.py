"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018): gradients too small for fp16 are carried as larger ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class LossScaler:
    """Finds the largest power of two that the loss can be multiplied by without gradients overflowing.

    Every factor is a power of two, so that scaling and unscaling round nothing. It decides from the norm of all
    gradients of all ranks, hence alike on every rank, with no collective of its own. With `growth_steps` = 0 the scale
    is no finding but a choice, and no part of the state: a run that goes on in another precision starts its own.
    """

    def __init__(self, scale: float = 2.0**16, growth_steps: int = 2000, floor: float = 1.0):
        self.scale = scale
        """What the loss is to be multiplied by, and the gradients and their norm divided by."""
        self._growth_steps, self._floor = growth_steps, floor
        self._good_steps = 0

    def update(self, gradient_norm: float) -> bool:
        """Whether the step's gradients may be applied; halves the scale if not, doubles it after `growth_steps` good.

        `gradient_norm`: global norm of the gradients, scaled or not: only whether it is finite counts.
        """
        if not math.isfinite(gradient_norm):
            self.scale = max(self.scale / 2, self._floor)
            self._good_steps = 0
            return False
        self._good_steps += 1
        if self._good_steps == self._growth_steps:
            self.scale *= 2
            self._good_steps = 0
        return True

    @property
    def is_at_floor(self) -> bool:
        """Whether the scale can fall no further: overflow is then the model's, not the scale's."""
        return self.scale <= self._floor

    def state(self) -> dict[str, Tensor]:
        """For the checkpoint: scalars, on the CPU; nothing of a scale that does not grow."""
        if not self._growth_steps:
            return {}
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "good_steps": torch.tensor(self._good_steps, dtype=torch.int64),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        if not self._growth_steps:
            return
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
