"""metrics.jsonl: one line for each step, and one for each evaluation."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch

from argosy.observe.events import JsonLines, each_line, forget_from, from_the_end, read_lines

CLEAR_REFS = Path("/proc/self/clear_refs")


class Metrics:
    """The numbers of a run, step by step."""

    def __init__(self, run_dir: Path, may_write: Callable[[], bool] = lambda: True):
        """`may_write` is asked before each line: a process that the run continued without must add none."""
        self.path = run_dir / "metrics.jsonl"
        self._lines, self._may_write = JsonLines(self.path), may_write

    def write(self, record: dict[str, Any]) -> None:
        """Append one record, which names its `step`, if this process may write."""
        if self._may_write():
            self._lines.write(record)

    def write_evaluation(self, step: int, loss: float, bits_per_byte: float) -> None:
        """Append the record of an evaluation after `step`."""
        self.write({"step": step, "validation_loss": loss, "bits_per_byte": bits_per_byte})

    def forget_from(self, step: int) -> None:
        """Drop the records of `step` and later: those steps were lost and are about to be run again."""
        forget_from(self.path, step)

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the records of the last `count` steps (fewer if there are no more), in order."""
        steps = (record for record in from_the_end(self.path) if "loss" in record)
        return list(islice(steps, count))[::-1]

    def newest(self, key: str, before: int, among: int) -> dict[str, Any] | None:
        """Return the newest record with `key` of the `among` steps before `before`; None if there is none."""
        last = takewhile(lambda record: record["step"] >= before - among, from_the_end(self.path))
        return next((record for record in last if record["step"] < before and key in record), None)

    def has(self, step: int, key: str) -> bool:
        """Return True if any record of `step`, which is among the last ones, has `key`."""
        last = takewhile(lambda record: record["step"] >= step, from_the_end(self.path))
        return any(record["step"] == step and key in record for record in last)

    def each(self) -> Iterator[dict[str, Any]]:
        """Yield all records so far, one at a time: a long run has more than memory should hold."""
        return each_line(self.path)

    def read(self) -> list[dict[str, Any]]:
        """Return all records so far."""
        return read_lines(self.path)


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
