"""Sums that lose nothing but the rounding of one dtype: exact, and bf16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.sync.compressor import BucketFacts, BucketMemory, Moment, Segment, Sending, started


class Exact:
    """An all-reduce in the dtype of the gradients."""

    messages = 1

    def __init__(self, dtype: torch.dtype | None = None):
        """`dtype`: that in which the sum is taken; None: that of the bucket."""
        self._dtype = dtype

    def memory(self, segments: Sequence[Segment], device: torch.device) -> BucketMemory:
        """See `Compressor`: nothing is kept."""
        return BucketMemory()

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: Moment) -> Sending:
        """See `Compressor`."""
        flat = flat if self._dtype is None else flat.to(self._dtype)
        yield started(dist.all_reduce(flat, group=groups[0], async_op=True))
        return flat
