"""Drives sums over ranks: each starts when the one before has sent its last message, the same order on every rank.

On a CPU the messages of a sum are looked after whenever a gradient arrives (`poll`), so that backward never waits; on a
GPU all of a sum is put on a stream of its own at once.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.sync.compressor import Sending


class Sum:
    """One sum on its way. Its result comes from `Lane.finish`."""

    def __init__(self, sending: Sending, messages: int):
        self._sending, self._left = sending, messages
        self._work: dist.Work | None = None
        self.result: Tensor | None = None

    @property
    def has_sent_all(self) -> bool:
        """True if its last message is on its way."""
        return self._left == 0

    def go_on(self, wait: bool, to_the_end: bool) -> None:
        """Go on until a message is on its way that has not arrived; or, without `to_the_end`, that is the last.

        wait: wait for messages instead.
        """
        while self.result is None and (to_the_end or not self.has_sent_all):
            if self._work is not None:
                if not wait and not self._work.is_completed():
                    return
                self._work.wait()
            try:
                self._work = next(self._sending)
                self._left -= 1
            except StopIteration as end:
                self._work, self._left, self.result = None, 0, end.value


class Lane:
    """The order in which this rank's sums go. One lane serves all sums that share process groups."""

    def __init__(self, device: torch.device):
        self._queue: deque[Sum] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, sending: Sending, messages: int) -> Sum:
        """Start a sum, once those before it have sent their last message. All ranks submit in the same order."""
        one = Sum(sending, messages)
        if self._stream is None:
            self._queue.append(one)
            self.poll()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with self._on_stream():
                one.go_on(wait=True, to_the_end=True)  # the stream waits, not the host
        return one

    def poll(self) -> None:
        """Go on with the sums as far as is possible without waiting."""
        while self._queue:
            self._queue[0].go_on(wait=False, to_the_end=False)
            if not self._queue[0].has_sent_all:
                return
            self._queue.popleft()

    def finish(self, one: Sum) -> Tensor:
        """Wait for a sum; returns it. Later ones are started meanwhile."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        else:
            self.poll()
            while not one.has_sent_all:
                self._queue[0].go_on(wait=True, to_the_end=False)
                self.poll()
            one.go_on(wait=True, to_the_end=True)
        assert one.result is not None
        return one.result

    def clear(self) -> None:
        """Forget the sums that are on their way."""
        self._queue.clear()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
