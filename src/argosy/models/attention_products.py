"""Causal attention in bf16 out of matrix products, for CPUs on which torch's kernel multiplies slowly.

That kernel has MKL multiply, which takes a tenth of a Zen 5's peak in bf16; `torch.bmm` has oneDNN, which takes nearly
all of it. Scores would be rounded to bf16, as `torch.bmm` rounds: a second product gives what the first has lost. What
is between the products is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.compiler import compiled
from argosy.matmul import MKL_IS_SLOW

# B batch, T tokens, K key/value heads, G query heads for each of those, C = B K, E head width; of a tile: N rows
# (G times its queries), S keys

IS_FASTER = MKL_IS_SLOW and torch.cpu.get_capabilities().get("avx512_bf16", False)
"""Looked up once: the compiler cannot trace how."""
LEAST_TOKENS = 512
"""Tokens of rows and documents from which on it is: of fewer, attention is a small part of a step, and what is compiled
and made for each shape costs more than it saves."""
PADDED_ROWS = 64
"""Rows are padded to a multiple of this many tokens: oneDNN makes a kernel for each shape and keeps it."""
TILE_QUERIES = 256
SCORES = 2**22
"""Scores that are in memory at once, at most, but of one head."""


def causal_forward(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention [B, T, H, E] in bf16, and the log-sum-exp of scores [B, H, T] in fp32."""
    K = k_BTKE.shape[2]
    q_CGTE, k_C1TE, v_C1TE = (_by_head(x, K) for x in (q_BTHE, k_BTKE, v_BTKE))
    y_CGTE, lse_CGT1 = torch.empty_like(q_CGTE), torch.empty(*q_CGTE.shape[:-1], 1)
    for tile in _tiles(q_CGTE):
        scores = _scores(tile.of_queries(q_CGTE), tile.of_keys(k_C1TE))
        p_CNS, lse_CN1 = tile.between(_probabilities, *scores, scale=q_CGTE.shape[-1] ** -0.5)
        tile.put(y_CGTE, torch.bmm(p_CNS, tile.of_keys(v_C1TE)))
        tile.put(lse_CGT1, lse_CN1)
    y_BTHE, lse_BTH1 = (_by_token(x, *q_BTHE.shape[:2]) for x in (y_CGTE, lse_CGT1))
    return y_BTHE, lse_BTH1.squeeze(-1).transpose(1, 2)


def causal_backward(
    dy_BTHE: Tensor, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, y_BTHE: Tensor, lse_BHT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q (bf16), k and v (fp32); Dao et al. 2022, "FlashAttention", appendix B.2."""
    K, scale = k_BTKE.shape[2], q_BTHE.shape[-1] ** -0.5
    # Two columns more, times one, take a query's mean of dp from its product dp before that is rounded to bf16.
    mean_dp_BTH1 = (dy_BTHE.float() * y_BTHE.float()).sum(-1, keepdim=True)
    mean_BTH1 = mean_dp_BTH1.to(dy_BTHE.dtype)
    lost_BTH1 = (mean_dp_BTH1 - mean_BTH1).to(dy_BTHE.dtype)
    dy_BTHX, v_BTKX = torch.cat((dy_BTHE, -mean_BTH1, -lost_BTH1), -1), F.pad(v_BTKE, (0, 2), value=1.0)
    lse_BTH1 = lse_BHT.transpose(1, 2)[..., None]
    dy_CGTX, q_CGTE, k_C1TE, v_C1TX, lse_CGT1 = (_by_head(x, K) for x in (dy_BTHX, q_BTHE, k_BTKE, v_BTKX, lse_BTH1))
    dq_CGTE = torch.empty_like(q_CGTE)
    dk_C1TE, dv_C1TE = (torch.zeros_like(k_C1TE, dtype=torch.float32) for _ in "kv")
    for tile in _tiles(q_CGTE):
        q_CNE, dy_CNX, lse_CN1 = (tile.of_queries(x) for x in (q_CGTE, dy_CGTX, lse_CGT1))
        k_CSE = tile.of_keys(k_C1TE)
        over_mean_CNS = torch.bmm(dy_CNX, tile.of_keys(v_C1TX).mT)
        given = (*_scores(q_CNE, k_CSE), lse_CN1, over_mean_CNS)
        p_CNS, dscores_CNS = tile.between(_gradients, *given, scale=scale)
        tile.put(dq_CGTE, torch.bmm(dscores_CNS, k_CSE))
        tile.of_keys(dk_C1TE).add_(torch.bmm(dscores_CNS.mT, q_CNE))
        tile.of_keys(dv_C1TE).add_(torch.bmm(p_CNS.mT, dy_CNX[..., :-2]))
    dq, dk, dv = (_by_token(x, *q_BTHE.shape[:2]) for x in (dq_CGTE, dk_C1TE, dv_C1TE))
    return dq, dk, dv


class _Tile(NamedTuple):
    """Queries of some heads and the keys that they see: those up to the last query's place."""

    heads: slice
    queries: slice
    group: int
    """G."""

    def of_queries(self, x_CGTX: Tensor) -> Tensor:
        return x_CGTX[self.heads, :, self.queries].flatten(1, 2)

    def of_keys(self, x_C1TX: Tensor) -> Tensor:
        return x_C1TX[self.heads, 0, : self.queries.stop]

    def put(self, x_CGTX: Tensor, tile_CNX: Tensor) -> None:
        x_CGTX[self.heads, :, self.queries] = tile_CNX.unflatten(1, (self.group, -1))

    def between(self, function: Callable[..., tuple[Tensor, ...]], *given_CNX: Tensor, scale: float) -> list[Tensor]:
        """Call what is compiled for all shapes. Rows of all heads are one dim: it has another size than S."""
        places_S = torch.arange(self.queries.stop, dtype=torch.float32)  # in what the compiler compares fastest
        places_R1 = places_S[self.queries].repeat(len(given_CNX[0]) * self.group)[:, None]
        found = compiled(function)(*(x.flatten(0, 1) for x in given_CNX), places_R1, places_S, scale)
        return [x.unflatten(0, (len(given_CNX[0]), -1)) for x in found]


def _tiles(q_CGTE: Tensor) -> Iterator[_Tile]:
    C, G, T, _ = q_CGTE.shape
    heads = max(1, SCORES // (G * min(TILE_QUERIES, T) * T))
    for first in range(0, C, heads):
        for start in range(0, T, TILE_QUERIES):
            yield _Tile(slice(first, min(first + heads, C)), slice(start, min(start + TILE_QUERIES, T)), G)


def _by_head(x_BTHX: Tensor, kv_heads: int) -> Tensor:
    """Return it as [C, G, T, X], padded by zeros, which no token before them sees."""
    x_BKGTX = x_BTHX.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return F.pad(x_BKGTX, (0, 0, 0, -x_BTHX.shape[1] % PADDED_ROWS)).flatten(0, 1).contiguous()


def _by_token(x_CGTX: Tensor, batch: int, length: int) -> Tensor:
    """Return it as [B, T, H, X], without what it was padded by."""
    return x_CGTX.unflatten(0, (batch, -1)).flatten(1, 2).transpose(1, 2)[:, :length]


def _scores(q_CNE: Tensor, k_CSE: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors in bf16 whose sum is the product, to 16 bits."""
    high_CNS = torch.bmm(q_CNE, k_CSE.mT)
    return high_CNS, torch.baddbmm(high_CNS, q_CNE, k_CSE.mT, beta=-1)


# R rows: C N


def _probabilities(
    high_RS: Tensor, low_RS: Tensor, places_R1: Tensor, places_S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    scores_RS = _seen(high_RS, low_RS, places_R1, places_S, scale)
    most_R1 = scores_RS.amax(-1, keepdim=True)
    weights_RS = (scores_RS - most_R1).exp()
    sum_R1 = weights_RS.sum(-1, keepdim=True)
    return (weights_RS / sum_R1).to(high_RS.dtype), most_R1 + sum_R1.log()


def _gradients(
    high_RS: Tensor,
    low_RS: Tensor,
    lse_R1: Tensor,
    over_mean_RS: Tensor,
    places_R1: Tensor,
    places_S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the probabilities again, and the gradient of the products of queries and keys."""
    scores_RS = _seen(high_RS, low_RS, places_R1, places_S, scale)
    p_RS = (scores_RS - lse_R1).exp()
    return p_RS.to(high_RS.dtype), (p_RS * over_mean_RS.float() * scale).to(high_RS.dtype)


def _seen(high_RS: Tensor, low_RS: Tensor, places_R1: Tensor, places_S: Tensor, scale: float) -> Tensor:
    """Return the scores in fp32; -inf for what comes after the query's own place."""
    return torch.where(places_S <= places_R1, (high_RS.float() + low_RS.float()) * scale, -torch.inf)
