"""The rules that compute an element's step from that element alone: AdamW and Lion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch.optim.adamw import adamw

from argosy.config.optimizer import OptimizerConfig
from argosy.optim.slot import Slot, opened


class UpdateRule(ABC):
    """How one step changes weights and moments."""

    moments: tuple[str, ...]
    """Names of the tensors that it keeps for each parameter."""
    is_local: ClassVar[bool] = True
    """True if a step needs no other rank."""

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def prepare(self, slots: Sequence[Slot]) -> None:  # noqa: B027  (most rules need nothing)
        """Compute all that the next step of `slots` needs of other ranks; weights and moments do not change."""

    @abstractmethod
    def step(self, slots: Sequence[Slot], lr: float, weight_decay: float) -> None:
        """Do one step of `slots`, which share these settings and are prepared. It needs no other rank."""


class AdamW(UpdateRule):
    """AdamW (Loshchilov & Hutter 2019), with torch's fused kernel."""

    moments = ("exp_avg", "exp_avg_sq")

    def step(self, slots: Sequence[Slot], lr: float, weight_decay: float) -> None:
        """Update all parameters that need no copies with one kernel; the others one at a time, to keep copies few."""
        for batch in _batches(slots):
            with opened(batch) as updates:
                # The kernel increments a scalar of its own for each parameter, on the device.
                steps = torch.tensor([float(u.step - 1) for u in updates], device=updates[0].weight.device)
                adamw(
                    [u.weight for u in updates],
                    [u.gradient for u in updates],
                    [u.moments["exp_avg"] for u in updates],
                    [u.moments["exp_avg_sq"] for u in updates],
                    [],
                    list(steps.unbind()),
                    fused=True,
                    amsgrad=False,
                    beta1=self.config.beta1,
                    beta2=self.config.beta2,
                    lr=lr,
                    weight_decay=weight_decay,
                    eps=self.config.eps,
                    maximize=False,
                )


class Lion(UpdateRule):
    """Lion: step by the sign of a momentum (Chen et al. 2023, "Symbolic discovery of optimization algorithms")."""

    moments = ("exp_avg",)

    def step(self, slots: Sequence[Slot], lr: float, weight_decay: float) -> None:
        """Step by the momentum with `beta1`; keep the momentum with `beta2`."""
        for slot in not_empty(slots):
            with opened([slot]) as (u,):
                sign = u.moments["exp_avg"].lerp(u.gradient, 1 - self.config.beta1).sign_()
                u.weight.mul_(1 - lr * weight_decay).sub_(sign, alpha=lr)
                u.moments["exp_avg"].lerp_(u.gradient, 1 - self.config.beta2)


def not_empty(slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots whose part on this rank has elements."""
    return [slot for slot in slots if slot.piece.value.numel()]


def _batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Yield the slots that open without copies in one batch for each device, and each of the others alone."""
    full = not_empty(slots)
    plain = [slot for slot in full if slot.is_plain]
    for device in dict.fromkeys(slot.piece.value.device for slot in plain):
        yield [slot for slot in plain if slot.piece.value.device == device]
    for slot in full:
        if not slot.is_plain:
            yield [slot]
