"""The gradient's global norm, in parts that stand around the one exchange of a step (`training.step.Step.exchange`).

Each rank adds up the squares of what it holds; all ranks' sums are added; each rank clips its part by the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from argosy.parallel.pieces import Held


def unscale(pieces: Sequence[Held], scale: float) -> None:
    """Divide the pieces' gradients by `scale`, that of the loss."""
    if scale != 1.0:
        for piece in pieces:
            if piece.value.grad is not None:
                piece.value.grad /= scale


def square_share(pieces: Sequence[Held]) -> Tensor:
    """Return this rank's share of the gradient's squared global norm, fp64, no dims: the shares add up to it.

    It is the squares of what the rank holds, divided by the number of ranks that hold the same.
    """
    share = torch.zeros((), dtype=torch.float64, device=pieces[0].value.device)
    for replicas in sorted({piece.replicas for piece in pieces}):
        gradients = [p.value.grad for p in pieces if p.replicas == replicas and p.value.grad is not None]
        if gradients:
            # As nn.utils.get_total_norm, but in fp32: that function rounds the norms of bf16 gradients to bf16.
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            share += torch.stack(norms).double().square().sum() / replicas
    return share


def clip(pieces: Sequence[Held], max_norm: float, norm: float) -> None:
    """Scale the gradients, whose global norm is `norm`, down to a norm of `max_norm` (0: leave them)."""
    if max_norm:
        device = pieces[0].value.device
        total = torch.tensor(norm, device=device)
        # By default torch clips a simulator's tensors one by one, and real ones all at once.
        nn.utils.clip_grads_with_norm_([p.value for p in pieces], max_norm, total, foreach=True)
