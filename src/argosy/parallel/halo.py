"""Context parallelism of layers with a window: each rank gets the few tokens before its own that these see.

A rank has two chunks of a row (`parallel.context`). Before each chunk lie up to window - 1 tokens that others hold: its
halo. Only halos travel, once in forward and as gradients once in backward, and attention is computed locally.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.compiler import outside_graphs
from argosy.models.attention import Documents
from argosy.models.banded_attention import banded_attention

# B rows, T tokens of this rank, M those with halos, H query heads, K key/value heads, E head width


class HaloPart(NamedTuple):
    """Consecutive tokens of one rank that lie in another one's halo."""

    before: int
    """The chunk that it lies before: a part may lie before both of a rank's."""
    owner: int
    start: int
    stop: int
    """Places as the owner holds its tokens."""

    @property
    def length(self) -> int:
        return self.stop - self.start


def halos(rank: int, size: int, chunk: int, window: int) -> list[list[HaloPart]]:
    """Return the halo of both chunks of `rank`, in the order of the row; `chunk` tokens are in a chunk."""
    found = []
    for mine in (rank, 2 * size - 1 - rank):
        first = max(0, mine * chunk - (window - 1))
        parts = []
        for number in range(first // chunk, mine):
            owner = min(number, 2 * size - 1 - number)
            offset = (number >= size) * chunk
            parts.append(HaloPart(mine, owner, offset + max(0, first - number * chunk), offset + chunk))
        found.append(parts)
    return found


@outside_graphs  # an exchange in the middle
def halo_attention(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    documents: Documents | None,
    group: dist.ProcessGroup,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return `packed_attention` for this rank's tokens, [B, T, H, E]; `documents` are those of the whole rows."""
    rows, tokens = q_BTHE.shape[:2]
    chunk = tokens // 2
    mine = halos(group.rank(), group.size(), chunk, window)
    kv_BMKE = _WithHalos.apply(torch.cat((k_BTKE, v_BTKE), -1), group, window)
    k, v = kv_BMKE.flatten(0, 1).chunk(2, dim=-1)
    seq_len = tokens * group.size()
    starts = list(range(0, rows * seq_len + 1, seq_len)) if documents is None else documents.on_host.tolist()
    q_starts, k_starts = _segments(starts, rows, seq_len, chunk, group, [_length(halo) for halo in mine])
    return banded_attention(q_BTHE.flatten(0, 1), k, v, q_starts, k_starts, window, softcap, sinks_H).view_as(q_BTHE)


def _length(halo: list[HaloPart]) -> int:
    return sum(part.length for part in halo)


def _segments(
    documents: list[int], rows: int, seq_len: int, chunk: int, group: dist.ProcessGroup, halo_lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """Return where the segments of `banded_attention` start: parts of documents in this rank's chunks.

    What is before the document of a chunk's first token is a segment without queries.
    """
    q_starts, k_starts = [0], [0]
    chunks = (group.rank(), 2 * group.size() - 1 - group.rank())

    def add(queries: int, keys: int) -> None:
        if queries or keys:
            q_starts.append(q_starts[-1] + queries)
            k_starts.append(k_starts[-1] + keys)

    for row in range(rows):
        for number, before in zip(chunks, halo_lengths, strict=True):
            begin = row * seq_len + number * chunk
            index = bisect_right(documents, begin)
            seen = min(before, begin - documents[index - 1])  # of the halo, what is of the first token's document
            add(0, before - seen)
            at = begin
            while at < begin + chunk:
                end = min(documents[index], begin + chunk)
                add(end - at, end - at + (seen if at == begin else 0))
                at, index = end, index + 1
    return torch.tensor(q_starts, dtype=torch.int32), torch.tensor(k_starts, dtype=torch.int32)


class _WithHalos(torch.autograd.Function):
    """Puts each chunk's halo before it."""

    @staticmethod
    def forward(ctx: Any, x_BTX: Tensor, group: dist.ProcessGroup, window: int) -> Tensor:
        rank, size, chunk = group.rank(), group.size(), x_BTX.shape[1] // 2
        ctx.way = group, chunk, window
        # What each rank asks of each: [receiver][owner].
        asked = [_by_owner(halos(receiver, size, chunk, window), size) for receiver in range(size)]
        sent = [_take(x_BTX, asked[receiver][rank]) for receiver in range(size)]
        received = _all_to_all(sent, [_length(parts) for parts in asked[rank]], group)
        pieces = {part: piece for owner, x in enumerate(received) for part, piece in _cut(x, asked[rank][owner])}
        parts = []
        for halo, own in zip(halos(rank, size, chunk, window), x_BTX.split(chunk, 1), strict=True):
            parts += [*(pieces[part] for part in halo), own]
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad_BMX: Tensor) -> tuple[Tensor, None, None]:
        group, chunk, window = ctx.way
        rank, size = group.rank(), group.size()
        asked = [_by_owner(halos(receiver, size, chunk, window), size) for receiver in range(size)]
        own, gradients, at = [], {}, 0
        for halo in halos(rank, size, chunk, window):
            for part, piece in _cut(grad_BMX[:, at:], halo):
                gradients[part] = piece
            at += _length(halo)
            own.append(grad_BMX[:, at : at + chunk])
            at += chunk
        total, empty = torch.cat(own, 1), grad_BMX[:, :0]
        sent = [torch.cat([empty, *(gradients[part] for part in parts)], 1) for parts in asked[rank]]
        received = _all_to_all(sent, [_length(asked[receiver][rank]) for receiver in range(size)], group)
        for receiver, x in enumerate(received):
            for part, piece in _cut(x, asked[receiver][rank]):
                total[:, part.start : part.stop] += piece
        return total, None, None


def _by_owner(both: list[list[HaloPart]], size: int) -> list[list[HaloPart]]:
    """Return the parts of both halos by the rank that holds them, in order."""
    return [[part for halo in both for part in halo if part.owner == owner] for owner in range(size)]


def _take(x_BTX: Tensor, parts: list[HaloPart]) -> Tensor:
    return torch.cat([x_BTX[:, :0], *(x_BTX[:, part.start : part.stop] for part in parts)], 1)


def _cut(x_BTX: Tensor, parts: list[HaloPart]) -> Iterator[tuple[HaloPart, Tensor]]:
    """Yield each of the parts that lie one after the other in `x`."""
    at = 0
    for part in parts:
        yield part, x_BTX[:, at : at + part.length]
        at += part.length


def _all_to_all(for_ranks: list[Tensor], lengths: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Send the i-th tensor [B, t, ...] to rank i; return what came, of these `lengths`. Nothing is sent to itself."""
    rank, first = group.rank(), for_ranks[0]
    sizes = [0 if i == rank else x.shape[1] for i, x in enumerate(for_ranks)]
    wanted = [0 if i == rank else length for i, length in enumerate(lengths)]
    flat = torch.cat([x.movedim(1, 0) for i, x in enumerate(for_ranks) if i != rank])
    came = first.new_empty(sum(wanted), first.shape[0], *first.shape[2:])
    dist.all_to_all_single(came, flat.contiguous(), wanted, sizes, group=group)
    received = [x.movedim(0, 1) for x in came.split(wanted)]
    return [for_ranks[i] if i == rank else x for i, x in enumerate(received)]
