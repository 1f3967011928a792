"""Causal attention inside documents, with a window, a soft-cap on scores or sinks, where no fused kernel has these.

One operator, so that the compiler takes it as it is and selective recomputation keeps its result alone. It is computed
block by block: a windowed layer costs what its window costs, and no more scores exist than those of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from argosy.compiler import operator
from argosy.models.attention_kernels import SEES_EARLIER, Kernel, VisibleKeys, add_sinks, gradient_of_sinks, kernel_for

# N queries and M keys of all rows and documents laid end to end, H query heads, K key/value heads, E head width

BLOCK_QUERIES = 256


def banded_attention(
    q_NHE: Tensor,
    k_MKE: Tensor,
    v_MKE: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: Tensor | None = None,
    by_products: bool = False,
) -> Tensor:
    """Return attention within segments, [N, H, E].

    Segment i has the queries from q_starts[i] and the keys from k_starts[i] (int32, each up to the next; the last
    entries are N and M). Its last query and its last key are the same token. A query sees `window` keys up to its own
    token; 0: all of the segment. `softcap`, `sinks_H`: see `config.attention`. by_products: `products_are_faster`.
    """
    return _banded_attention(q_NHE, k_MKE, v_MKE, sinks_H, q_starts, k_starts, window, softcap, by_products)[0]


class _Block(NamedTuple):
    """Queries of `count` equal segments, and the keys that they see."""

    queries: slice
    """The queries of all segments, laid end to end."""
    keys: slice
    segments: int
    of_queries: slice
    """The queries of each segment."""
    of_keys: slice
    seen: VisibleKeys

    def take(self, x: Tensor, keys: bool = False) -> Tensor:
        """Return the view of `x` [N or M, ...] that the block works on, [count, T or S, ...]."""
        whole, part = (self.keys, self.of_keys) if keys else (self.queries, self.of_queries)
        return x[whole].unflatten(0, (self.segments, -1))[:, part]


def query_blocks(q_starts: Sequence[int], k_starts: Sequence[int], window: int, most: int) -> Iterator[_Block]:
    """Cut segments into blocks of at most `most` queries."""
    lengths = [(b - a, d - c) for (a, b), (c, d) in zip(pairwise(q_starts), pairwise(k_starts), strict=True)]
    first_q = first_k = 0
    for (queries, keys), run in groupby(lengths):
        count = len(list(run))
        q_all = slice(first_q, first_q + count * queries)
        k_all = slice(first_k, first_k + count * keys)
        for start in range(0, queries, most):
            end = min(start + most, queries)
            place = keys - queries + start  # of the block's first query among the segment's keys
            upto = keys - queries + end
            first = max(0, place - window + 1) if window else 0
            needed = window if 0 < window < upto - first else 0
            yield _Block(
                q_all, k_all, count, slice(start, end), slice(first, upto), VisibleKeys(True, place - first, needed)
            )
        first_q, first_k = q_all.stop, k_all.stop


class _Cut(NamedTuple):
    blocks: list[_Block]
    kernel: Kernel
    is_plain: bool
    """True if each block is a causal square of keys that no other block has, and nothing changes its scores."""

    @classmethod
    def of(
        cls,
        q: Tensor,
        sinks: Tensor | None,
        q_starts: Tensor,
        k_starts: Tensor,
        window: int,
        softcap: float,
        by_products: bool,
    ) -> _Cut:
        uncut = q.device.type == "cpu" and not softcap and not window  # then the kernel cuts by itself
        most = max(1, q.shape[0]) if uncut else BLOCK_QUERIES
        blocks = list(query_blocks(q_starts.tolist(), k_starts.tolist(), window, most))
        has_bands = any(block.seen != SEES_EARLIER for block in blocks)
        plain = not has_bands and not softcap and sinks is None
        return cls(blocks, kernel_for(q, softcap, has_bands, by_products and plain), plain)

    def in_format(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors as the kernel gets them: on a CPU in fp32 unless plain (PADDED_TOKENS)."""
        return tuple(x.float() if x.device.type == "cpu" and not self.is_plain else x for x in tensors)

    def dtype_of(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which the blocks' results for `x` are put together."""
        return x.dtype if self.is_plain else torch.float32


@operator("banded_attention")
def _banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    q_starts: Tensor,
    k_starts: Tensor,
    window: int,
    softcap: float,
    by_products: bool,
) -> tuple[Tensor, Tensor]:
    cut = _Cut.of(q, sinks, q_starts, k_starts, window, softcap, by_products)
    y_NHE = q.new_empty(q.shape, dtype=cut.dtype_of(q))
    lse_NH = q.new_empty(q.shape[:2], dtype=torch.float32)
    ours = cut.in_format(q, k, v)
    for block in cut.blocks:
        q_, k_, v_ = (block.take(x, keys=i > 0) for i, x in enumerate(ours))
        y, lse_BHT = cut.kernel.forward(q_, k_, v_, block.seen)
        block.take(y_NHE).copy_(y)
        block.take(lse_NH).copy_(lse_BHT.transpose(1, 2))
    if sinks is not None:
        y_NHE, lse_NH = (x[0] for x in add_sinks(y_NHE[None], lse_NH[None], sinks))
    return y_NHE.to(q.dtype), lse_NH


@operator("banded_attention_backward")
def _banded_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    q_starts: Tensor,
    k_starts: Tensor,
    y: Tensor,
    lse: Tensor,
    window: int,
    softcap: float,
    by_products: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cut = _Cut.of(q, sinks, q_starts, k_starts, window, softcap, by_products)
    dq, dk, dv = (torch.zeros(x.shape, dtype=cut.dtype_of(x), device=x.device) for x in (q, k, v))
    ours = cut.in_format(dy.contiguous(), q, k, v, y)
    for block in cut.blocks:
        dy_, q_, k_, v_, y_ = (block.take(x, keys=i in (2, 3)) for i, x in enumerate(ours))
        lse_BHT = block.take(lse).transpose(1, 2)
        parts = cut.kernel.backward(dy_, q_, k_, v_, y_, lse_BHT, block.seen)
        for i, (total, part) in enumerate(zip((dq, dk, dv), parts, strict=True)):
            block.take(total, keys=i > 0).add_(part)
    if sinks is None:
        dsinks = dq.new_zeros(0)
    else:
        dsinks = gradient_of_sinks(dy[None], y[None], lse[None], sinks).to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


@torch.library.register_fake("argosy::banded_attention")
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake("argosy::banded_attention_backward")
def _(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, ctx.softcap, ctx.by_products = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor, dlse: None) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # to be asked for once only: recomputation gives it up then
    dq, dk, dv, dsinks = _banded_attention_backward(dy, *kept, ctx.window, ctx.softcap, ctx.by_products)
    return dq, dk, dv, None if kept[3] is None else dsinks, None, None, None, None, None


torch.library.register_autograd("argosy::banded_attention", _gradients, setup_context=_keep_for_backward)


@register_flop_formula(torch.ops.argosy.banded_attention, get_raw=True)
def _flops(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, q_starts: Tensor, *rest: Any, **_: Any) -> int:
    """FLOPs as if segments were equally long, without the causal mask, as torch counts attention."""
    length = k.shape[0] // (q_starts.shape[0] - 1)
    window = rest[1]
    return 4 * q.numel() * (min(window, length) if window else length)


@register_flop_formula(torch.ops.argosy.banded_attention_backward, get_raw=True)
def _backward_flops(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any, **_: Any) -> int:
    """FLOPs of backward: five matmuls for forward's two, since scores are computed again, as torch counts attention."""
    q_starts, window = rest[0], rest[-3]
    return _flops(q, k, v, sinks, q_starts, None, window) * 5 // 2
