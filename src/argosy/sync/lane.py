"""Drives sums over ranks: each follows the one before, phase by phase, in the same order on every rank.

On a CPU the messages of a sum are looked after whenever a gradient arrives (`poll`), so that backward never waits; on a
GPU all of a sum is put on a stream of its own at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.accelerator import current_stream, is_accelerator, new_stream, on_stream
from argosy.sync.compressor import Sending

EVERY_PHASE = 2**62
"""More phases than any sum has."""


class Sum:
    """One sum on its way. Its result comes from `Lane.finish`."""

    def __init__(self, sending: Sending, phases: Sequence[int]):
        """`phases`: how many messages it sends in each of the phases that all sums of its lane go through."""
        self._sending, self._left = sending, list(phases)
        self._work: dist.Work | None = None
        self.result: Tensor | None = None

    @property
    def phase(self) -> int:
        """The phases of which it has sent all messages."""
        return next((number for number, left in enumerate(self._left) if left), len(self._left))

    @property
    def has_sent_all(self) -> bool:
        """True if its last message is on its way."""
        return not any(self._left)

    def go_on(self, before: int) -> None:
        """Go on, without waiting, as far as the last message of the phases before `before`."""
        while self.result is None and not self.has_sent_all and self.phase < before:
            if self._work is not None and not self._work.is_completed():
                return
            self.take_a_step()

    def take_a_step(self) -> None:
        """Wait for the message that is on its way, and send the next, or come to the result."""
        if self._work is not None:
            self._work.wait()
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
        while self._queue and self._queue[0].has_sent_all:
            self._queue.popleft()

    def finish(self, one: Sum) -> Tensor:
        """Wait for a sum; returns it. Later ones go on meanwhile."""
        if self._stream is not None:
            current_stream(self._stream.device).wait_stream(self._stream)
        else:
            self.poll()
            while not one.has_sent_all:
                self._queue[0].take_a_step()
                self.poll()
            while one.result is None:
                one.take_a_step()
        assert one.result is not None
        return one.result

    def clear(self) -> None:
        """Forget the sums that are on their way."""
        self._queue.clear()
