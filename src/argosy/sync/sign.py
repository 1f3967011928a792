"""Sums of which one bit of each number travels: its sign, with the mean magnitude of its block.

Signs with error feedback (EF-signSGD: Karimireddy et al. 2019), compressed on the way there and on the way back as in
1-bit Adam's all-reduce (Tang et al. 2021): see `quantised`. What is sent is not the gradient but a momentum of it that
each replica keeps (`sync.momentum`; the momentum correction of Lin et al. 2018, "Deep Gradient Compression"), which is
steadier, so that its signs say more. A block with a number that is not finite has no finite mean: all ranks get that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.sync import SyncConfig
from argosy.sync.compressor import BucketFacts, Memory, Moment, Segment, Sending
from argosy.sync.quantised import Quantised

BITS = (1, 2, 4, 8, 16, 32, 64, 128)


class Sign(Quantised):
    """1-bit sign with momentum correction."""

    def __init__(self, settings: SyncConfig):
        super().__init__(settings, bits=1)

    def memory(self, segments: Sequence[Segment], device: torch.device) -> Memory:
        """See `Compressor`: a residual and a momentum."""
        memory = super().memory(segments, device)
        if self._settings.momentum:
            memory.kept["momentum"] = torch.zeros(sum(segment.elements for segment in segments), device=device)
        return memory

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: Moment) -> Sending:
        """See `Compressor`."""
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
        weights = torch.tensor(BITS, dtype=torch.uint8, device=x.device)
        bits = (x_nC.view(len(x_nC), -1, 8) >= 0).to(torch.uint8)
        packed = (bits * weights).sum(dim=2, dtype=torch.uint8)
        return torch.cat([packed, scale_nK.view(torch.uint8)], dim=1)

    def decode(self, bytes_nW: Tensor) -> Tensor:
        """Return the numbers, fp32 [n, C]."""
        n, width = bytes_nW.shape
        blocks = width // (self._block // 8 + 4)
        packed, scales = bytes_nW.split([width - 4 * blocks, 4 * blocks], dim=1)
        weights = torch.tensor(BITS, dtype=torch.uint8, device=packed.device)
        signs = ((packed.unsqueeze(2) & weights) != 0).float().mul_(2).sub_(1)
        scale_nK1 = scales.contiguous().view(torch.float32).unsqueeze(2)
        return (signs.view(n, blocks, self._block) * scale_nK1).flatten(1)
