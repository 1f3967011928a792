"""How long it takes to compress a sum over replicas, by the plan's word `sync`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from argosy.config.sync import SyncConfig
from argosy.parallel.world import World
from argosy.plan.hardware.measurements import CompressionRate
from argosy.plan.sync import COMPRESSED
from argosy.probe.timing import mean, seconds
from argosy.sync.compressor import BucketFacts, Compressor, Moment, Segment
from argosy.sync.table import COMPRESSORS

SIDE = 1024
"""A bucket of the usual 4 MiB is one square matrix."""


def measure_compression(world: World, slice_s: float) -> list[CompressionRate]:
    """Measure each word with the usual settings, each process in a group of its own, so that nothing is sent."""
    alone, _ = dist.new_subgroups(1)
    rates = []
    for word in COMPRESSED:
        compressor = COMPRESSORS[word](SyncConfig())
        world.barrier()
        took_s = mean(world, _sum_s(compressor, alone, world.device, slice_s))
        rates.append(CompressionRate(sync=word, number_s=took_s / SIDE**2))
    return rates


def _sum_s(compressor: Compressor, group: dist.ProcessGroup, device: torch.device, slice_s: float) -> float:
    segment = Segment(1, SIDE, SIDE)
    bucket = BucketFacts(0, (segment,), compressor.memory([segment], device), seed=0)
    gradient = torch.randn(segment.elements, device=device)

    def one_sum() -> None:
        for work in compressor.sum(gradient.clone(), [group] * compressor.messages, bucket, Moment()):
            work.wait()
        bucket.memory.commit()

    return seconds(one_sum, device, slice_s)
