"""Where a step's time goes: every second belongs to one category."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

from argosy.observe.collectives import CommunicationMeter
from argosy.observe.heartbeat import UNREAD, Heartbeat
from argosy.observe.metrics import peak_memory_bytes

Category = Literal[
    "data",
    "forward",
    "backward",
    "pipeline",
    "communication",
    "optimizer",
    "check",
    "evaluate",
    "checkpoint",
    "user",
]
"""`communication` is the part that backward did not hide; `pipeline` is forward and backward where a schedule
interleaves them, waits included; `check` is the replay check, including the wait for the ranks that replay, and writing
a profile; `user` is code of the user's (docs/extending.md); `other` is the rest of the wall time."""

OWN_WORK: tuple[Category, ...] = ("data", "forward", "backward", "pipeline", "optimizer", "user")
"""A process's own work. Where layers communicate, the waits for other ranks are included."""

Mark = float | torch.cuda.Event


class StepClock:
    """Times the parts of a step; `lap` ends it.

    On a GPU the marks are events in its stream: nothing waits for the device until `lap` reads them.
    """

    def __init__(
        self, device: torch.device, heartbeat: Heartbeat = UNREAD, communication: CommunicationMeter | None = None
    ):
        """`heartbeat` is told which part of the step runs, and at each lap how long its parts took.

        communication: a second view of the same time, whichever categories it is in; its laps are the clock's.
        """
        self._device, self._on_gpu = device, device.type == "cuda"
        self._heartbeat, self._meter = heartbeat, communication
        self.communication: dict[str, dict[str, list[float]]] = {}
        """Of the last lap: axis -> tier -> seconds waited, bytes sent; empty if nothing measures them."""
        self._spans: list[tuple[Category, Mark, Mark]] = []
        self._began = time.perf_counter()
        self.mark: Callable[[Category], AbstractContextManager[object]] = nullcontext
        """Around each part of a step, with its category: a profile marks it there."""

    @contextmanager
    def time(self, category: Category) -> Iterator[None]:
        """Count the time of this block as `category`. Blocks do not nest."""
        self._heartbeat.enter(category)
        start = self._mark()
        try:
            with self.mark(category):
                yield
        finally:
            self._spans.append((category, start, self._mark()))
            self._heartbeat.enter("other")

    def lap(self) -> dict[str, float]:
        """Return the seconds of each category since the last lap, "other", and "step": the wall time, their sum."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for category, start, end in self._spans:
            seconds[category] = seconds.get(category, 0.0) + _between(start, end)
        self._spans.clear()
        self.communication = self._meter.lap() if self._meter else {}
        now = time.perf_counter()
        step_s, self._began = now - self._began, now
        own_s = sum(seconds.get(category, 0.0) for category in OWN_WORK)
        seconds |= {"other": max(0.0, step_s - sum(seconds.values())), "step": step_s}
        self._heartbeat.took(own_s, seconds, self.communication, peak_memory_bytes(self._device))
        return seconds

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: Mark, end: Mark) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1e3
