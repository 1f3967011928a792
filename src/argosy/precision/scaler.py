"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018): gradients too small for fp16 are scaled up."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class LossScaler:
    """Finds the largest power of two by which the loss can be multiplied without overflow of the gradients.

    Every factor is a power of two, so scaling and unscaling round nothing. The decision uses the norm of all gradients
    of all ranks, so it is the same on every rank without another collective. With `growth_steps` = 0 the scale is fixed
    and not part of the state: a run that continues in another precision starts with its own scale.
    """

    def __init__(self, scale: float = 2.0**16, growth_steps: int = 2000, floor: float = 1.0, ceiling: float = 2.0**24):
        self.scale = scale
        """The factor of the loss, and the divisor of the gradients and their norm."""
        self._growth_steps, self._floor, self._ceiling = growth_steps, floor, ceiling
        self._good_steps = 0

    def update(self, gradient_norm: float) -> bool:
        """Return True if the gradients may be applied. If not, halve the scale; after `growth_steps` good, double it.

        `gradient_norm`: global norm of the gradients, scaled or not. It matters only if it is finite.
        """
        if not math.isfinite(gradient_norm):
            self.scale = max(self.scale / 2, self._floor)
            self._good_steps = 0
            return False
        self._good_steps += 1
        if self._good_steps == self._growth_steps:
            self.scale = min(self.scale * 2, self._ceiling)
            self._good_steps = 0
        return True

    @property
    def is_at_floor(self) -> bool:
        """True if the scale cannot fall further: then the model overflows, whatever the scale."""
        return self.scale <= self._floor

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: scalars on the CPU; nothing for a fixed scale."""
        if not self._growth_steps:
            return {}
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "good_steps": torch.tensor(self._good_steps, dtype=torch.int64),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        if not self._growth_steps:
            return
        self.scale = min(float(state["scale"]), self._ceiling)
        self._good_steps = int(state["good_steps"])
