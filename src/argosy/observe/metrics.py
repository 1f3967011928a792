"""metrics.jsonl: one line for each step, and one for each evaluation."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from argosy.observe.events import JsonLines, read_lines

CHUNK_BYTES = 2**16
"""Bytes that are read at once, from the end of a file backwards."""
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

    def forget_from(self, step: int) -> None:
        """Drop the records of `step` and later: those steps were lost and are about to be run again."""
        if not self.path.exists():
            return
        with self.path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            for start, record in _backwards(file):
                if record is not None and record["step"] < step:
                    break
                end = start
            file.truncate(end)

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the records of the last `count` steps (fewer if there are no more), in order."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            steps = (record for _, record in _backwards(file) if record is not None and "loss" in record)
            return list(islice(steps, count))[::-1]

    def has(self, step: int, key: str) -> bool:
        """Return True if any record of `step`, which is among the last ones, has `key`."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            records = (record for _, record in _backwards(file) if record is not None)
            last = takewhile(lambda record: record["step"] >= step, records)
            return any(record["step"] == step and key in record for record in last)

    def read(self) -> list[dict[str, Any]]:
        """Return all records so far."""
        return read_lines(self.path)


def _backwards(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield where each line begins, and its record, from the last one on; None for a line that was cut off.

    Reading backwards spares a long run from reading its whole file only to continue at the end.
    """
    position, rest = file.seek(0, os.SEEK_END), b""
    while position:
        size = min(CHUNK_BYTES, position)
        position = file.seek(position - size)
        first, *lines = (file.read(size) + rest).split(b"\n")
        begin = position + len(first) + 1 + sum(len(line) + 1 for line in lines)
        for line in reversed(lines):
            begin -= len(line) + 1
            if line:
                yield begin, _parsed(line)
        rest = first
    if rest:
        yield 0, _parsed(rest)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


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
