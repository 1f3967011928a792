"""Buckets of gradients: pieces whose gradients travel together, and how replicas agree on their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from argosy.faults import fault
from argosy.models.layers import local
from argosy.parallel.checks import checksums, sum_of_bits
from argosy.parallel.collectives import all_gather_single, reduce_scatter_single
from argosy.parallel.pieces import Held
from argosy.sync.compressor import BucketFacts, Compressor, Memory, Moment, Segment, Sending
from argosy.sync.exact import Exact
from argosy.sync.lane import Lane, Sum

BUCKET_BYTES = 4 * 2**20
"""Gradients sent at once, unless the plan says otherwise."""


@dataclass(frozen=True)
class Ranks:
    """The ranks over which gradients are summed: those that share one replica of the state, and those with one each."""

    shard: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None


@dataclass(frozen=True)
class Agreement:
    """How replicas agree on the sums of gradients. One serves all of a rank's gradients."""

    lane: Lane
    compressor: Compressor = Exact()  # noqa: RUF009  (it keeps nothing)
    goes_exact: Callable[[Held], bool] = lambda piece: False
    """True for a piece that is summed exactly, whatever the compressor."""
    exact_steps: int = 0
    """First steps of the run in which all are."""
    seed: int = 0
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers for buckets: the same on all replicas."""
    bucket_bytes: int = BUCKET_BYTES


class Bucket:
    """Pieces that travel together. Their flat buffer begins with all that goes to rank 0, then to rank 1, ..."""

    def __init__(
        self,
        pieces: Sequence[Held],
        ranks: Ranks,
        dtype: torch.dtype,
        keep: bool,
        how: Agreement,
        is_compressed: bool = False,
    ):
        """`keep`: gradients stay in memory after they were sent, where ranks share the state."""
        self.pieces, self._ranks, self._dtype, self._how = pieces, ranks, dtype, how
        self._keep = keep and ranks.shard is not None
        self._n = ranks.shard.size() if ranks.shard else 1
        self._flat = self._mine = torch.empty(0)
        self._sum: Sum | None = None
        self.arrivals = 0
        self.checksums: Tensor | None = None
        self.bits: Tensor | None = None
        self._compressor = how.compressor if is_compressed and ranks.replicate is not None else Exact()
        widths = [width for _, width in self._widths()]
        device = local(pieces[0].parameter).device
        segments = tuple(_segment(piece, self._n) for piece in pieces)
        memory = self._compressor.memory(segments, device)
        assert sum(widths) == sum(segment.elements for segment in segments)
        self._about = BucketFacts(next(how.numbers), segments, memory, how.seed)

    def gather_up(self) -> Tensor:
        """Return this rank's gradients, a row for each rank."""
        rows = [_in_rows(_gradient(piece), self._n, width) for piece, width in self._widths()]
        return torch.cat(rows, dim=1).to(self._dtype)

    def send(self, checks: bool, watches: bool, moment: Moment) -> None:
        """Start to sum the gradients over the ranks; they are freed unless they are to be kept."""
        self._flat = self.gather_up()
        self.checksums = checksums(self._flat) if checks else None
        fault("bucket", tensors=lambda: {"bucket": self._flat})
        self.bits = sum_of_bits(self._flat) if watches else None
        if not self._keep:
            for piece in self.pieces:
                piece.parameter.grad = None
        self._about.memory.drop()
        is_exact = moment.step < self._how.exact_steps
        way = Exact() if is_exact else self._compressor
        work = None
        if self._ranks.shard is not None:
            self._mine = self._flat.new_empty(self._flat.shape[1])
            work = reduce_scatter_single(self._mine, self._flat.flatten(), group=self._ranks.shard, async_op=True)
        else:
            self._mine = self._flat.flatten()
        messages = (work is not None) + (way.messages if self._ranks.replicate is not None else 0)
        self._sum = self._how.lane.submit(self._sending(work, way, moment), messages)

    def _sending(self, work: dist.Work | None, way: Compressor, moment: Moment) -> Sending:
        """Sum over the ranks that share a replica (`work` does so), then over replicas."""
        if work is not None:
            yield work
        if self._ranks.replicate is None:
            return self._mine
        sums = yield from way.sum(self._mine, self._ranks.replicate, self._about, moment)
        return sums.to(self._dtype)

    def receive(self) -> Tensor:
        """Wait for the sums, and make them the gradients of the pieces' values; returns them as they came."""
        assert self._sum is not None
        received = self._how.lane.finish(self._sum)
        for piece, sums in zip(self.pieces, self._split(received), strict=True):
            piece.value.grad = sums.to(piece.value.dtype)
        self._sum, self._flat, self.arrivals = None, torch.empty(0), 0
        self._mine = self._flat
        return received

    @property
    def number(self) -> int:
        """Its place among the buckets of the model on this rank."""
        return self._about.number

    @property
    def replica(self) -> int:
        """This rank's place among the replicas."""
        return 0 if self._ranks.replicate is None else self._ranks.replicate.rank()

    @property
    def replicas(self) -> int:
        """How many replicas sum this bucket."""
        return 1 if self._ranks.replicate is None else self._ranks.replicate.size()

    @property
    def memory(self) -> Memory:
        """What this rank keeps of earlier sums."""
        return self._about.memory

    def kept_of_pieces(self, name: str) -> list[tuple[Held, Tensor]]:
        """Return each piece with its part of what is kept under `name`, as long as the bucket, in its shape."""
        kept = self.memory.kept.get(name)
        return [] if kept is None else list(zip(self.pieces, self._split(kept), strict=True))

    def start_gathering(self) -> Gathering:
        """Start to give every rank the values that the others have updated."""
        mine = torch.cat([_in_rows(piece.value, 1, width).flatten() for piece, width in self._widths()])
        everyone = mine.new_empty(self._n * len(mine))
        return Gathering(self, all_gather_single(everyone, mine, group=self._ranks.shard, async_op=True), everyone)

    def take(self, everyone: Tensor) -> None:
        """Make the values of all ranks the parameters' values."""
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


@dataclass
class Gathering:
    """Values on their way to all ranks."""

    bucket: Bucket
    work: dist.Work | None
    everyone: Tensor

    def finish(self) -> None:
        """Wait for the values and take them over."""
        if self.work is not None:
            self.work.wait()
        self.bucket.take(self.everyone)


def cut(pieces: Sequence[Held], bucket_bytes: int) -> list[list[Held]]:
    """Cut the pieces, from the last on, into buckets of about so many bytes."""
    buckets: list[list[Held]] = [[]]
    size = 0
    for piece in reversed(pieces):
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(piece)
        whole = local(piece.parameter)
        size += whole.numel() * whole.element_size()
    return [bucket for bucket in buckets if bucket]


def _segment(piece: Held, n: int) -> Segment:
    """Return the largest part that a parameter is cut into over `n` ranks, as matrices: those of experts one each."""
    rows, *rest = local(piece.parameter).shape
    rows = -(-rows // n)
    return Segment(rows, rest[0], prod(rest[1:])) if len(rest) > 1 else Segment(1, rows, prod(rest))


def _in_rows(tensor: Tensor, n: int, width: int) -> Tensor:
    """Return `tensor` as [n, width], a row for each rank, filled up with zeros."""
    flat = tensor.flatten()
    missing = n * width - len(flat)
    return (F.pad(flat, (0, missing)) if missing else flat).view(n, width)  # to pad by nothing would copy


def _gradient(piece: Held) -> Tensor:
    gradient = piece.parameter.grad
    assert gradient is not None, f"{piece.name}: every parameter takes part in every step"
    return local(gradient)
