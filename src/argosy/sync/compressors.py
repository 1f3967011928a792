"""The compressors of gradient sums, and `COMPRESSOR_OF`: which is meant by the plan's word `sync`.

Top-k sums the largest numbers of each parameter. What is not sent stays in the residual (Stich et al. 2018, "Sparsified
SGD with Memory"). Each rank sends places and values of the largest of each of its parameters, and all add up all
(all-gather); the largest of a bucket would be those of the few parameters with large gradients.

Early in training, gradients change fast and what waits in a residual is soon out of date, so the density may begin high
and fall (`sync.density_steps`; Lin et al. 2018, "Deep Gradient Compression", section 3.4).

PowerSGD (Vogels et al. 2019) sums each matrix of a bucket as the product of two thin ones. With M the sum over replicas
of a matrix [rows, cols] and Q [cols, rank], one step of a power iteration: P = M Q, summed over replicas and made
orthonormal; Q = M' P, summed. The sum is P Q', and what a replica's matrix had beyond its share of that is its
residual. With warm start Q is the next step's. This is the arithmetic of
`torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`, for sums in place of means.

A matrix for which that would send more than half of what it has is summed whole, in the message of P.

In int8, int4, and one bit, the sign, numbers travel as small integers, with a scale for each block. Two passes, as in
an all-reduce of 1-bit Adam (Tang et al. 2021, figure 3). Each rank cuts its numbers into a piece for each rank,
quantises them, and sends each rank its pieces (all-to-all); that rank sums them in fp32, quantises the sum, and sends
it to all (all-gather). Both errors are kept: what a rank lost of its numbers, and what the owner of a piece lost of the
sum, so that sums and residuals together lose nothing.

A block's largest magnitude is the largest level (127, or 7), and its scale is fp32. A block with a number that is not
finite has no finite scale, so that all ranks get numbers that are not finite.

Of a sign the scale is the mean magnitude of its block (EF-signSGD: Karimireddy et al. 2019). What is sent then is not
the gradient but a momentum of it that each replica keeps (`sync.momentum`; the momentum correction of Lin et al. 2018,
"Deep Gradient Compression"), which is steadier, so that its signs say more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.sync import SyncConfig
from argosy.plan.sync import thin_rank
from argosy.sync.compressor import (
    BucketFacts,
    BucketMemory,
    Compressor,
    Exact,
    Segment,
    Sending,
    SumTime,
    all_gather_single,
    started,
)

# n ranks, C numbers of a piece (a multiple of the block), K blocks of a piece, W bytes of a piece as it travels


def with_residual(flat: Tensor, bucket: BucketFacts, moment: SumTime) -> Tensor:
    """Return in fp32 what is to be sent: the gradients and what earlier steps left out."""
    whole = flat.float()
    residual = bucket.memory.kept.get("residual")
    return whole if residual is None else whole.add(residual, alpha=moment.scale)


def keep_residual(left: Tensor, bucket: BucketFacts, moment: SumTime) -> None:
    """Stage what was not sent, if the bucket has a residual."""
    if "residual" in bucket.memory.kept:
        bucket.memory.staged["residual"] = left.div_(moment.scale) if moment.scale != 1.0 else left


class WithResidual:
    """Base of compressors that keep what they did not send: their settings, and a residual."""

    def __init__(self, settings: SyncConfig):
        self._settings = settings

    def memory(self, segments: Sequence[Segment], device: torch.device) -> BucketMemory:
        """See `Compressor`: a residual of zeros, or nothing without error feedback."""
        if not self._settings.error_feedback:
            return BucketMemory()
        return BucketMemory({"residual": torch.zeros(sum(segment.elements for segment in segments), device=device)})


class Quantised(WithResidual):
    """int8, int4."""

    messages = 2

    def __init__(self, settings: SyncConfig, bits: int):
        super().__init__(settings)
        self._bits, self._block = bits, settings.block

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: SumTime) -> Sending:
        n, mine = groups[0].size(), groups[0].rank()
        whole = with_residual(flat, bucket, moment)
        random = bucket.generator(moment, flat.device, mine) if self._settings.rounding == "stochastic" else None
        piece = -(-len(whole) // (n * self._block)) * self._block
        padded = whole.new_zeros(n, piece)
        padded.view(-1)[: len(whole)] = whole
        sent_nW = self.encode(padded, random)
        left = padded - self.decode(sent_nW)
        received_nW = torch.empty_like(sent_nW)
        yield started(dist.all_to_all_single(received_nW, sent_nW, group=groups[0], async_op=True))

        sum_1C = self.decode(received_nW).sum(dim=0, keepdim=True)
        sum_1W = self.encode(sum_1C, random)
        left[mine] += (sum_1C - self.decode(sum_1W))[0]
        all_W = sum_1W.new_empty(n * sum_1W.numel())
        yield started(all_gather_single(all_W, sum_1W.flatten(), group=groups[1], async_op=True))

        keep_residual(left.view(-1)[: len(whole)].clone(), bucket, moment)
        sums = self.decode(all_W.view(n, -1)).flatten()
        return sums if len(sums) == len(whole) else sums[: len(whole)].clone()  # or the padding stays in memory

    def encode(self, x_nC: Tensor, random: torch.Generator | None) -> Tensor:
        """Return uint8 [n, W]: the numbers, a byte or half a byte each, then the fp32 scales of their blocks."""
        most = 2 ** (self._bits - 1) - 1
        x = x_nC.view(len(x_nC), -1, self._block)
        scale_nK1 = x.abs().amax(dim=2, keepdim=True) / most
        levels = x / scale_nK1.where(scale_nK1 != 0, 1.0)
        if random is None:
            levels = levels.round_()
        else:
            levels = levels.add_(torch.rand(levels.shape, generator=random, device=levels.device)).floor_()
        levels = levels.nan_to_num_(0.0).clamp_(-most, most).to(torch.int8).flatten(1)
        if self._bits == 4:
            low, high = (levels + 8).view(torch.uint8).view(len(x_nC), -1, 2).unbind(dim=2)
            packed = low | high << 4
        else:
            packed = levels.view(torch.uint8)
        return torch.cat([packed, scale_nK1.flatten(1).view(torch.uint8)], dim=1)

    def decode(self, bytes_nW: Tensor) -> Tensor:
        """Return the numbers, fp32 [n, C]."""
        n, width = bytes_nW.shape
        blocks = width // (self._block * self._bits // 8 + 4)
        packed, scales = bytes_nW.split([width - 4 * blocks, 4 * blocks], dim=1)
        if self._bits == 4:
            levels = torch.stack([packed & 15, packed >> 4], dim=2).view(torch.int8) - 8
        else:
            levels = packed.contiguous().view(torch.int8)
        scale_nK1 = scales.contiguous().view(torch.float32).unsqueeze(2)
        return (levels.reshape(n, blocks, self._block) * scale_nK1).flatten(1)


def _bits(device: torch.device) -> Tensor:
    """Return 1, 2, 4, ..., 128: made on the device, as a list of numbers would be waited for."""
    return 1 << torch.arange(8, dtype=torch.uint8, device=device)


class Sign(Quantised):
    """1-bit sign with momentum correction."""

    def __init__(self, settings: SyncConfig):
        super().__init__(settings, bits=1)

    def memory(self, segments: Sequence[Segment], device: torch.device) -> BucketMemory:
        """See `Compressor`: a residual and a momentum."""
        memory = super().memory(segments, device)
        if self._settings.momentum:
            memory.kept["momentum"] = torch.zeros(sum(segment.elements for segment in segments), device=device)
        return memory

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: SumTime) -> Sending:
        before = bucket.memory.kept.get("momentum")
        if before is not None:
            now = (flat.float() / moment.scale).lerp_(before, self._settings.momentum)
            bucket.memory.staged["momentum"] = now
            flat = now * moment.scale
        return (yield from super().sum(flat, groups, bucket, moment))

    def encode(self, x_nC: Tensor, random: torch.Generator | None) -> Tensor:
        """Return uint8 [n, W]: a bit for each number, then the fp32 scales of their blocks."""
        x = x_nC.view(len(x_nC), -1, self._block)
        scale_nK = x.abs().mean(dim=2)
        weights = _bits(x.device)
        bits = (x_nC.view(len(x_nC), -1, 8) >= 0).to(torch.uint8)
        packed = (bits * weights).sum(dim=2, dtype=torch.uint8)
        return torch.cat([packed, scale_nK.view(torch.uint8)], dim=1)

    def decode(self, bytes_nW: Tensor) -> Tensor:
        """Return the numbers, fp32 [n, C]."""
        n, width = bytes_nW.shape
        blocks = width // (self._block // 8 + 4)
        packed, scales = bytes_nW.split([width - 4 * blocks, 4 * blocks], dim=1)
        weights = _bits(packed.device)
        signs = ((packed.unsqueeze(2) & weights) != 0).float().mul_(2).sub_(1)
        # Not `contiguous`: it leaves a single row where it is, maybe between two fp32 numbers.
        scale_nK1 = scales.clone(memory_format=torch.contiguous_format).view(torch.float32).unsqueeze(2)
        return (signs.view(n, blocks, self._block) * scale_nK1).flatten(1)


FIRST_DENSITY = 0.25


class TopK(WithResidual):
    """The largest magnitudes of each parameter."""

    messages = 1

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: SumTime) -> Sending:
        """See `Compressor`. A number that is not finite is among the largest: all ranks get it."""
        whole = with_residual(flat, bucket, moment)
        density = density_at(moment.step, self._settings)
        places = largest(whole, [segment.elements for segment in bucket.segments], density)
        message = torch.cat([places.int(), whole[places].view(torch.int32)])
        everyone = message.new_empty(groups[0].size() * len(message))
        yield started(all_gather_single(everyone, message, group=groups[0], async_op=True))
        sums = torch.zeros_like(whole)
        for one in everyone.view(groups[0].size(), 2, -1):  # in the order of the ranks: the same bits everywhere
            sums[one[0].long()] += one[1].view(torch.float32)
        whole[places] = 0.0
        keep_residual(whole, bucket, moment)
        return sums


def density_at(step: int, settings: SyncConfig) -> float:
    """Return the share of numbers that is sent in a step."""
    left = max(0.0, 1 - max(0, step - settings.exact_steps) / max(1, settings.density_steps))
    return settings.density * max(1.0, FIRST_DENSITY / settings.density) ** (left if settings.density_steps else 0.0)


def largest(numbers: Tensor, sizes: Sequence[int], density: float) -> Tensor:
    """Return the places of the largest magnitudes of each stretch of such a size."""
    found, start = [], 0
    for magnitudes in numbers.abs().split(list(sizes)):
        found.append(start + torch.topk(magnitudes, math.ceil(len(magnitudes) * density), sorted=False).indices)
        start += len(magnitudes)
    return torch.cat(found)


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

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: SumTime) -> Sending:
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

    def _first_q(self, parts: list[_Part], bucket: BucketFacts, moment: SumTime, device: torch.device) -> list[Tensor]:
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


COMPRESSOR_OF: Mapping[str, Callable[[SyncConfig], Compressor]] = {
    "exact": lambda settings: Exact(),
    "bf16": lambda settings: Exact(torch.bfloat16),
    "int8": lambda settings: Quantised(settings, bits=8),
    "int4": lambda settings: Quantised(settings, bits=4),
    "powersgd": PowerSGD,
    "topk": TopK,
    "sign": Sign,
}
