"""Collectives that gradients flow through: what tensor parallelism puts between a model's modules.

Where forward gathers what other ranks hold, backward sums the gradients of all ranks, and vice versa.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.sync.compressor import all_gather_single, reduce_scatter_single

# B batch, t tokens of this rank, T tokens of all ranks of the group, D width


def gather_sequence(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all ranks, [B, T, D]; in backward each rank gets the sum of the gradients of its own."""
    y: Tensor = _GatherSequence.apply(x_BtD, group)
    return y


def reduce_scatter_sequence(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens, [B, t, D], of the sum over ranks; in backward all ranks get all gradients."""
    y: Tensor = _ReduceScatterSequence.apply(x_BTD, group)
    return y


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


def _all_gather(x_BtD: Tensor, group: dist.ProcessGroup) -> Tensor:
    B, t = x_BtD.shape[:2]
    n = group.size()
    parts = x_BtD.new_empty(n * B, *x_BtD.shape[1:])
    all_gather_single(parts, x_BtD.contiguous(), group=group)
    return parts.unflatten(0, (n, B)).transpose(0, 1).reshape(B, n * t, *x_BtD.shape[2:])


def _reduce_scatter(x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    n = group.size()
    parts = x_BTD.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    reduce_scatter_single(mine, parts.flatten(0, 1), group=group)
    return mine
