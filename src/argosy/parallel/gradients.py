"""The gradient's global norm, in moves that stand around the one exchange of a step (`training.step.exchange`).

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
    """This rank's share of the gradient's squared global norm, fp64, no dims: over all ranks the shares add up to it.

    The squares of what it holds, divided by the number of ranks that hold the same.
    """
    share = torch.zeros((), dtype=torch.float64, device=pieces[0].value.device)
    for copies in sorted({piece.copies for piece in pieces}):
        gradients = [p.value.grad for p in pieces if p.copies == copies and p.value.grad is not None]
        if gradients:
            # What nn.utils.get_total_norm does, but in fp32: that rounds the norms of bf16 gradients to bf16.
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            share += torch.stack(norms).double().square().sum() / copies
    return share


def clip(pieces: Sequence[Held], max_norm: float, norm: float) -> None:
    """Scale the gradients, whose global norm is `norm`, down to a norm of `max_norm` (0: leave them)."""
    if max_norm:
        device = pieces[0].value.device
        total = torch.tensor(norm, device=device)
        # By default torch clips a simulator's tensors one by one, and real ones all at once.
        nn.utils.clip_grads_with_norm_([p.value for p in pieces], max_norm, total, foreach=True)
