"""Cross-entropy from hidden states, in chunks: the full logits never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# N tokens (batch and sequence flattened), C tokens of a chunk, D model width, V vocabulary

CHUNK_LOGITS = 8 * 2**20
"""Logits that exist at once (32 MiB in fp32): large enough for full-speed matmuls, small enough for caches."""
IGNORED = -100
"""A target that does not count."""


ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`chunk_loss_and_gradient`, as it is or compiled."""


def summed_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, of_chunk: ChunkLoss | None = None
) -> Tensor:
    """Sum over tokens of -log softmax(x @ weight.T)[target], fp32 scalar; targets of -100 do not count.

    Forward computes the gradients too, chunk by chunk, while the chunk's logits are at hand (the idea of Liger's
    fused linear cross-entropy, Hsu et al. 2024): three matmuls a chunk in all, none of them twice.
    """
    if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
        loss: Tensor = _LossWithGradients.apply(x_ND, weight_VD, targets_N, of_chunk or chunk_loss_and_gradient)
        return loss
    weight = weight_VD.to(x_ND.dtype)
    rows = max(1, CHUNK_LOGITS // weight_VD.shape[0])
    chunks = zip(x_ND.split(rows), targets_N.split(rows), strict=True)
    return torch.stack([chunk_loss(x @ weight.T, targets) for x, targets in chunks]).sum()


def chunk_loss(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits_CV.float(), targets_C, ignore_index=IGNORED, reduction="sum")


def chunk_loss_and_gradient(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """The chunk's summed loss and its gradient to the logits, [C, V] in the logits' dtype."""
    logits = logits_CV.float()
    counts_C1 = (targets_C != IGNORED)[:, None]
    targets_C1 = targets_C.clamp(min=0)[:, None]
    logsumexp_C1 = torch.logsumexp(logits, dim=-1, keepdim=True)
    loss = ((logsumexp_C1 - logits.gather(1, targets_C1)) * counts_C1).sum()
    is_target_CV = torch.arange(logits.shape[1], device=logits.device) == targets_C1
    gradient_CV = ((logits - logsumexp_C1).exp() - is_target_CV.float()) * counts_C1
    return loss, gradient_CV.to(logits_CV.dtype)


class _LossWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, of_chunk: ChunkLoss) -> Tensor:
        weight = weight_VD.to(x_ND.dtype)
        rows = max(1, CHUNK_LOGITS // weight_VD.shape[0])
        grad_x = torch.empty_like(x_ND)
        grad_weight = torch.zeros_like(weight_VD)
        losses = []
        for x, targets, dx in zip(x_ND.split(rows), targets_N.split(rows), grad_x.split(rows), strict=True):
            loss, gradient_CV = of_chunk(x @ weight.T, targets)
            losses.append(loss)
            torch.mm(gradient_CV, weight, out=dx)
            grad_weight += gradient_CV.T @ x
        ctx.save_for_backward(grad_x, grad_weight)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss.to(grad_x.dtype), grad_weight * grad_loss, None, None
