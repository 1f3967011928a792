"""Buckets of gradients: pieces whose gradients travel together, how replicas agree on their sums, and checksums.

The checksum of a sum over ranks is the sum of the checksums (algorithm-based fault tolerance: Huang & Abraham 1984,
"Algorithm-Based Fault Tolerance for Matrix Operations"). In floating point both are rounded, so an error no larger than
rounding cannot be seen: a flip of a low bit.
"""

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
from argosy.parallel.mesh import Replicas
from argosy.parallel.pieces import PlacedPiece
from argosy.sync.compressor import (
    BucketFacts,
    BucketMemory,
    Compressor,
    Exact,
    Lane,
    Segment,
    Sending,
    Sum,
    SumTime,
    all_gather_single,
    reduce_scatter_single,
    started,
)

BUCKET_BYTES = 4 * 2**20
"""Gradients sent at once, unless the plan says otherwise."""
SIGMAS = 8
"""Tolerance of a checksum, in standard deviations of rounding."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes of an element."""


@dataclass(frozen=True)
class SumRanks:
    """The ranks over which gradients are summed: those that share one replica of the state, and those with one each."""

    shard: dist.ProcessGroup | None
    replicas: Replicas

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that a sum goes through."""
        tiers = [tier.scatter for tier in self.replicas.inside]
        return [group for group in (self.shard, *tiers, *self.replicas.across[:1]) if group is not None]

    @property
    def parts(self) -> int:
        """Parts of a gradient, one for each rank of the inner tiers, that are summed across."""
        return prod(tier.size for tier in self.replicas.inside)

    @property
    def part(self) -> int:
        """This rank's."""
        place = 0
        for tier in self.replicas.inside:
            place = place * tier.size + tier.scatter.rank()
        return place


@dataclass(frozen=True)
class GradientSync:
    """The way replicas sum gradients. One serves all of a rank's gradients."""

    lane: Lane
    compressor: Compressor = Exact()  # noqa: RUF009  (it keeps nothing)
    goes_exact: Callable[[PlacedPiece], bool] = lambda piece: False
    """True for a piece that is summed exactly, whatever the compressor."""
    exact_steps: int = 0
    """First steps of the run in which all are."""
    seed: int = 0
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers for buckets: the same on all replicas."""
    bucket_bytes: int = BUCKET_BYTES


class Bucket:
    """Pieces that travel together. Their flat buffer begins with all that goes to rank 0, then to rank 1, ...

    Where replicas sum in tiers, what goes to a rank is cut once more, into a part of each matrix for each of its
    neighbours (`Segment.part`).
    """

    def __init__(
        self,
        pieces: Sequence[PlacedPiece],
        ranks: SumRanks,
        dtype: torch.dtype,
        keep: bool,
        how: GradientSync,
        is_compressed: bool = False,
    ):
        """`keep`: gradients stay in memory after they were sent, where ranks share the state."""
        self.pieces, self._ranks, self._dtype, self._how = pieces, ranks, dtype, how
        self._keep = keep and ranks.shard is not None
        self._n, self._k = ranks.shard.size() if ranks.shard else 1, ranks.parts
        self._sum: Sum | None = None
        self.arrivals = 0
        self.checksums: Tensor | None = None
        self.bits: Tensor | None = None
        self._compressor = how.compressor if is_compressed and ranks.replicas.across else Exact()
        self._segments = [_segment(piece, self._n) for piece in pieces]
        device = local(pieces[0].parameter).device
        segments = tuple(segment.part(self._k) for segment in self._segments)
        memory = self._compressor.memory(segments, device)
        self._about = BucketFacts(next(how.numbers), segments, memory, how.seed)

    def gather_up(self) -> Tensor:
        """Return this rank's gradients, a row for each rank."""
        rows = [_in_rows(gradient_of(piece), self._n, width) for piece, width in self._widths()]
        if self._k > 1:
            rows = [segment.cut(row, self._k) for segment, row in zip(self._segments, rows, strict=True)]
        return torch.cat(rows, dim=-1).flatten(1).to(self._dtype)

    def send(self, checks: bool, watches: bool, moment: SumTime) -> None:
        """Start to sum the gradients over the ranks; they are freed unless they are to be kept."""
        flat = self.gather_up()
        self.checksums = checksums(flat) if checks else None
        fault("bucket", tensors=lambda: {"bucket": flat})
        self.bits = sum_of_bits(flat) if watches else None
        if not self._keep:
            for piece in self.pieces:
                piece.parameter.grad = None
        self._about.memory.drop()
        is_exact = moment.step < self._how.exact_steps
        way = Exact() if is_exact else self._compressor
        tiers = [1] * len(self._ranks.replicas.inside)
        across = [int(message < way.messages) for message in range(len(self._ranks.replicas.across))]
        is_shared = self._ranks.shard is not None
        sums = flat.new_empty(flat.shape[1]) if is_shared else flat.flatten()
        phases = [int(is_shared), *tiers, *across, *tiers]
        self._sum = self._how.lane.submit(self._sending(flat, sums, way, moment), phases)

    def _sending(self, rows: Tensor, sums: Tensor, way: Compressor, moment: SumTime) -> Sending:
        """Sum `rows` into `sums` over the ranks that share a replica, then `sums` over replicas, tier by tier and back.
        Each is let go of once it is not needed."""
        replicas, lane = self._ranks.replicas, self._how.lane
        lane.keep(rows)
        lane.keep(sums)
        if self._ranks.shard is not None:
            yield started(reduce_scatter_single(sums, rows.flatten(), group=self._ranks.shard, async_op=True))
        del rows
        for tier in replicas.inside:
            part = sums.new_empty(len(sums) // tier.size)
            yield started(reduce_scatter_single(part, sums, group=tier.scatter, async_op=True))
            sums = part
        if replicas.across:
            sums = (yield from way.sum(sums, replicas.across, self._about, moment)).to(self._dtype)
        for tier in reversed(replicas.inside):
            whole = sums.new_empty(len(sums) * tier.size)
            yield started(all_gather_single(whole, sums, group=tier.gather, async_op=True))
            sums = whole
        return sums

    def receive(self) -> Tensor:
        """Wait for the sums, and make them the gradients of the pieces' values; returns them as they came."""
        assert self._sum is not None
        received = self._how.lane.finish(self._sum)
        for piece, sums in zip(self.pieces, self._split(received), strict=True):
            piece.value.grad = sums.to(piece.value.dtype)
        self._sum, self.arrivals = None, 0
        return received

    @property
    def number(self) -> int:
        """Its place among the buckets of the model on this rank."""
        return self._about.number

    @property
    def part(self) -> int:
        """Index of the part of the sum that this rank takes across; 0 where replicas do not sum in tiers."""
        return self._ranks.part

    @property
    def replica(self) -> int:
        """This rank's place among those that sum across: replicas, or groups of them that have summed inside."""
        across = self._ranks.replicas.across
        return across[0].rank() if across else 0

    @property
    def replicas(self) -> int:
        """Number of ranks that sum across."""
        across = self._ranks.replicas.across
        return across[0].size() if across else 1

    @property
    def memory(self) -> BucketMemory:
        """This rank's compressor state, from earlier sums."""
        return self._about.memory

    def kept_of_pieces(self, name: str) -> list[tuple[PlacedPiece, tuple[int, ...], Tensor]]:
        """Return of each piece what is kept under `name` of the part that this rank takes across, in its shape, and its
        place in the whole parameter. Where that part is all of the piece, so are shape and place."""
        kept = self.memory.kept.get(name)
        if kept is None:
            return []
        if self._k == 1:
            return [(p, p.offset, kept) for p, kept in zip(self.pieces, self._split(kept), strict=True)]
        found = []
        flats = kept.split([segment.elements for segment in self._about.segments])
        for piece, segment, flat in zip(self.pieces, self._about.segments, flats, strict=True):
            dim = segment.row_dim
            first = min(self.part * segment.rows, piece.value.shape[dim])
            shape = list(piece.value.shape)
            shape[dim] = min(segment.rows, shape[dim] - first)
            offset = tuple(at + first * (d == dim) for d, at in enumerate(piece.offset))
            of_part = flat.view(segment.batch, segment.rows, segment.cols)[: shape[0] if dim else 1, : shape[dim]]
            found.append((piece, offset, of_part.view(shape)))
        return found

    def values(self) -> Tensor:
        """Return what this rank has updated, a copy, as long as a rank's row."""
        return torch.cat([_in_rows(piece.value, 1, width).flatten() for piece, width in self._widths()])

    def start_gathering(self, mine: Tensor) -> tuple[dist.Work | None, Tensor]:
        """Start to give every rank the values that the others have updated; returns where they will be."""
        everyone = mine.new_empty(self._n * len(mine))
        return all_gather_single(everyone, mine, group=self._ranks.shard, async_op=True), everyone

    @torch.no_grad()
    def take(self, everyone: Tensor) -> None:
        """Make the other ranks' values the parameters' values; this rank's own are there."""
        assert self._ranks.shard is not None
        me = self._ranks.shard.rank()
        columns = everyone.view(self._n, -1).split([width for _, width in self._widths()], dim=1)
        for piece, rows in zip(self.pieces, columns, strict=True):
            whole = local(piece.parameter.detach())
            each = -(-whole.shape[0] // self._n)
            for there, theirs in (whole[: me * each], rows[:me]), (whole[(me + 1) * each :], rows[me + 1 :]):
                there.copy_(theirs.flatten()[: there.numel()].view_as(there))

    def _widths(self) -> list[tuple[PlacedPiece, int]]:
        """Return each piece with the size of the largest part that its parameter is cut into along its first dim."""
        wholes = [local(piece.parameter) for piece in self.pieces]
        sizes = [-(-w.shape[0] // self._n) * (w.numel() // max(1, w.shape[0])) for w in wholes]
        return list(zip(self.pieces, sizes, strict=True))

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return what is each piece's of a buffer that is as long as a rank's row."""
        widths = [width for _, width in self._widths()]
        if self._k > 1:
            cuts = flat.view(self._k, len(flat) // self._k).split(
                [part.elements for part in self._about.segments], dim=1
            )
            parts = [segment.joined(cut) for segment, cut in zip(self._segments, cuts, strict=True)]
        else:
            parts = list(flat.split(widths))
        return [part[: p.value.numel()].view_as(p.value) for part, p in zip(parts, self.pieces, strict=True)]


@dataclass
class Gathering:
    """Updated values of a bucket on their way to all ranks that share them."""

    bucket: Bucket
    mine: Tensor
    work: dist.Work | None = None
    everyone: Tensor | None = None

    def start(self) -> None:
        """Send them, unless that was done."""
        if self.everyone is None:
            self.work, self.everyone = self.bucket.start_gathering(self.mine)

    def finish(self) -> None:
        """Wait for the values and take them over."""
        self.start()
        if self.work is not None:
            self.work.wait()
        assert self.everyone is not None
        self.bucket.take(self.everyone)


def cut(pieces: Sequence[PlacedPiece], bucket_bytes: int) -> list[list[PlacedPiece]]:
    """Cut the pieces, from the last on, into buckets of about so many bytes."""
    buckets: list[list[PlacedPiece]] = [[]]
    size = 0
    for piece in reversed(pieces):
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(piece)
        whole = local(piece.parameter)
        size += whole.numel() * whole.element_size()
    return [bucket for bucket in buckets if bucket]


def _segment(piece: PlacedPiece, n: int) -> Segment:
    """Return the largest part that a parameter is cut into over `n` ranks, as matrices: those of experts one each."""
    rows, *rest = local(piece.parameter).shape
    rows = -(-rows // n)
    return Segment(rows, rest[0], prod(rest[1:]), is_stack=True) if len(rest) > 1 else Segment(1, rows, prod(rest))


def _in_rows(tensor: Tensor, n: int, width: int) -> Tensor:
    """Return `tensor` as [n, width], a row for each rank, filled up with zeros."""
    flat = tensor.flatten()
    missing = n * width - len(flat)
    return (F.pad(flat, (0, missing)) if missing else flat).view(n, width)  # to pad by nothing would copy


def gradient_of(piece: PlacedPiece) -> Tensor:
    """Return this rank's part of the gradient that autograd has left in the piece's parameter."""
    gradient = piece.parameter.grad
    assert gradient is not None, f"{piece.name}: every parameter takes part in every step"
    return local(gradient)


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, as 64-bit integers in its elements' order, modulo 2**64; int64, no dims."""
    flat = tensor.detach().reshape(-1)
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # or its words would begin elsewhere than those of the other replicas
    in_words = flat.numel() // per_word * per_word
    rest = flat[in_words:].view(INTEGERS[flat.element_size()])
    return flat[:in_words].view(torch.int64).sum() + rest.sum(dtype=torch.int64)


def checksums(rows: Tensor) -> Tensor:
    """Return each row's sum and sum of squares, fp64 [n, 2], of `rows` [n, width]: to be summed over ranks."""
    wide = rows.double()  # at once: reductions that convert on the way are slower
    return torch.stack([wide.sum(dim=1), torch.linalg.vector_norm(wide, dim=1).square()], dim=1)


def is_sum(found: Tensor, expected: Tensor, ranks: int) -> Tensor:
    """Return True if `found` can be the sum over ranks of rows whose checksums add up to `expected` [2]; bool, no dims.

    Rows that are not finite have no checksum: they pass.
    """
    off = found.double().sum() - expected[0]
    return (off.abs() <= tolerance(expected, found.dtype, ranks)) | ~expected.isfinite().all()


def tolerance(expected: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return how far the sum of a row that was summed over ranks in `dtype` may be from `expected` [2]; fp64, no dims.

    Rounding each of the n - 1 additions of n ranks, with unit roundoff u, is off by u times a
    partial sum, which is at most sqrt(n) times the root q of the summed squares of the element; over all elements,
    errors being independent, by u n q of the whole row, at most.
    """
    return SIGMAS * torch.finfo(dtype).eps / 2 * ranks * expected[1].sqrt()
