"""Context parallelism: rows too long for one rank, their tokens split over the ranks of a group.

A row is cut into 2n equal chunks and rank r of n holds chunks r and 2n-1-r ("zigzag": Brandon et al. 2023; Llama 3,
Dubey et al. 2024): an early one, which sees little, and a late one, which sees much, so that all have as much to do.

Two attention cores take the place of `packed_attention` and give the same numbers:

    RingAttention      keys and values travel round the ranks; any number of heads, messages hide behind the arithmetic
    UlyssesAttention   tokens are exchanged for heads, and back; fewer bytes, but at least one query head for each rank

`DeltaExchange` is for linear layers what Ulysses is for attention, beside either of them.

In each step of a ring a rank computes some blocks of its attention matrix (`ring_tiles`), by a kernel for each.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from argosy.compiler import operator, outside_graphs
from argosy.models.attention import Documents, packed_attention
from argosy.models.attention_kernels import SEES_ALL, SEES_EARLIER, Kernel, add_sinks, gradient_of_sinks, kernel_for
from argosy.models.delta_net import DeltaStreams, DeltaWeights, delta_attention
from argosy.parallel import halo
from argosy.parallel.tensor import exchange

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


# B batch, T tokens of this rank, S tokens of all, H query heads, K key/value heads, E head width
# n ranks, h heads that a rank has in an exchange


def shard_sequence(x: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """Return the tokens of `x` that `rank` of `size` holds; if size > 1, a multiple of 2 * size of them along `dim`."""
    if size == 1:
        return x
    assert x.shape[dim] % (2 * size) == 0, f"{x.shape[dim]} tokens cannot be cut into {2 * size} equal chunks"
    chunks = x.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def unshard_sequence(shards: Sequence[Tensor]) -> Tensor:
    """Return all tokens in their order, along dimension 1, from what each rank holds."""
    early, late = zip(*(shard.chunk(2, 1) for shard in shards), strict=True)
    return torch.cat((*early, *reversed(late)), 1)


class RingAttention:
    """`packed_attention` in which each rank of `group` computes its own tokens (Liu et al. 2023, "Ring Attention").

    Keys and values travel round the ring, the next ones while attention to the last is computed; what a token saw in
    each is merged by log-sum-exp, in fp32. In backward they travel once more, and their gradients with them, in fp32.
    No rank ever has more of them than its own and two blocks as large. For backward q, k, v, the output and the
    log-sum-exp are kept. One instance serves all layers.

    `kernel`: the arithmetic, by default the best one for the device, dtype and head width.
    """

    def __init__(self, group: dist.ProcessGroup, kernel: Kernel | None = None):
        self._group, self._ring = group, _Ring(group)
        self.ranks = group.size()
        self._kernel = kernel
        self._tiles: tuple[Tensor | None, torch.Size, list[list[Tile]]] | None = None
        self._handle = str(next(_HANDLES))
        _RINGS[self._handle] = self

    def __call__(
        self,
        q_BTHE: Tensor,
        k_BTKE: Tensor,
        v_BTKE: Tensor,
        documents: Documents | None,
        window: int = 0,
        softcap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's [B, T, H, E]; `documents` are those of the whole rows (see `packed_attention`).

        With a window, nothing goes round the ring: see `parallel.halo`.
        """
        if window:
            return halo.halo_attention(q_BTHE, k_BTKE, v_BTKE, documents, self._group, window, softcap, sinks_H)
        H, K = q_BTHE.shape[2], k_BTKE.shape[2]
        assert k_BTKE.shape == v_BTKE.shape
        assert H % K == 0, f"{K} key/value heads do not divide {H} query heads"
        starts = None if documents is None else documents.on_host
        return _ring_attention(q_BTHE, k_BTKE, v_BTKE, starts, sinks_H, softcap, self._handle)[0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None, softcap: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output, [B, T, H, E], and in fp32 the log-sum-exp of the scores, [B, T, H]; without autograd."""
        kernel = self._kernel or kernel_for(q, softcap)
        y_BTHE = q.new_empty(q.shape, dtype=torch.float32)
        lse_BTH = q.new_empty(q.shape[:3], dtype=torch.float32)
        blocks = self._ring.blocks(torch.stack((k, v)))
        for step, (tiles, kv) in enumerate(zip(self._tiles_of(documents, q), blocks, strict=True)):
            put = _set if step == 0 else _merge  # every token sees itself first
            for rows, queries, keys, causal in tiles:
                k_tile, v_tile = kv[:, rows, keys]
                y, lse = kernel.forward(q[rows, queries], k_tile, v_tile, SEES_EARLIER if causal else SEES_ALL)
                put(y_BTHE[rows, queries], lse_BTH[rows, queries], y, lse.transpose(1, 2))
        if sinks is not None:
            y_BTHE, lse_BTH = add_sinks(y_BTHE, lse_BTH, sinks)
        return y_BTHE.to(q.dtype), lse_BTH

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        y: Tensor,
        lse_BTH: Tensor,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of q and, stacked, of k and v, given that of `forward`'s output."""
        kernel = self._kernel or kernel_for(q, softcap)
        dy, lse = dy.contiguous(), lse_BTH.transpose(1, 2)
        dq = q.new_zeros(q.shape, dtype=torch.float32)
        arriving: Callable[[], Tensor] | None = None
        blocks = self._ring.blocks(torch.stack((k, v)))
        for tiles, kv in zip(self._tiles_of(documents, q), blocks, strict=True):
            dkv = torch.zeros_like(kv, dtype=torch.float32)
            for rows, queries, keys, causal in tiles:
                dy_tile, q_tile, y_tile = (x[rows, queries] for x in (dy, q, y))
                k_tile, v_tile = kv[:, rows, keys]
                lse_tile = lse[rows, :, queries]
                seen = SEES_EARLIER if causal else SEES_ALL
                parts = kernel.backward(dy_tile, q_tile, k_tile, v_tile, y_tile, lse_tile, seen)
                for total, part in zip((dq[rows, queries], *dkv[:, rows, keys]), parts, strict=True):
                    total.add_(part)
            if arriving is not None:  # what the ranks before have found for this same block
                dkv += arriving()
            arriving = self._ring.pass_on(dkv)
        assert arriving is not None
        return dq.to(q.dtype), arriving().to(k.dtype)

    def _tiles_of(self, documents: Tensor | None, q_BTHE: Tensor) -> list[list[Tile]]:
        if self._tiles is None or q_BTHE.shape != self._tiles[1] or not _is_same_memory(self._tiles[0], documents):
            rows, seq_len = q_BTHE.shape[0], q_BTHE.shape[1] * self._ring.size
            starts = list(range(0, rows * seq_len + 1, seq_len)) if documents is None else documents.tolist()
            tiles = ring_tiles(starts, rows, seq_len, self._ring.rank, self._ring.size)
            self._tiles = documents, q_BTHE.shape, tiles
        return self._tiles[2]


class UlyssesAttention:
    """`packed_attention` in which each rank of `group` computes some heads (Jacobs et al. 2023, "DeepSpeed Ulysses").

    One all-to-all gives each rank all tokens of H/n query heads and K/n key/value heads, another brings the output
    back. n must divide H, and either divide K or be a multiple of it; then key/value heads are sent to several ranks.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    @outside_graphs  # an exchange in the middle: attention itself is one kernel anyway
    def __call__(
        self,
        q_BTHE: Tensor,
        k_BTKE: Tensor,
        v_BTKE: Tensor,
        documents: Documents | None,
        window: int = 0,
        softcap: float = 0.0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return this rank's [B, T, H, E]; `documents` are those of the whole rows (see `packed_attention`)."""
        n, H, K = self._group.size(), q_BTHE.shape[2], k_BTKE.shape[2]
        assert k_BTKE.shape == v_BTKE.shape
        assert H % n == 0 and H % K == 0, f"{H} query heads over {n} ranks, {K} key/value heads"
        assert K % n == 0 or n % K == 0, f"{K} key/value heads over {n} ranks"
        if n > K:
            k_BTKE, v_BTKE = (x.repeat_interleave(n // K, dim=2) for x in (k_BTKE, v_BTKE))
        # For each rank its heads of all three, side by side: one message.
        for_ranks_BTnhE = torch.cat([x.unflatten(2, (n, -1)) for x in (q_BTHE, k_BTKE, v_BTKE)], dim=3)
        heads = [x.shape[2] // n for x in (q_BTHE, k_BTKE, v_BTKE)]
        q, k, v = exchange(for_ranks_BTnhE, self._group, _tokens_to_heads, _heads_to_tokens).split(heads, dim=2)
        if sinks_H is not None:
            sinks_H = sinks_H.unflatten(0, (n, -1))[self._group.rank()]
        y = packed_attention(q, k, v, documents, window, softcap, sinks_H)
        return exchange(y, self._group, _heads_to_tokens, _tokens_to_heads).flatten(2, 3)


class DeltaExchange:
    """`delta_attention` in which each rank of `group` computes the states of some heads, for all tokens.

    A state goes from token to token, so ranks with tokens of their own would wait for each other, one after the other.
    As Ulysses does for attention, one all-to-all gives each rank all tokens of its heads, and another one brings back
    what the heads read. The number of ranks must divide the key heads.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    @outside_graphs  # exchanges at both ends; the arithmetic between is the same few operators for all layers
    def __call__(
        self,
        streams: DeltaStreams,
        weights: DeltaWeights,
        documents: Documents | None,
        key_width: int,
        recomputes: bool,
    ) -> Tensor:
        """Return this rank's [B, T, H, V]; `documents` are those of the whole rows (see `packed_attention`)."""
        n, rank = self._group.size(), self._group.rank()
        parts = [x.unflatten(2, (n, -1)) for x in streams]
        mine = exchange(torch.cat(parts, dim=3), self._group, _tokens_to_heads, _heads_to_tokens)
        own = DeltaStreams(*mine.split([part.shape[3] for part in parts], dim=2))
        y = delta_attention(own, weights.part(rank, n), documents, key_width, recomputes)
        return exchange(y, self._group, _heads_to_tokens, _tokens_to_heads).flatten(2, 3)


class _Ring:
    """The ranks of a group in a ring: each receives from the one before and sends to the next."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self.rank, self.size = group, group.rank(), group.size()

    def pass_on(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Begin to send `x` to the next rank; the result waits for what the rank before sent, and returns it."""
        if self.size == 1:
            return lambda: x
        received = torch.empty_like(x) if into is None else into
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        send = dist.P2POp(dist.isend, x, group=self._group, group_peer=after)
        receive = dist.P2POp(dist.irecv, received, group=self._group, group_peer=before)
        works = dist.batch_isend_irecv([send, receive])

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def blocks(self, block: Tensor) -> Iterator[Tensor]:
        """Yield the `block`s of this rank, the one before, and so on; each travels while the last one is worked on.

        There are two at any time: each is good until the next is asked for, and this rank's own is written over.
        """
        other = torch.empty_like(block)
        for _ in range(self.size - 1):
            wait = self.pass_on(block, into=other)
            yield block
            wait()
            block, other = other, block
        yield block


# To torch it is one operator: selective recomputation keeps its output and not that of every tile, and the compiler,
# which cannot follow messages, takes it as it is. An operator has no Python objects among its arguments: hence handles.
# They are strings: of a number, the compiler would make a variable once a process is in its second world, and fail.
_HANDLES = itertools.count()
_RINGS: WeakValueDictionary[str, RingAttention] = WeakValueDictionary()


@operator("ring_attention")
def _ring_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, sinks: Tensor | None, softcap: float, handle: str
) -> tuple[Tensor, Tensor]:
    return _RINGS[handle].forward(q, k, v, documents, sinks, softcap)


@operator("ring_attention_backward")
def _ring_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    y: Tensor,
    lse: Tensor,
    softcap: float,
    handle: str,
) -> tuple[Tensor, Tensor]:
    return _RINGS[handle].backward(dy, q, k, v, documents, y, lse, softcap)


@torch.library.register_fake("argosy::ring_attention")
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("argosy::ring_attention_backward")
def _(dy: Tensor, q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(2, *k.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.softcap, ctx.handle = inputs
    ctx.ring = _RINGS[ctx.handle]  # lives as long as this: the handle alone does not hold it
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor, dlse: None) -> tuple[Tensor | None, ...]:
    q, k, v, documents, sinks, y, lse = ctx.saved_tensors
    dq, dkv = _ring_attention_backward(dy, q, k, v, documents, y, lse, ctx.softcap, ctx.handle)
    dsinks = None if sinks is None else gradient_of_sinks(dy, y, lse, sinks).to(sinks.dtype)
    return dq, *dkv.unbind(), None, dsinks, None, None


torch.library.register_autograd("argosy::ring_attention", _gradients, setup_context=_keep_for_backward)


@register_flop_formula(torch.ops.argosy.ring_attention, get_raw=True)
def _flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    handle: str,
    **_: Any,
) -> int:
    """FLOPs of this rank, as if documents were equally long and the future not masked, as torch counts attention."""
    tokens = q.shape[0] * q.shape[1] * _RINGS[handle].ranks
    return 4 * q.numel() * tokens // (q.shape[0] if documents is None else documents.shape[0] - 1)


def _is_same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if `b` is the tensor `a`, maybe as another object: while `a` lives, no other has its address."""
    if a is None or b is None:
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


def _set(y_BTHE: Tensor, lse_BTH: Tensor, y_tile: Tensor, lse_tile: Tensor) -> None:
    y_BTHE.copy_(y_tile)
    lse_BTH.copy_(lse_tile)


def _merge(y_BTHE: Tensor, lse_BTH: Tensor, y_tile: Tensor, lse_tile: Tensor) -> None:
    """Make `y` and `lse`, in place, what they are when the queries see the tile's keys too."""
    share_BTH1 = torch.sigmoid(lse_tile - lse_BTH)[..., None]
    y_BTHE.lerp_(y_tile.float(), share_BTH1)
    torch.logaddexp(lse_BTH, lse_tile, out=lse_BTH)


def _tokens_to_heads(x_BTnhE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Turn this rank's tokens, with every rank's heads, into all tokens S = nT with this rank's heads; [B, S, h, E]."""
    return unshard_sequence(_all_to_all(x_BTnhE.movedim(2, 0), group).unbind())


def _heads_to_tokens(x_BShE: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Turn all tokens with this rank's heads into this rank's tokens with every rank's heads; [B, T, n, h, E]."""
    n = group.size()
    return _all_to_all(torch.stack([shard_sequence(x_BShE, rank, n) for rank in range(n)]), group).movedim(0, 2)


def _all_to_all(for_ranks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the i-th part to rank i; what rank i sent comes i-th."""
    for_ranks = for_ranks.contiguous()
    received = torch.empty_like(for_ranks)
    dist.all_to_all_single(received, for_ranks, group=group)
    return received
