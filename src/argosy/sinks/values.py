"""The numbers of a line under one name each, the same in all sinks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from argosy.sinks.sink import Record

NO_NUMBERS = ("step", "time_s", "first_sample", "samples", "samples_skipped")
"""Keys of a line that say which step it is, not how it went."""
EVALUATION = {"validation_loss": "validation/loss", "bits_per_byte": "validation/bits_per_byte"}

NOTEWORTHY = {
    "worker_died", "break", "recovered", "resume", "rewind", "bad_step", "replan", "migrated", "node_slow",
    "node_refused", "corruption", "gradient_corrupt", "save_failed", "alert", "end",
}  # fmt: skip
"""Events that a curve is read with: why it has a gap, a bend or a jump."""
OF_EACH_RANK = {"start", "resume", "end"}
"""Events that every rank writes."""


def is_noteworthy(event: Record) -> bool:
    """Return True for an event that belongs beside the curves; of what every rank says, that of the first alone."""
    return event.get("event") in NOTEWORTHY and not (event.get("event") in OF_EACH_RANK and is_of_another_rank(event))


def is_of_another_rank(event: Record) -> bool:
    """Return True for an event of a rank that is not the first."""
    process = event.get("process", "")
    return process.startswith("rank-") and process != "rank-0"


def step_values(record: Record) -> dict[str, float]:
    """Return name -> number of a step's line: "train/loss", "seconds/forward", "experts/0/...", "user/NAME"."""
    values: dict[str, float] = {}
    for key, value in record.items():
        if key not in NO_NUMBERS:
            values |= dict(_flat(key if isinstance(value, dict) else f"train/{key}", value))
    return values


def evaluation_values(record: Record) -> dict[str, float]:
    """Return name -> number of an evaluation's line."""
    return {name: float(record[key]) for key, name in EVALUATION.items() if _is_number(record.get(key))}


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}/{index}", inner)
    elif _is_number(value):
        yield name, float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def flat_config(table: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return dotted key -> value of a run file, as services of experiments show it."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value and key != "sources":
            flat |= flat_config(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat
