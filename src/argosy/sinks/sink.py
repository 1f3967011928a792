"""The sink interface: a place that shows a run. And the numbers of a line by name, the same in all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from argosy.watch.linefile import tells_of_the_run

Record = dict[str, Any]
"""A line of one of the run's files, as it was written."""


@dataclass(frozen=True)
class About:
    """The run that a sink is made for."""

    name: str
    """The run's name."""
    folder: Path
    """The run's folder."""
    config: dict[str, Any]
    """The resolved run file."""
    plan: dict[str, Any]
    """The plan's fields; `plan_text` is the same in one line."""
    plan_text: str
    state: dict[str, Any] = field(default_factory=dict)
    """The sink's own state of the last time; empty at the first."""


class Sink:
    """Base of all sinks: what is told is dropped.

    A sink lives in a process of its own. It may raise, hang or die: then it is ended, the rest of the run goes on, and
    it is begun again later with `About.state` and the lines that it has not had. What it is told comes from the run's
    files, so that a line comes again only if the sink's process died while it was told.
    """

    can_rewind: ClassVar[bool] = True
    """False if what was told cannot be taken back. Then, in place of `rewind`, `start_over` is called, and all lines of
    the run come again."""

    must_start_over: bool = False
    """Set it in the constructor to be told everything again, as if steps had been lost."""

    def __init__(self, about: About):
        self.about = about
        self.state = about.state
        """State to keep over a restart (JSON), such as the id that a server gave the run. Saved after each call."""

    def steps(self, records: Sequence[Record]) -> None:
        """Take lines of steps, in order: "step", "loss", "seconds", ... (docs/metrics.md)."""
        self.numbers([(record, step_values(record)) for record in records])

    def evaluations(self, records: Sequence[Record]) -> None:
        """Take lines of evaluations: "step", "validation_loss", "bits_per_byte", or "validation_accuracy" of pairs."""
        self.numbers([(record, evaluation_values(record)) for record in records])

    def numbers(self, lines: Sequence[tuple[Record, dict[str, float]]]) -> None:
        """Take lines of steps, or of evaluations, each with its numbers by name: for what treats both alike."""

    def events(self, records: Sequence[Record]) -> None:
        """Take events of the run's processes: "process", "time_s", "event", ... (docs/events.md)."""

    def samples(self, records: Sequence[Record]) -> None:
        """Take texts that the model wrote: "step", "time_s", "prompt", "text"."""

    def rewind(self, step: int) -> None:
        """Forget the values of `step` and later: these steps were lost, and are run again."""

    def start_over(self) -> None:
        """Drop all that was told: everything comes again from the run's first line."""

    def tick(self) -> None:
        """Do what is due; called about once a second, after the lines that were new."""

    def close(self, report: Record | None) -> None:
        """Write the rest: the run ends here. `report`: report.json; None if the run did not write one."""


NO_NUMBERS = ("step", "time_s", "first_sample", "samples", "samples_skipped", "sample_ranges")
"""Keys of a line that say which step it is, not how it went."""
EVALUATION = {
    "validation_loss": "validation/loss",
    "bits_per_byte": "validation/bits_per_byte",
    "validation_accuracy": "validation/accuracy",
}

NOTEWORTHY = {
    "worker_died", "break", "recovered", "resume", "rewind", "bad_step", "replan", "migrated", "node_slow",
    "node_refused", "corruption", "gradient_corrupt", "save_failed", "alert", "end",
}  # fmt: skip
"""Events that a curve is read with: why it has a gap, a bend or a jump."""
OF_EACH_RANK = {"start", "resume", "end"}
"""Events that every rank writes."""


def is_noteworthy(event: Record) -> bool:
    """Return True for an event that belongs beside the curves."""
    return event.get("event") in NOTEWORTHY and not is_repeated(event)


def is_repeated(event: Record) -> bool:
    """Return True for an event that every rank writes, of a rank that is not the first."""
    return event.get("event") in OF_EACH_RANK and not tells_of_the_run(event.get("process", ""))


def step_values(record: Record) -> dict[str, float]:
    """Return name -> number of a step's line: "train/loss", "seconds/forward", "experts/0/...", "user/NAME"."""
    values: dict[str, float] = {}
    for key, value in record.items():
        if key not in NO_NUMBERS:
            values |= dict(_flat(key if isinstance(value, dict) else f"train/{key}", value))
    return values


def evaluation_values(record: Record) -> dict[str, float]:
    """Return name -> number of an evaluation's line; of tasks "tasks/TASK/METRIC"."""
    found = {name: float(record[key]) for key, name in EVALUATION.items() if _is_number(record.get(key))}
    return found | dict(_flat("tasks", record.get("tasks", {})))


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
