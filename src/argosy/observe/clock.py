"""The time of a step, each second in one category; the peak of a device's memory; and the matmul rate that MFU is
measured against.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal

import torch

from argosy.observe.collectives import CommunicationMeter
from argosy.observe.heartbeat import UNREAD, Heartbeat

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
"""A process's own work, apart from what it waits for other ranks meanwhile."""

Mark = float | torch.cuda.Event
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
        self._device, self._on_gpu = device, device.type == "cuda"
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
        self.mark: Callable[[Category], AbstractContextManager[object]] = nullcontext
        """Around each part of a step, with its category: a profile marks it there."""

    @contextmanager
    def time(self, category: Category) -> Iterator[None]:
        """Count the time of this block as `category`. Blocks do not nest."""
        self._heartbeat.enter(category)
        start, waits = self._mark(), self._meter.marks() if self._meter else NO_WAITS
        try:
            with self.mark(category):
                yield
        finally:
            self._spans.append((category, start, self._mark()))
            if self._meter and category in OWN_WORK:
                self._waits.append((category, waits, self._meter.marks()))
            self._heartbeat.enter("other")

    def lap(self) -> dict[str, float]:
        """Return the seconds of each category since the last lap, "other", and "step": the wall time, their sum."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for category, start, end in self._spans:
            seconds[category] = seconds.get(category, 0.0) + _between(start, end)
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


CLEAR_REFS = Path("/proc/self/clear_refs")
SIZE = {"cpu": 1024, "cuda": 8192}
REPEATS, MOST_S = 12, 1.0
"""Matmuls that are timed; no more is begun after MOST_S, since CPUs without fp16 take seconds for each."""


def matmul_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best rate of a large square matmul, in FLOP/s, measured here and now (mostly 0.1 to 0.3 s).

    The best of several, since a busy machine can only make one slower.
    """
    size = SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < MOST_S:
        seconds.append(_seconds(a, b))
    return 2.0 * size**3 / min(seconds)


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    a @ b
    return time.perf_counter() - began


def device_name(device: torch.device) -> str:
    """Return "cpu", or the driver's name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def software(device: torch.device) -> str:
    """Return the versions that speed depends on, e.g. "torch 2.13.0, CUDA 13.0, NCCL 2.28.9"."""
    parts = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        parts += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return ", ".join(parts)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process since `forget_peak_memory`, or ever: on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak_memory(device: torch.device) -> None:
    """Restart `peak_memory_bytes` from what is held now, where the system can do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # not every kernel has it
            CLEAR_REFS.write_text("5")  # proc(5): "reset the peak resident set size"
