"""Attention in parts: which blocks of its matrix a rank of a ring computes in each step, and kernels for a block."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# B batch, T queries, S keys, H query heads, K key/value heads, G query heads for each of those, E head width


class Tile(NamedTuple):
    """A block of the attention matrix that is whole, or causal and square: in which rows, which queries see which keys.

    Queries and keys count in the order in which their ranks hold them. A query sees itself in exactly one causal tile.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool


def ring_tiles(documents: list[int], rows: int, seq_len: int, rank: int, size: int) -> list[list[Tile]]:
    """Return what the tokens of `rank` see in each step of the ring; in step i, of the tokens of rank - i.

    `documents`: where they start in `rows` rows of `seq_len` tokens laid end to end, then the number of tokens.
    """
    assert seq_len % (2 * size) == 0 and documents[-1] == rows * seq_len
    bounds = []
    for start in range(0, rows * seq_len, seq_len):
        of_row = documents[bisect_left(documents, start) : bisect_right(documents, start + seq_len)]
        assert of_row[0] == start and of_row[-1] == start + seq_len, "a row's start is the start of a document"
        bounds.append([position - start for position in of_row])
    steps = []
    for step in range(size):
        of_rows = [_row_tiles(of_row, rank, (rank - step) % size, size) for of_row in bounds]
        alike = [list(run) for _, run in groupby(range(rows), key=of_rows.__getitem__)]
        steps.append([Tile(slice(run[0], run[-1] + 1), *tile) for run in alike for tile in of_rows[run[0]]])
    return steps


def _row_tiles(bounds: list[int], rank: int, owner: int, size: int) -> list[tuple[slice, slice, bool]]:
    """Return what the tokens of `rank` see of `owner`'s, in a row of documents between consecutive `bounds`."""
    chunk = bounds[-1] // (2 * size)

    def held_before(position: int, rank: int) -> int:
        """Return how many of `rank`'s tokens lie before `position` of the row."""
        firsts = (rank * chunk, (2 * size - 1 - rank) * chunk)
        return sum(min(max(position - first, 0), chunk) for first in firsts)

    if owner == rank:  # tokens are held in their order: what is left of a document here is causal in itself
        cuts = sorted({held_before(bound, rank) for bound in bounds})
        return [(slice(a, b), slice(a, b), True) for a, b in pairwise(cuts)]
    # An earlier rank's first chunk is before all of ours and its second after; of a later rank's, both lie between
    # our two. All keys being before all queries, the only document with both is the first query's.
    first_query, last_key = (0, chunk) if owner < rank else (chunk, 2 * chunk)
    position = chunk * (rank if owner < rank else 2 * size - 1 - rank)
    document = bisect_right(bounds, position)
    first_key = held_before(bounds[document - 1], owner)
    last_query = held_before(bounds[document], rank)
    return [(slice(first_query, last_query), slice(first_key, last_key), False)] if first_key < last_key else []


class Kernel(NamedTuple):
    """Attention within a tile, and its gradients given the output and log-sum-exp over *all* that the queries see."""

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    """(q_BTHE, k_BSKE, v_BSKE, causal) -> y_BTHE in the dtype of q or fp32, lse_BHT in fp32."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
    """(dy_BTHE, q_BTHE, k_BSKE, v_BSKE, y_BTHE, lse_BHT, causal) -> dq_BTHE, dk_BSKE, dv_BSKE."""


def kernel_for(q_BTHE: Tensor) -> Kernel:
    """Return the best kernel for these queries."""
    if q_BTHE.device.type == "cpu":
        return CPU_FLASH
    E = q_BTHE.shape[-1]
    if q_BTHE.is_cuda and q_BTHE.dtype in (torch.bfloat16, torch.float16) and E % 8 == 0 and E <= 256:
        return CUDA_FLASH
    return PLAIN


# The aten operators below are private. Of the public ways to them, scaled_dot_product_attention does not return the
# log-sum-exp, and neither it nor varlen_attn has a backward that takes an output and log-sum-exp over more keys.


def _cpu_flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    q_BHTE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q, k, v))
    y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHTE, k_BKSE, v_BKSE, is_causal=causal)
    return y.transpose(1, 2), lse


def _cpu_flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dy, q, k, v, y = (x.transpose(1, 2) for x in (dy, q, k, v, y))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = (x.transpose(1, 2) for x in backward(dy, q, k, v, y, lse, 0.0, causal))
    return dq, dk, dv


def _cuda_flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    lengths = (q.shape[1], k.shape[1])
    y, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, *lengths, 0.0, causal, False)
    return y, lse


def _cuda_flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = (q.shape[1], k.shape[1])
    random_state = (torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0))  # of dropout: there is none
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dy, q, k, v, y, lse.contiguous(), None, None, *lengths, 0.0, causal, *random_state
    )
    return dq, dk, dv


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    scores_BKGTS = _scores(q, k, causal)
    lse_BKGT = scores_BKGTS.logsumexp(-1)
    p_BKGTS = (scores_BKGTS - lse_BKGT[..., None]).exp()
    y_BTKGE = torch.einsum("bkgts,bske->btkge", p_BKGTS, v.float())
    return y_BTKGE.flatten(2, 3), lse_BKGT.flatten(1, 2)


def _plain_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Dao et al. 2022, "FlashAttention", appendix B.2."""
    K = k.shape[2]
    p_BKGTS = (_scores(q, k, causal) - lse.unflatten(1, (K, -1))[..., None]).exp()
    dy_BTKGE, q_BTKGE, y_BTKGE = (x.float().unflatten(2, (K, -1)) for x in (dy, q, y))
    dv_BSKE = torch.einsum("bkgts,btkge->bske", p_BKGTS, dy_BTKGE)
    dp_BKGTS = torch.einsum("btkge,bske->bkgts", dy_BTKGE, v.float())
    mean_dp_BKGT = torch.einsum("btkge,btkge->bkgt", dy_BTKGE, y_BTKGE)
    dscores_BKGTS = p_BKGTS * (dp_BKGTS - mean_dp_BKGT[..., None]) * q.shape[-1] ** -0.5
    dq_BTKGE = torch.einsum("bkgts,bske->btkge", dscores_BKGTS, k.float())
    dk_BSKE = torch.einsum("bkgts,btkge->bske", dscores_BKGTS, q_BTKGE)
    return dq_BTKGE.flatten(2, 3), dk_BSKE, dv_BSKE


def _scores(q_BTHE: Tensor, k_BSKE: Tensor, causal: bool) -> Tensor:
    """Scaled scores, [B, K, G, T, S] in fp32; -inf in the future."""
    q_BTKGE = q_BTHE.float().unflatten(2, (k_BSKE.shape[2], -1))
    scores = torch.einsum("btkge,bske->bkgts", q_BTKGE * q_BTHE.shape[-1] ** -0.5, k_BSKE.float())
    if causal:
        future_TS = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future_TS, -torch.inf)
    return scores


CPU_FLASH = Kernel(_cpu_flash_forward, _cpu_flash_backward)
CUDA_FLASH = Kernel(_cuda_flash_forward, _cuda_flash_backward)
"""FlashAttention 2: bf16 or fp16, head widths that are multiples of 8 up to 256."""
PLAIN = Kernel(_plain_forward, _plain_backward)
"""A kernel for any device and dtype. It keeps its scores in memory, T * S for each head."""
