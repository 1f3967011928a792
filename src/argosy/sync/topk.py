"""Sums of the largest numbers of each parameter (top-k).

What is not sent stays in the residual (Stich et al. 2018, "Sparsified SGD with Memory"). Each rank sends places and
values of the largest of each of its parameters, and all add up all (all-gather); the largest of a bucket would be those
of the few parameters with large gradients.

Early in training, gradients change fast and what waits in a residual is soon out of date, so the density may begin high
and fall (`sync.density_steps`; Lin et al. 2018, "Deep Gradient Compression", section 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.sync import SyncConfig
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

FIRST_DENSITY = 0.25


class TopK(WithResidual):
    """The largest magnitudes of each parameter."""

    messages = 1

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: Moment) -> Sending:
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
