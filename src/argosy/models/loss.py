"""Cross-entropy from hidden states, in chunks: the full logits never exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from argosy.accelerator import kind_of
from argosy.data.packing import IGNORED
from argosy.matmul import ROWS_MULTIPLE, dense
from argosy.plan.layer_spec import CHUNK_LOGITS, FROZEN_CHUNK_ROWS, LEAST_CHUNK_ROWS

# N tokens (batch and sequence flattened), C tokens of a chunk, D model width, V vocabulary

ChunkLoss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`chunk_loss_and_gradient`, maybe compiled, or a version for ranks that each have a part of the vocabulary."""


def chunk_loss_and_gradient(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's loss, fp32 [C], and the gradient of their sum to the logits, [C, V] in the logits' dtype."""
    logits = logits_CV.float()
    counts_C1 = (targets_C != IGNORED)[:, None]
    targets_C1 = targets_C.clamp(min=0)[:, None]
    logsumexp_C1 = torch.logsumexp(logits, dim=-1, keepdim=True)
    losses_C = ((logsumexp_C1 - logits.gather(1, targets_C1)) * counts_C1).squeeze(1)
    is_target_CV = torch.arange(logits.shape[1], device=logits.device) == targets_C1
    gradient_CV = ((logits - logsumexp_C1).exp() - is_target_CV.float()) * counts_C1
    return losses_C, gradient_CV.to(logits_CV.dtype)


def summed_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    of_chunk: ChunkLoss = chunk_loss_and_gradient,
    longest_part: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Return the sum over tokens of -log softmax(x @ weight.T)[target], fp32 scalar; targets of -100 do not count.

    `softcap`: the logits are softcap * tanh(logits / softcap); 0: as they are.

    `longest_part`: the length of the longest part of the vocabulary that a rank has. `of_chunk` exchanges messages, so
    all ranks must cut the tokens into the same chunks, whatever the length of their own part.

    Forward computes the gradients too, chunk by chunk, while the chunk's logits exist (the idea of Liger's fused
    linear cross-entropy, Hsu et al. 2024). That takes three matmuls for each chunk; none is computed twice.
    """
    rows = rows_at_once(weight_VD, longest_part)
    if torch.is_grad_enabled() and (x_ND.requires_grad or weight_VD.requires_grad):
        loss: Tensor = _LossWithGradients.apply(x_ND, weight_VD, targets_N, of_chunk, rows, softcap)
        return loss
    weight = weight_VD.to(x_ND.dtype)
    chunks = _chunks(rows, x_ND, targets_N)
    losses = [of_chunk(soft_capped(dense(x, weight), softcap), targets)[0].sum() for x, targets in chunks]
    return torch.stack(losses).sum()


def rows_at_once(weight_VD: Tensor, longest_part: int) -> int:
    """Return the tokens of a chunk, the same on all ranks that have a part of the vocabulary."""
    least = LEAST_CHUNK_ROWS[kind_of(weight_VD.device)]
    least = least if weight_VD.requires_grad else min(least, FROZEN_CHUNK_ROWS)
    rows = max(CHUNK_LOGITS // (longest_part or weight_VD.shape[0]), least)
    return rows // ROWS_MULTIPLE * ROWS_MULTIPLE or max(1, rows)


IsLikeliest = Callable[[Tensor, Tensor], Tensor]
"""`is_likeliest`, or a version for ranks that each have a part of the vocabulary."""


def is_likeliest(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Return True for each token whose target has the highest logit, [C]."""
    target_logit_C = logits_CV.gather(1, targets_C.clamp(min=0)[:, None]).squeeze(1)
    return target_logit_C >= logits_CV.max(1).values


def with_misses(of_chunk: ChunkLoss, likeliest: IsLikeliest) -> ChunkLoss:
    """Return a loss of chunks for `token_losses` that gives [C, 2]: each token's loss, and 1 if its target is not the
    likeliest."""

    def of_chunk_with_misses(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        losses_C, gradient_CV = of_chunk(logits_CV, targets_C)
        misses_C = ~likeliest(logits_CV, targets_C) & (targets_C != IGNORED)
        return torch.stack((losses_C, misses_C.float()), 1), gradient_CV

    return of_chunk_with_misses


@torch.no_grad()
def token_losses(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, of_chunk: ChunkLoss, rows: int, softcap: float
) -> Tensor:
    """Return -log softmax(x @ weight.T)[target] of each token, fp32 [N]; 0 where the target is -100."""
    weight = weight_VD.to(x_ND.dtype)
    chunks = _chunks(rows, x_ND, targets_N)
    return torch.cat([of_chunk(soft_capped(dense(x, weight), softcap), targets)[0] for x, targets in chunks])


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), or the logits if `cap` is 0."""
    return cap * torch.tanh(logits / cap) if cap else logits


def _chunks(rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in chunks of at most `rows`, cut alike along their first dim."""
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def weighted_gradients(
    needs: tuple[bool, bool],
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor | None,
    of_chunk: ChunkLoss,
    rows: int,
    softcap: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the summed loss, and the gradients to `x` and `weight` of the sum of losses, each times its weight.

    weights_N: fp32; None: all are 1. needs: which of the two gradients are wanted.
    """
    weight = weight_VD.to(x_ND.dtype)
    grad_x = torch.empty_like(x_ND) if needs[0] else None
    grad_weight: Tensor | None = None
    losses = []
    for start, (x, targets) in zip(range(0, len(x_ND), rows), _chunks(rows, x_ND, targets_N), strict=True):
        logits_CV = soft_capped(dense(x, weight), softcap)
        losses_C, gradient_CV = of_chunk(logits_CV, targets)
        losses.append(losses_C.sum())
        if weights_N is not None:
            gradient_CV = gradient_CV * weights_N[start : start + rows, None].to(gradient_CV.dtype)
        if softcap:
            gradient_CV = gradient_CV * (1 - (logits_CV / softcap).square())
        if grad_x is not None:
            grad_x[start : start + rows] = dense(gradient_CV, weight.T)
        if needs[1]:
            product = dense(gradient_CV.T, x.T)
            grad_weight = product.float() if grad_weight is None else grad_weight.add_(product)
            del product  # it would stay beside the next chunk's logits, as would the gradient of these
        del gradient_CV
    return torch.stack(losses).sum(), grad_x, None if grad_weight is None else grad_weight.to(weight_VD.dtype)


class _LossWithGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        of_chunk: ChunkLoss,
        rows: int,
        softcap: float,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:2]  # not of the weight if it is frozen
        loss, *gradients = weighted_gradients(needs, x_ND, weight_VD, targets_N, None, of_chunk, rows, softcap)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        return *gradients_times(ctx.saved_tensors, grad_loss), None, None, None, None


def gradients_times(saved: tuple[Tensor | None, ...], grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients that forward has computed, times that of the loss."""
    grad_x, grad_weight = saved
    grad_x = None if grad_x is None else grad_x * grad_loss.to(grad_x.dtype)
    return grad_x, None if grad_weight is None else grad_weight * grad_loss
