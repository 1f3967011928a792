"""Data parallelism by replication: gradients are summed over replicas while backward still runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 4 * 2**20
"""Gradients sent at once: large enough to hide a link's latency, small enough to start early."""


class _Bucket:
    """Gradients that travel together, in one flat buffer that they become views of."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.missing = len(parameters)
        self.work: dist.Work | None = None
        self.flat: Tensor | None = None

    def send(self, group: dist.ProcessGroup) -> None:
        self.flat = torch.cat([_gradient(p).flatten() for p in self.parameters])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def receive(self) -> None:
        assert self.flat is not None and self.work is not None
        self.work.wait()
        pieces = self.flat.split([p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        self.work, self.flat, self.missing = None, None, len(self.parameters)


class GradientReducer:
    """Sums gradients over `group`, once per step, overlapped with the backward of the last microbatch.

    The buckets follow the order in which backward reaches parameters (last layer first) and are sent in that
    order on every rank, so that the collectives match (Li et al. 2020, "PyTorch Distributed", section 3.2).
    With no group (one replica) it does nothing.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None):
        self._group = group if group is not None and group.size() > 1 else None
        self._armed = False
        self._next = 0
        self._buckets = [] if self._group is None else _buckets(reversed(list(parameters)))
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))

    @property
    def bytes_per_step(self) -> int:
        """Bytes of gradients that each rank contributes to the all-reduce of one step."""
        return sum(p.numel() * p.element_size() for b in self._buckets for p in b.parameters)

    def arm(self) -> None:
        """Say that the next backward is the step's last: gradients leave as soon as they are whole."""
        self._armed = True
        self._next = 0

    def finish(self) -> None:
        """Wait until every parameter's `grad` holds the sum over the replicas."""
        for bucket in self._buckets:
            bucket.receive()
        self._armed = False

    def _arrived(self, bucket: _Bucket) -> None:
        if not self._armed or self._group is None:
            return
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._buckets[self._next].send(self._group)
            self._next += 1


def _buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """Cut the parameters, in this order, into buckets of about BUCKET_BYTES."""
    buckets: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return [_Bucket(parameters) for parameters in buckets]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every step"
    return parameter.grad
