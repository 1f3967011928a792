"""Sums of a few numbers of each bucket: the largest (top-k), or a random choice that needs no telling (random-k).

What is not sent stays in the residual (Stich et al. 2018, "Sparsified SGD with Memory"). Top-k: each rank sends places
and values of the largest of each of its parameters, and all add up all (all-gather); the largest of a bucket would be
those of the few parameters with large gradients. Random-k: one number of each stretch of 1/density, at a place that all
replicas draw from the same seed, so that only values travel (all-reduce).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.sync.compressor import (
    BucketFacts,
    Moment,
    Sending,
    WithResidual,
    all_gather_single,
    keep_residual,
    started,
    with_residual,
)


class TopK(WithResidual):
    """The share `sync.density` of the largest magnitudes of each parameter (Lin et al. 2018, deep gradient compression)."""

    messages = 1

    def sum(self, flat: Tensor, group: dist.ProcessGroup, bucket: BucketFacts, moment: Moment) -> Sending:
        """See `Compressor`. A number that is not finite is among the largest: all ranks get it."""
        whole = with_residual(flat, bucket, moment)
        places = self._largest(whole, [segment.elements for segment in bucket.segments])
        message = torch.cat([places.int(), whole[places].view(torch.int32)])
        everyone = message.new_empty(group.size() * len(message))
        yield started(all_gather_single(everyone, message, group=group, async_op=True))
        sums = torch.zeros_like(whole)
        for one in everyone.view(group.size(), 2, -1):  # in the order of the ranks: the same bits everywhere
            sums[one[0].long()] += one[1].view(torch.float32)
        whole[places] = 0.0
        keep_residual(whole, bucket, moment)
        return sums

    def _largest(self, whole: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the places of the largest magnitudes of each stretch of such a size."""
        found, start = [], 0
        for magnitudes in whole.abs().split(list(sizes)):
            many = sent_of(len(magnitudes), self._settings.density)
            found.append(start + torch.topk(magnitudes, many, sorted=False).indices)
            start += len(magnitudes)
        return torch.cat(found)


class RandomK(WithResidual):
    """The share `sync.density` of a bucket, other places in each step."""

    messages = 1

    def sum(self, flat: Tensor, group: dist.ProcessGroup, bucket: BucketFacts, moment: Moment) -> Sending:
        """See `Compressor`. If a rank has a number that is not finite anywhere, all it sends is NaN."""
        whole = with_residual(flat, bucket, moment)
        many = sent_of(len(whole), self._settings.density)
        edges = torch.arange(many + 1, device=whole.device) * len(whole) // many
        draws = torch.rand(many, generator=bucket.generator(moment, whole.device), device=whole.device)
        places = (edges[:-1] + (draws * (edges[1:] - edges[:-1])).long()).minimum(edges[1:] - 1)
        values = torch.where(whole.isfinite().all(), whole[places], math.nan)
        yield started(dist.all_reduce(values, group=group, async_op=True))
        sums = torch.zeros_like(whole)
        sums[places] = values
        whole[places] = 0.0
        keep_residual(whole, bucket, moment)
        return sums


def sent_of(numbers: int, density: float) -> int:
    """Return how many of so many numbers are sent."""
    return math.ceil(numbers * density)
