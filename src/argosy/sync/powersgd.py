"""PowerSGD (Vogels et al. 2019): each matrix of a bucket is summed as the product of two thin ones.

With M the sum over replicas of a matrix [rows, cols] and Q [cols, rank], one step of a power iteration: P = M Q, summed
over replicas and made orthonormal; Q = M' P, summed. The sum is P Q', and what a replica's matrix had beyond its share
of that is its residual. With warm start Q is the next step's. This is the arithmetic of
`torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`, for sums in place of means.

A matrix for which that would send more than half of what it has is summed whole, in the message of P.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.plan.sync import thin_rank
from argosy.sync.compressor import (
    BucketFacts,
    BucketMemory,
    Moment,
    Segment,
    Sending,
    WithResidual,
    keep_residual,
    started,
    with_residual,
)


@dataclass(frozen=True)
class _Part:
    """A segment, where it begins in the bucket and in the message of P, and its rank; 0: summed whole."""

    segment: Segment
    start: int
    rank: int

    def of(self, flat: Tensor) -> Tensor:
        one = self.segment
        return flat[self.start : self.start + one.elements].view(one.batch, one.rows, one.cols)


class PowerSGD(WithResidual):
    """Rank `sync.rank`."""

    messages = 2

    def memory(self, segments: Sequence[Segment], device: torch.device) -> BucketMemory:
        """See `Compressor`: a residual; q, the Q of all matrices, flat, once there was a step."""
        memory = super().memory(segments, device)
        if self._settings.warm_start:
            memory.kept["q"] = torch.zeros(sum(_q_elements(part) for part in self._parts(segments)), device=device)
        return memory

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: Moment) -> Sending:
        whole = with_residual(flat, bucket, moment)
        parts = list(self._parts(bucket.segments))
        thin = [part for part in parts if part.rank]
        qs = self._first_q(thin, bucket, moment, whole.device)
        ps = [part.of(whole) @ q for part, q in zip(thin, qs, strict=True)]
        plain = [part.of(whole) for part in parts if not part.rank]
        first = torch.cat([p.flatten() for p in [*ps, *plain]])
        yield started(dist.all_reduce(first, group=groups[0], async_op=True))

        pieces = first.split([p.numel() for p in [*ps, *plain]])
        ps = [orthonormal(flat_p.view_as(p)) for flat_p, p in zip(pieces, ps, strict=False)]
        qs = [part.of(whole).mT @ p for part, p in zip(thin, ps, strict=True)]
        second = torch.cat([q.flatten() for q in qs]) if qs else first.new_zeros(1)
        yield started(dist.all_reduce(second, group=groups[1], async_op=True))

        sums = torch.empty_like(whole)
        for part, p, flat_q in zip(thin, ps, second.split([q.numel() for q in qs]), strict=True):
            part.of(sums).copy_(p @ flat_q.view(part.segment.batch, part.segment.cols, part.rank).mT)
        left = whole.sub_(sums, alpha=1 / groups[0].size())
        for part, summed in zip((part for part in parts if not part.rank), pieces[len(ps) :], strict=True):
            part.of(sums).copy_(summed.view_as(part.of(sums)))
            part.of(left).zero_()
        if "q" in bucket.memory.kept and qs:
            bucket.memory.staged["q"] = second / moment.scale
        keep_residual(left, bucket, moment)
        return sums

    def _parts(self, segments: Sequence[Segment]) -> Iterator[_Part]:
        start = 0
        for one in segments:
            yield _Part(one, start, thin_rank(one.rows, one.cols, self._settings.rank))
            start += one.elements

    def _first_q(self, parts: list[_Part], bucket: BucketFacts, moment: Moment, device: torch.device) -> list[Tensor]:
        """Return the matrices to begin with: the last step's, or random ones, the same on all replicas."""
        kept = bucket.memory.kept.get("q")
        shape = sum(_q_elements(part) for part in parts)
        q = torch.randn(shape, generator=bucket.generator(moment, device), device=device)
        if kept is not None:  # what a gradient of zeros has left is no beginning; the host does not ask if it is that
            q = torch.where(kept.any(), kept, q)
        flats = q.split([_q_elements(part) for part in parts])
        return [
            orthonormal(flat.view(part.segment.batch, part.segment.cols, part.rank))
            for flat, part in zip(flats, parts, strict=True)
        ]


def orthonormal(x: Tensor) -> Tensor:
    """Return a basis of the columns of each matrix of `x` [batch, rows, rank]."""
    q: Tensor = torch.linalg.qr(x).Q
    return q


def _q_elements(part: _Part) -> int:
    return part.segment.batch * part.segment.cols * part.rank
