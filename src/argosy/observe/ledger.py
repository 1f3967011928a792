"""The ledger of samples, read from a run's metrics: which were trained on, which skipped, and each of them once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Range = tuple[int, int]
"""The first sample, and the one after the last."""


@dataclass(frozen=True)
class Ledger:
    """What became of a run's samples. `data.order` numbers them 0, 1, 2, ..."""

    committed: int
    """The number of samples that updates were made from."""
    skipped: tuple[Range, ...]
    """Samples of bad steps."""
    problems: tuple[str, ...]
    """A sentence for each range that was taken twice, or left out but not listed as skipped; there should be none."""


def read_ledger(records: Iterable[dict[str, Any]]) -> Ledger:
    """Return the ledger that the lines of metrics.jsonl make up (as `Metrics.each` gives them).

    A step's line says at which sample it begins (`first_sample`), how many it has (`samples`), and which were skipped
    before or among them (`samples_skipped`).
    """
    skipped: list[Range] = []
    taken: list[Range] = []
    for record in records:
        if "first_sample" in record:
            skipped += [(first, stop) for first, stop in record.get("samples_skipped", [])]
            taken += _taken(record)
    problems = []
    for (_, end), (start, stop) in pairwise(sorted([(0, 0), *skipped, *taken])):
        if start > end:
            problems.append(f"samples {end} to {start - 1} are missing")
        elif start < end:
            problems.append(f"samples {start} to {min(end, stop) - 1} are there twice")
    return Ledger(sum(stop - first for first, stop in taken), tuple(skipped), tuple(problems))


def _taken(record: dict[str, Any]) -> Iterator[Range]:
    """Yield the ranges that a step's samples are in."""
    start, left = record["first_sample"], record["samples"]
    for first, stop in sorted(record.get("samples_skipped", [])):
        if first < start:
            continue
        end = min(first, start + left)
        if end > start:
            yield start, end
        start, left = stop, left - max(0, end - start)
    if left:
        yield start, start + left
