"""Sums of which numbers travel as small integers, a scale for each block: int8, int4, and one bit, the sign.

Two passes, as in an all-reduce of 1-bit Adam (Tang et al. 2021, figure 3). Each rank cuts its numbers into a piece for
each rank, quantises them, and sends each rank its pieces (all-to-all); that rank sums them in fp32, quantises the sum,
and sends it to all (all-gather). Both errors are kept: what a rank lost of its numbers, and what the owner of a piece
lost of the sum, so that sums and residuals together lose nothing.

A block's largest magnitude is the largest level (127, or 7), and its scale is fp32. A block with a number that is not
finite has no finite scale, so that all ranks get numbers that are not finite.

Of a sign the scale is the mean magnitude of its block (EF-signSGD: Karimireddy et al. 2019). What is sent then is not
the gradient but a momentum of it that each replica keeps (`sync.momentum`; the momentum correction of Lin et al. 2018,
"Deep Gradient Compression"), which is steadier, so that its signs say more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.sync import SyncConfig
from argosy.sync.compressor import (
    BucketFacts,
    BucketMemory,
    Moment,
    Segment,
    Sending,
    WithResidual,
    all_gather_single,
    keep_residual,
    started,
    with_residual,
)

# n ranks, C numbers of a piece (a multiple of the block), K blocks of a piece, W bytes of a piece as it travels


class Quantised(WithResidual):
    """int8, int4."""

    messages = 2

    def __init__(self, settings: SyncConfig, bits: int):
        super().__init__(settings)
        self._bits, self._block = bits, settings.block

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: Moment) -> Sending:
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

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: Moment) -> Sending:
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
        scale_nK1 = scales.contiguous().view(torch.float32).unsqueeze(2)
        return (signs.view(n, blocks, self._block) * scale_nK1).flatten(1)
