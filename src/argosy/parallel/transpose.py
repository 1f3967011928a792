"""Exchanges between ranks that autograd can go back through: gradients travel by the transposed exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Way = Callable[[Tensor, dist.ProcessGroup], Tensor]


def exchange(x: Tensor, group: dist.ProcessGroup, there: Way, back: Way) -> Tensor:
    """Return what `there` makes of `x`; in backward `back`, its transpose, is applied to the gradient."""
    y: Tensor = _Transposed.apply(x, group, there, back)
    return y


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Way, back: Way) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None
