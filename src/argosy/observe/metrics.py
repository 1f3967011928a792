"""metrics.jsonl: one line a step, and one for each evaluation."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import torch

from argosy.files import atomic_write
from argosy.observe.events import JsonLines, read_lines


class Metrics:
    """The numbers of a run, step by step."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / "metrics.jsonl"
        self._lines = JsonLines(self.path)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it names its `step`."""
        self._lines.write(record)

    def forget_from(self, step: int) -> None:
        """Drop the records of `step` and later: those steps were lost and are about to be run again."""
        kept = [record for record in read_lines(self.path) if record["step"] < step]
        if self.path.exists():
            with atomic_write(self.path) as file:
                file.writelines(json.dumps(record).encode() + b"\n" for record in kept)

    def read(self) -> list[dict[str, Any]]:
        """All records so far."""
        return read_lines(self.path)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process held: of the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
