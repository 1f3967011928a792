"""Attention within a block of its matrix, and its gradients: kernels that give the log-sum-exp too.

Blocks whose queries see the same tokens are merged by it (`parallel.context`), and sinks are added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.models import attention_products

PADDED_TOKENS = 32
"""On a CPU, causal squares in bf16 are padded to a multiple of this many tokens. oneDNN makes a kernel for each shape
of a bf16 product and keeps it: without padding, kernels of all lengths of documents took a gigabyte after an hour, and
half of attention's time to make."""

# B batch, T queries, S keys, H query heads, K key/value heads, G query heads for each of those, E head width


class VisibleKeys(NamedTuple):
    """The keys that the queries of a block see."""

    causal: bool
    """None after the query's own place."""
    first: int = 0
    """causal: the place of the first query, counted from the first key."""
    window: int = 0
    """causal: so many up to the query's own; 0: all."""

    @property
    def is_plain(self) -> bool:
        """True if the block is whole, or causal and square."""
        return not self.first and not self.window

    def hidden(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the mask of what is not seen, bool [queries, keys]."""
        places = torch.arange(self.first, self.first + queries, device=device)[:, None]
        ahead = torch.arange(keys, device=device) - places
        if not self.causal:
            return torch.zeros_like(ahead, dtype=torch.bool)
        return (ahead > 0) | (ahead <= -self.window) if self.window else ahead > 0


SEES_ALL, SEES_EARLIER = VisibleKeys(False), VisibleKeys(True)


class Kernel(NamedTuple):
    """Attention within a block, and its gradients given the output and log-sum-exp over *all* that the queries see."""

    forward: Callable[[Tensor, Tensor, Tensor, VisibleKeys], tuple[Tensor, Tensor]]
    """(q_BTHE, k_BSKE, v_BSKE, seen) -> y_BTHE in the dtype of q or fp32, lse_BHT in fp32."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, VisibleKeys], tuple[Tensor, Tensor, Tensor]]
    """(dy_BTHE, q_BTHE, k_BSKE, v_BSKE, y_BTHE, lse_BHT, seen) -> dq_BTHE, dk_BSKE, dv_BSKE."""


def products_are_faster(q_BTHE: Tensor) -> bool:
    """Return True if `CPU_PRODUCTS` is faster than `CPU_FLASH` for such rows, in compiled code."""
    is_fast = attention_products.IS_FASTER and q_BTHE.shape[1] >= attention_products.LEAST_TOKENS
    return is_fast and q_BTHE.device.type == "cpu" and q_BTHE.dtype == torch.bfloat16


def kernel_for(q_BTHE: Tensor, softcap: float = 0.0, has_bands: bool = False, by_products: bool = False) -> Kernel:
    """Return the best kernel for these queries, for blocks that are whole or causal squares unless `has_bands`.

    by_products: `products_are_faster`, and all blocks are causal squares.
    """
    if softcap:
        return Kernel(partial(_plain_forward, softcap=softcap), partial(_plain_backward, softcap=softcap))
    if q_BTHE.device.type == "cpu":
        return CPU_PRODUCTS if by_products else CPU_FLASH
    if has_bands:
        return PLAIN_KERNEL
    E = q_BTHE.shape[-1]
    if q_BTHE.is_cuda and q_BTHE.dtype in (torch.bfloat16, torch.float16) and E % 8 == 0 and E <= 256:
        return CUDA_FLASH
    return PLAIN_KERNEL


# The aten operators below are private. Of the public ways to them, scaled_dot_product_attention does not return the
# log-sum-exp, and neither it nor varlen_attn has a backward that takes an output and log-sum-exp over more keys.


def _cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, seen: VisibleKeys) -> tuple[Tensor, Tensor]:
    length, missing = q.shape[1], _missing(q, seen)
    q_BHTE, k_BKSE, v_BKSE = (_lengthened(x, missing).transpose(1, 2) for x in (q, k, v))
    causal, mask = _cpu_mask(q, k, seen)
    y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHTE, k_BKSE, v_BKSE, is_causal=causal, attn_mask=mask
    )
    return y.transpose(1, 2)[:, :length], lse[..., :length]


def _cpu_flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seen: VisibleKeys
) -> tuple[Tensor, Tensor, Tensor]:
    length, missing = q.shape[1], _missing(q, seen)
    causal, mask = _cpu_mask(q, k, seen)
    dy, q, k, v, y = (_lengthened(x, missing).transpose(1, 2) for x in (dy, q, k, v, y))
    lse = F.pad(lse, (0, missing)) if missing else lse
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = backward(dy, q, k, v, y, lse, 0.0, causal, attn_mask=mask)
    dq, dk, dv = (x.transpose(1, 2)[:, :length] if missing else x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


def _missing(q_BTHE: Tensor, seen: VisibleKeys) -> int:
    """Return the tokens by which a square is lengthened."""
    return -q_BTHE.shape[1] % PADDED_TOKENS if seen == SEES_EARLIER and q_BTHE.dtype == torch.bfloat16 else 0


def _lengthened(x_BTHE: Tensor, missing: int) -> Tensor:
    """Append zeros, which no token before them sees."""
    return F.pad(x_BTHE, (0, 0, 0, 0, 0, missing)) if missing else x_BTHE  # padding by nothing would copy


def _cpu_mask(q_BTHE: Tensor, k_BSKE: Tensor, seen: VisibleKeys) -> tuple[bool, Tensor | None]:
    """Return True for a causal square, which needs no mask, or the mask that is added to the scores."""
    if seen.is_plain:
        return seen.causal, None
    hidden_TS = seen.hidden(q_BTHE.shape[1], k_BSKE.shape[1], q_BTHE.device)
    return False, q_BTHE.new_zeros(hidden_TS.shape).masked_fill_(hidden_TS, -torch.inf)


def _products_forward(q: Tensor, k: Tensor, v: Tensor, seen: VisibleKeys) -> tuple[Tensor, Tensor]:
    if q.shape[1] < attention_products.LEAST_TOKENS:
        return _cpu_flash_forward(q, k, v, seen)
    return attention_products.causal_forward(q, k, v)


def _products_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seen: VisibleKeys
) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[1] < attention_products.LEAST_TOKENS:
        return _cpu_flash_backward(dy, q, k, v, y, lse, seen)
    return attention_products.causal_backward(dy, q, k, v, y, lse)


def _cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor, seen: VisibleKeys) -> tuple[Tensor, Tensor]:
    lengths = (q.shape[1], k.shape[1])
    y, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, *lengths, 0.0, seen.causal, False)
    return y, lse


def _cuda_flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seen: VisibleKeys
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = (q.shape[1], k.shape[1])
    random_state = (torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0))  # of dropout: there is none
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, y, lse.contiguous(), None, None, *lengths, 0.0, seen.causal, *random_state
    )
    return dq, dk, dv


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, seen: VisibleKeys, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    scores_BKGTS = _scores(q, k, seen, softcap)
    lse_BKGT = scores_BKGTS.logsumexp(-1)
    p_BKGTS = (scores_BKGTS - lse_BKGT[..., None]).exp()
    y_BTKGE = torch.einsum("bkgts,bske->btkge", p_BKGTS, v.float())
    return y_BTKGE.flatten(2, 3), lse_BKGT.flatten(1, 2)


def _plain_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seen: VisibleKeys, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Dao et al. 2022, "FlashAttention", appendix B.2; the slope of c tanh(s / c) is 1 - (its value / c)^2."""
    K = k.shape[2]
    scores_BKGTS = _scores(q, k, seen, softcap)
    p_BKGTS = (scores_BKGTS - lse.unflatten(1, (K, -1))[..., None]).exp()
    dy_BTKGE, q_BTKGE, y_BTKGE = (x.float().unflatten(2, (K, -1)) for x in (dy, q, y))
    dv_BSKE = torch.einsum("bkgts,btkge->bske", p_BKGTS, dy_BTKGE)
    dp_BKGTS = torch.einsum("btkge,bske->bkgts", dy_BTKGE, v.float())
    mean_dp_BKGT = torch.einsum("btkge,btkge->bkgt", dy_BTKGE, y_BTKGE)
    dscores_BKGTS = p_BKGTS * (dp_BKGTS - mean_dp_BKGT[..., None]) * q.shape[-1] ** -0.5
    if softcap:
        dscores_BKGTS *= 1 - (scores_BKGTS.masked_fill(scores_BKGTS == -torch.inf, 0.0) / softcap).square()
    dq_BTKGE = torch.einsum("bkgts,bske->btkge", dscores_BKGTS, k.float())
    dk_BSKE = torch.einsum("bkgts,btkge->bske", dscores_BKGTS, q_BTKGE)
    return dq_BTKGE.flatten(2, 3), dk_BSKE, dv_BSKE


def _scores(q_BTHE: Tensor, k_BSKE: Tensor, seen: VisibleKeys, softcap: float) -> Tensor:
    """Scaled scores, [B, K, G, T, S] in fp32; -inf for what is not seen."""
    q_BTKGE = q_BTHE.float().unflatten(2, (k_BSKE.shape[2], -1))
    scores = torch.einsum("btkge,bske->bkgts", q_BTKGE * q_BTHE.shape[-1] ** -0.5, k_BSKE.float())
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if seen != SEES_ALL:
        scores.masked_fill_(seen.hidden(scores.shape[-2], scores.shape[-1], scores.device), -torch.inf)
    return scores


CPU_FLASH = Kernel(_cpu_flash_forward, _cpu_flash_backward)
CPU_PRODUCTS = Kernel(_products_forward, _products_backward)
"""bf16; causal squares, the small ones by `CPU_FLASH`."""
CUDA_FLASH = Kernel(_cuda_flash_forward, _cuda_flash_backward)
"""FlashAttention 2: bf16 or fp16, head widths that are multiples of 8 up to 256; no bands."""
PLAIN_KERNEL = Kernel(_plain_forward, _plain_backward)
"""A kernel for any device and dtype. It keeps its scores in memory, T * S for each head."""


def add_sinks(y_BTHE: Tensor, lse_BTH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp with one more score for each head, which stands for a value of zero."""
    whole_BTH = torch.logaddexp(lse_BTH, sinks_H.float())
    return y_BTHE * (lse_BTH - whole_BTH).exp()[..., None], whole_BTH


def gradient_of_sinks(dy_BTHE: Tensor, y_BTHE: Tensor, lse_BTH: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient of the sinks, [H] in fp32, given that of the output; y and lse are those of `add_sinks`."""
    mean_dp_BTH = (dy_BTHE.float() * y_BTHE.float()).sum(-1)
    return -((sinks_H.float() - lse_BTH).exp() * mean_dp_BTH).sum((0, 1))
