"""Data parallelism with ZeRO stages 0 to 2: gradients are summed over ranks while backward still runs.

Stage 0 all-reduces them; 1 and 2 (Rajbhandari et al. 2020) reduce-scatter them, so that each rank gets the part that it
updates, and all-gather the updated values. Each gradient is freed when it has been sent; stage 1 keeps it until the
step is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from argosy.faults import fault
from argosy.models.layers import local
from argosy.parallel.checks import checksums, is_sum, sum_of_bits
from argosy.parallel.collectives import all_gather_single, reduce_scatter_single
from argosy.parallel.pieces import Held

NEVER = 2**62
"""A number of backward passes that is never reached."""
BUCKET_BYTES = 4 * 2**20
"""Gradients sent at once: large enough to hide a link's latency, small enough to start early."""


@dataclass(frozen=True)
class Ranks:
    """The ranks over which gradients are summed: those that share one replica of the state, and those with one each."""

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None


class _Bucket:
    """Pieces that travel together. Their flat buffer begins with all that goes to rank 0, then to rank 1, ..."""

    def __init__(self, pieces: Sequence[Held], ranks: Ranks, dtype: torch.dtype, keep: bool):
        self.pieces, self._ranks, self._dtype = pieces, ranks, dtype
        self._keep = keep and ranks.shard is not None
        self._n = ranks.shard.size() if ranks.shard else 1
        self._work: dist.Work | None = None
        self._flat = self._mine = torch.empty(0)
        self.arrivals = 0
        self.checksums: Tensor | None = None
        self.bits: Tensor | None = None

    def gather_up(self) -> Tensor:
        """Return this rank's gradients, a row for each rank."""
        rows = [_in_rows(_gradient(piece), self._n, width) for piece, width in self._widths()]
        return torch.cat(rows, dim=1).to(self._dtype)

    def send(self, checks: bool, watches: bool) -> None:
        """Start to sum the gradients over the ranks; they are freed unless they are to be kept."""
        self._flat = self.gather_up()
        self.checksums = checksums(self._flat) if checks else None
        fault("bucket", tensors=lambda: {"bucket": self._flat})
        self.bits = sum_of_bits(self._flat) if watches else None
        if not self._keep:
            for piece in self.pieces:
                piece.parameter.grad = None
        if self._ranks.shard is not None:
            self._mine = self._flat.new_empty(self._flat.shape[1])
            self._work = reduce_scatter_single(self._mine, self._flat.flatten(), group=self._ranks.shard, async_op=True)
        else:
            self._mine = self._flat.flatten()
            self._work = dist.all_reduce(self._mine, group=self._ranks.replicate, async_op=True)

    def receive(self) -> Tensor:
        """Wait for the sums, and make them the gradients of the pieces' values; returns them as they came."""
        assert self._work is not None
        self._work.wait()
        if self._ranks.shard is not None and self._ranks.replicate is not None:
            dist.all_reduce(self._mine, group=self._ranks.replicate)
        for piece, sums in zip(self.pieces, self._split(self._mine), strict=True):
            piece.value.grad = sums.to(piece.value.dtype)
        self._work, self._flat, self.arrivals = None, torch.empty(0), 0
        received, self._mine = self._mine, self._flat
        return received

    def gather_values(self) -> None:
        """Give every rank the values that the others have updated."""
        mine = torch.cat([_in_rows(piece.value, 1, width).flatten() for piece, width in self._widths()])
        everyone = mine.new_empty(self._n * len(mine))
        all_gather_single(everyone, mine, group=self._ranks.shard)
        columns = everyone.view(self._n, -1).split([width for _, width in self._widths()], dim=1)
        for piece, rows in zip(self.pieces, columns, strict=True):
            whole = local(piece.parameter.detach())
            whole.copy_(rows.flatten()[: whole.numel()].view_as(whole))

    def _widths(self) -> list[tuple[Held, int]]:
        """Return each piece with the size of the largest part that its parameter is cut into along its first dim."""
        wholes = [local(piece.parameter) for piece in self.pieces]
        sizes = [-(-w.shape[0] // self._n) * (w.numel() // max(1, w.shape[0])) for w in wholes]
        return list(zip(self.pieces, sizes, strict=True))

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([width for _, width in self._widths()])
        return [part[: p.value.numel()].view_as(p.value) for part, p in zip(parts, self.pieces, strict=True)]


class GradientSum:
    """Sums gradients once per step, overlapped with the backward of the last microbatch.

    The buckets follow the order in which backward reaches parameters (last layer first) and are sent in that
    order on every rank, so that the collectives match (Li et al. 2020, "PyTorch Distributed", section 3.2).
    A rank that is alone has nothing to sum, and its gradients stay where they are.
    """

    def __init__(self, pieces: Sequence[Held], ranks: Ranks, dtype: torch.dtype, keep: bool, checks: bool = False):
        """`dtype`: that of the sums; `keep`: a gradient stays in memory after it was sent (ZeRO stage 1); `checks`:
        the sums are compared with their checksums."""
        self._ranks, self._checks = ranks, checks
        self.watches = False
        """True if `bits` is to tell this rank's gradients of the next steps."""
        self.is_sound: Tensor | None = None
        """True if the sums of the last step fit their checksums, bool, no dims; None if they were not checked."""
        self._alone = pieces if ranks.shard is None and ranks.replicate is None else ()
        self._shared = ranks.shard is not None
        self._expected = 0
        self._next = 0
        self._buckets = [] if self._alone else [_Bucket(some, ranks, dtype, keep) for some in _cut(pieces)]
        for bucket in self._buckets:
            arrived = partial(_tell, weakref.ref(self), weakref.ref(bucket))
            for piece in bucket.pieces:
                piece.parameter.register_post_accumulate_grad_hook(arrived)

    def arm(self, backwards: int) -> None:
        """Begin a step in which this many backwards reach each parameter: the last completes its gradient."""
        self._expected = backwards
        self._next = 0

    def before_backward(self, last: bool) -> None:
        """Nothing to do: the hooks count."""

    def finish(self) -> None:
        """Wait until every piece's gradient is the sum over the ranks."""
        self._send_until(len(self._buckets))  # a pipeline schedule may have set gradients without our hooks
        received = [bucket.receive() for bucket in self._buckets]
        if self._checks and received:
            self.is_sound = self._check(received)
        self._expected = 0
        for piece in self._alone:
            piece.value.grad = _gradient(piece)

    def after_update(self) -> None:
        """Once the optimizer has changed the pieces' values, make every rank's model whole again."""
        if self._shared:
            for bucket in self._buckets:
                bucket.gather_values()

    def _arrived(self, bucket: _Bucket) -> None:
        bucket.arrivals += 1
        ready = self._next
        while ready < len(self._buckets) and self._is_whole(self._buckets[ready]):
            ready += 1
        self._send_until(ready)

    def _is_whole(self, bucket: _Bucket) -> bool:
        return bucket.arrivals == self._expected * len(bucket.pieces)

    def bits(self) -> Tensor:
        """Return the bits of this rank's gradients of the last step, before the sum over ranks; int64, no dims."""
        return torch.stack([bucket.bits for bucket in self._buckets if bucket.bits is not None]).sum()

    def hold(self) -> None:
        """Keep the gradients of the following backward passes on this rank, until `let_go`."""
        self._expected = NEVER

    def let_go(self) -> Tensor:
        """Drop the gradients of the passes since `hold`; returns their bits as `bits` gives them."""
        found = torch.stack([sum_of_bits(bucket.gather_up()) for bucket in self._buckets]).sum()
        for bucket in self._buckets:
            bucket.arrivals = 0
            for piece in bucket.pieces:
                piece.parameter.grad = None
        self._expected = 0
        return found

    def _check(self, received: Sequence[Tensor]) -> Tensor:
        """Compare the sums with the checksums of what all ranks sent: one small message for all buckets."""
        sent = torch.stack([bucket.checksums for bucket in self._buckets if bucket.checksums is not None])
        ranks = 1
        for group in (self._ranks.shard, self._ranks.replicate):
            if group is not None:
                dist.all_reduce(sent, group=group)
                ranks *= group.size()
        mine = 0 if self._ranks.shard is None else self._ranks.shard.rank()
        return torch.stack([is_sum(sums, total[mine], ranks) for sums, total in zip(received, sent, strict=True)]).all()

    def _send_until(self, end: int) -> None:
        for bucket in self._buckets[self._next : end]:
            bucket.send(self._checks, self.watches)
        self._next = max(self._next, end)


def _tell(rule: Callable[[], GradientSum | None], bucket: Callable[[], _Bucket | None], _: Tensor) -> None:
    """Tell the rule of a gradient. The references are weak: else a parameter would hold itself through autograd."""
    if (alive := rule()) is not None and (its := bucket()) is not None:
        alive._arrived(its)


def _cut(pieces: Sequence[Held]) -> list[list[Held]]:
    """Cut the pieces, from the last on, into buckets of about BUCKET_BYTES."""
    buckets: list[list[Held]] = [[]]
    size = 0
    for piece in reversed(pieces):
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(piece)
        whole = local(piece.parameter)
        size += whole.numel() * whole.element_size()
    return [bucket for bucket in buckets if bucket]


def _in_rows(tensor: Tensor, n: int, width: int) -> Tensor:
    """Return `tensor` as [n, width], a row for each rank, filled up with zeros."""
    flat = tensor.flatten()
    missing = n * width - len(flat)
    return (F.pad(flat, (0, missing)) if missing else flat).view(n, width)  # to pad by nothing would copy


def _gradient(piece: Held) -> Tensor:
    gradient = piece.parameter.grad
    assert gradient is not None, f"{piece.name}: every parameter takes part in every step"
    return local(gradient)
