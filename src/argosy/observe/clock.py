"""The time of a step, each second in one category; the peak of a device's memory; and the matmul rate that MFU is
measured against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from argosy.accelerator import Mark, kind_of, mark, peak_memory_bytes, seconds_between, seconds_of, synchronize
from argosy.matmul import dense
from argosy.observe.collectives import CommunicationMeter
from argosy.observe.counters import OWN_WORK, Category
from argosy.observe.heartbeat import UNREAD, Heartbeat

NO_WAITS = 0.0, 0


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
        self._device = device
        self._heartbeat, self._meter = heartbeat, communication
        self.communication: dict[str, dict[str, list[float]]] = {}
        """The last lap's: axis -> tier -> seconds waited, bytes sent; empty if nothing measures them."""
        self.own_s: dict[Category, float] = {}
        """Seconds of each category in the last lap, without waits for other ranks. Waits for the tokens of experts
        count as work: how many a rank gets is not its doing, and all of its group wait for the busiest."""
        self.microbatches = 1
        """Microbatches of the step at hand, for the heartbeat."""
        self._spans: list[tuple[Category, Mark, Mark]] = []
        self._waits: list[tuple[Category, tuple[float, int], tuple[float, int]]] = []
        self._began = time.perf_counter()
        self._is_timing = False
        self.mark: Callable[[Category], AbstractContextManager[object]] = nullcontext
        """Around each part of a step, with its category: a profile marks it there."""

    @contextmanager
    def time(self, category: Category) -> Iterator[None]:
        """Count the time of this block as `category`. A block within another one counts as that one's time."""
        if self._is_timing:
            yield
            return
        self._is_timing = True
        self._heartbeat.enter(category)
        start, waits = mark(self._device), self._meter.marks() if self._meter else NO_WAITS
        try:
            with self.mark(category):
                yield
        finally:
            self._is_timing = False
            self._spans.append((category, start, mark(self._device)))
            if self._meter and category in OWN_WORK:
                self._waits.append((category, waits, self._meter.marks()))
            self._heartbeat.enter("other")

    def lap(self) -> dict[str, float]:
        """Return the seconds of each category since the last lap, "other", and "step": the wall time, their sum."""
        synchronize(self._device)
        seconds: dict[str, float] = {}
        for category, start, end in self._spans:
            seconds[category] = seconds.get(category, 0.0) + seconds_between(start, end)
        self._spans.clear()
        self.own_s = self._own_s(seconds)
        self.communication = self._meter.lap() if self._meter else {}
        now = time.perf_counter()
        step_s, self._began = now - self._began, now
        seconds |= {"other": max(0.0, step_s - sum(seconds.values())), "step": step_s}
        memory_bytes = peak_memory_bytes(self._device)
        self._heartbeat.took(sum(self.own_s.values()), seconds, self.communication, memory_bytes, self.microbatches)
        return seconds

    def _own_s(self, seconds: dict[str, float]) -> dict[Category, float]:
        own_s = {category: seconds[category] for category in OWN_WORK if category in seconds}
        for category, start, end in self._waits:
            assert self._meter is not None
            own_s[category] -= self._meter.waited_s(start, end)
        self._waits.clear()
        return {category: max(0.0, took_s) for category, took_s in own_s.items()}


SIZE = {"cpu": 1024, "accelerator": 8192}
REPEATS, MOST_S = 12, 1.0
"""Matmuls that are timed; no more is begun after MOST_S, since CPUs without fp16 take seconds for each."""


def matmul_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of a large square matmul, in FLOP/s, measured here and now (mostly 0.1 to 0.3 s).

    The best of several, since a busy machine can only make one slower.
    """
    size = SIZE[kind_of(device)]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < MOST_S:
        seconds.append(seconds_of(lambda: dense(a, b), device))
    return 2.0 * size**3 / min(seconds)
