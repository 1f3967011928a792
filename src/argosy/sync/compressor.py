"""The compressor interface: a way to sum over replicas, its facts of a sum, its memory of earlier ones; the exact sum;
the lane in which sums go one after the other.

A compressor is given a rank's flat bucket of gradients and leaves the sum over the ranks of a group. It is a generator
that yields each message it has sent and goes on once that has arrived, so that whoever drives it (`Lane`) decides
what is done meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from argosy.accelerator import current_stream, is_accelerator, new_stream, on_stream
from argosy.data.order import SPLITMIX_STEP, mix
from argosy.plan.sync import SUMS_AHEAD

# torch 2.13 gave them these names and deprecates the old; that of an older image has only the old.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Sending = Generator[dist.Work, None, Tensor]
"""Yields each message once it is on its way; returns the sum, flat, as long as the bucket."""


@dataclass(frozen=True)
class SumTime:
    """The time of a sum, in steps."""

    step: int = 0
    """Optimizer steps done. What is random depends on it alone, so that a step that is done again gives the same."""
    scale: float = 1.0
    """The loss scale, which the gradients of the step are multiplied by."""


@dataclass(frozen=True)
class Segment:
    """One parameter's part of a bucket: `batch` matrices of `rows` x `cols`, or numbers that are no matrix."""

    batch: int
    rows: int
    cols: int
    is_stack: bool = False
    """The parameter is a stack of matrices, one for each expert."""

    @property
    def elements(self) -> int:
        return self.batch * self.rows * self.cols

    @property
    def row_dim(self) -> int:
        """The dim of the parameter that counts rows: experts are stacked along the first."""
        return 1 if self.is_stack else 0

    def part(self, k: int) -> Segment:
        """Return the largest of `k` parts of it: some rows of each matrix."""
        return replace(self, rows=-(-self.rows // k))

    def cut(self, rows_nW: Tensor, k: int) -> Tensor:
        """Return rows of as many numbers as it has, [n, W], as [n, k, w]: its `k` parts, filled up with zeros."""
        part = self.part(k)
        x = rows_nW.view(len(rows_nW), self.batch, self.rows, self.cols)
        x = F.pad(x, (0, 0, 0, k * part.rows - self.rows)) if k * part.rows > self.rows else x
        return x.unflatten(2, (k, part.rows)).transpose(1, 2).flatten(2)

    def joined(self, parts_kw: Tensor) -> Tensor:
        """Return the numbers of its parts, [W], without the zeros."""
        part = self.part(len(parts_kw))
        x = parts_kw.view(len(parts_kw), self.batch, part.rows, self.cols).transpose(0, 1).flatten(1, 2)
        is_filled_up = x.shape[1] > self.rows
        return (x[:, : self.rows].clone() if is_filled_up else x).flatten()  # or the zeros stay in memory


@dataclass
class BucketMemory:
    """A rank's memory of one bucket from step to step.

    A step is all or nothing: what a sum leaves is staged, and counts once the step is applied (`commit`).
    """

    kept: dict[str, Tensor] = field(default_factory=dict)
    """`residual` (and `momentum`): fp32, as long as the bucket, without the loss scale. Others: as the compressor has
    them, the same on all replicas."""
    staged: dict[str, Tensor] = field(default_factory=dict)

    def commit(self) -> None:
        """Make what the last sum left count."""
        self.kept |= self.staged
        self.staged = {}

    def drop(self) -> None:
        """Forget what the last sum left: its step is not applied."""
        self.staged = {}


@dataclass(frozen=True)
class BucketFacts:
    """Facts of a bucket that a compressor sums."""

    number: int
    """Place among the model's buckets, the same on all ranks."""
    segments: tuple[Segment, ...]
    memory: BucketMemory
    seed: int

    def generator(self, moment: SumTime, device: torch.device, rank: int = 0) -> torch.Generator:
        """Return random numbers for this bucket in this step: the same on all replicas unless they give their rank."""
        words = (self.seed, moment.step, self.number, rank)
        mixed = 0
        for word in words:  # SplitMix64 of each word in turn
            mixed = int(mix(np.array([(mixed ^ word) + SPLITMIX_STEP & 2**64 - 1], np.uint64))[0])
        return torch.Generator(device).manual_seed(mixed >> 1)


class Compressor(Protocol):
    """One way to sum a bucket over replicas."""

    messages: int
    """The number of messages that `sum` yields."""

    def memory(self, segments: Sequence[Segment], device: torch.device) -> BucketMemory:
        """Return the memory of a bucket of these parameters before the first step."""
        ...

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: SumTime) -> Sending:
        """Sum `flat` over the ranks of `groups`. `flat` is the compressor's to write to.

        groups: of the same ranks, the group of each message.
        """
        ...


def started(work: dist.Work | None) -> dist.Work:
    """Return the work of a message that was started with async_op=True, which always has one."""
    assert work is not None
    return work


class Exact:
    """An all-reduce that loses nothing but the rounding of one dtype: exact, and bf16."""

    messages = 1

    def __init__(self, dtype: torch.dtype | None = None):
        """`dtype`: that in which the sum is taken; None: that of the bucket."""
        self._dtype = dtype

    def memory(self, segments: Sequence[Segment], device: torch.device) -> BucketMemory:
        return BucketMemory()

    def sum(self, flat: Tensor, groups: Sequence[dist.ProcessGroup], bucket: BucketFacts, moment: SumTime) -> Sending:
        flat = flat if self._dtype is None else flat.to(self._dtype)
        yield started(dist.all_reduce(flat, group=groups[0], async_op=True))
        return flat


EVERY_PHASE = 2**62
"""More phases than any sum has."""


class Sum:
    """One sum on its way. Its result comes from `Lane.finish`."""

    def __init__(self, sending: Sending, phases: Sequence[int]):
        """`phases`: how many messages it sends in each of the phases that all sums of its lane go through."""
        self._sending, self._left = sending, list(phases)
        self._work: dist.Work | None = None
        self.result: Tensor | None = None
        self.inside = phases[0]
        """Messages of its first phase that it has not waited for."""

    @property
    def phase(self) -> int:
        """The phases of which it has sent all messages."""
        return next((number for number, left in enumerate(self._left) if left), len(self._left))

    @property
    def has_sent_all(self) -> bool:
        """True if its last message is on its way."""
        return not any(self._left)

    def go_on(self, before: int) -> None:
        """Go on, without waiting, as far as the last message of the phases before `before`, or to the result."""
        while self.result is None and (self.has_sent_all or self.phase < before):
            if self._work is not None and not self._work.is_completed():
                return
            self.take_a_step()

    def take_a_step(self) -> None:
        """Wait for the message that is on its way, and send the next, or come to the result."""
        if self._work is not None:
            self._work.wait()
            self.inside = max(0, self.inside - 1)
        phase = self.phase
        try:
            self._work = next(self._sending)
            self._left[phase] -= 1
        except StopIteration as end:
            self._work, self._left, self.result = None, [0] * len(self._left), end.value


class Lane:
    """The order in which this rank's sums go. One lane serves all sums that share process groups.

    In each phase they go one after the other, as all messages of a process group are of one phase. So one sum may be
    on the thin links while the next is still inside.
    """

    def __init__(self, device: torch.device):
        self._queue: deque[Sum] = deque()
        self._stream = new_stream(device) if is_accelerator(device) else None

    def submit(self, sending: Sending, phases: Sequence[int]) -> Sum:
        """Start a sum, each phase of it once those before have sent all of theirs. All ranks submit in the same order.

        phases: as of `Sum`.
        """
        one = Sum(sending, phases)
        if self._stream is None:
            self._queue.append(one)
            self.poll()
            inside = [other for other in self._queue if other.inside]
            if len(inside) > SUMS_AHEAD:  # gloo's reduce-scatters are done only when they are waited for
                inside[0].take_a_step()
                self.poll()
        else:
            self._stream.wait_stream(current_stream(self._stream.device))
            with on_stream(self._stream):
                while one.result is None:
                    one.take_a_step()  # the stream waits, not the host
        return one

    def poll(self) -> None:
        """Go on with the sums as far as is possible without waiting."""
        before = EVERY_PHASE
        for one in self._queue:
            one.go_on(before)
            before = before if one.has_sent_all else min(before, one.phase)
            if not before:
                break
        while self._queue and self._queue[0].result is not None:
            self._queue.popleft()

    def finish(self, one: Sum) -> Tensor:
        """Wait for a sum; returns it. Later ones go on meanwhile."""
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)
        else:
            self.poll()
            while not one.has_sent_all:
                next(other for other in self._queue if not other.has_sent_all).take_a_step()
                self.poll()
            while one.result is None:
                one.take_a_step()
            self.poll()  # the queue would keep its result
        assert one.result is not None
        return one.result

    def keep(self, tensor: Tensor) -> None:
        """Let the allocator not give the tensor's memory away before what now is in the lane has used it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
