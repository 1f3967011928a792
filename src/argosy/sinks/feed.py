"""What is new in a run's folder, for one sink: where it has read to is kept, so that it goes on there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from argosy.observe.line_follower import LineFollower
from argosy.sinks.sink import Record, Sink

MOST_LINES = 2000
"""Most lines of a file that are taken at once: a long run that is read from its start must not fill the memory."""
MOST_FILES = 64
"""A run with more processes than this is followed by the events of its first, its agents and its coordinator."""


class StartOver(Exception):
    """Lines were lost, and the sink cannot take back what it was told: it needs all of the run again."""


@dataclass
class NewRows:
    """What was added to a run's files."""

    rewound_to: int | None = None
    """The first step whose lines were forgotten; None if none were."""
    metrics: list[Record] = field(default_factory=list)
    """Lines of steps and of evaluations, in their order."""
    events: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    is_more: bool = False
    """There may be more at once."""

    def tell(self, sink: Sink) -> None:
        """Pass it on."""
        if self.rewound_to is not None:
            if not sink.can_rewind:
                raise StartOver
            sink.rewind(self.rewound_to)
        if self.events:
            sink.events(self.events)
        for is_step, records in groupby(self.metrics, key=is_of_step):
            (sink.steps if is_step else sink.evaluations)(list(records))
        if self.samples:
            sink.samples(self.samples)


def is_of_step(record: Record) -> bool:
    """Return True for the line of a step, False for that of an evaluation."""
    return "loss" in record


class Feed:
    """Follows metrics.jsonl, samples.jsonl and the events of a run."""

    def __init__(self, folder: Path, marks: Mapping[str, Any]):
        """`marks`: what `marks` returned before; empty: from the start."""
        self._folder, self._marks = folder, dict(marks)
        self._files: dict[str, LineFollower] = {}

    def take(self) -> NewRows:
        """Return what is new, in parts of `MOST_LINES` lines of a file."""
        news = NewRows()
        lines = self._lines("metrics.jsonl")
        records = lines.take(MOST_LINES)
        if lines.was_cut:
            news.rewound_to = 0 if lines.kept is None else int(lines.kept["step"]) + 1
        news.metrics = records
        news.samples = self._lines("samples.jsonl").take(MOST_LINES)
        for name in self._event_files():
            process = Path(name).stem
            news.events += [{"process": process, **event} for event in self._lines(name).take(MOST_LINES)]
        news.events.sort(key=lambda record: record.get("time_s", 0.0))
        news.is_more = max(map(len, (records, news.samples, news.events))) >= MOST_LINES
        return news

    def marks(self) -> dict[str, Any]:
        """Return where each file was read to (JSON)."""
        return self._marks | {name: lines.marks() for name, lines in self._files.items()}

    def _lines(self, name: str) -> LineFollower:
        if name not in self._files:
            self._files[name] = LineFollower(self._folder / name, by_line=True, marks=self._marks.get(name, []))
        return self._files[name]

    def _event_files(self) -> list[str]:
        files = sorted(path.name for path in (self._folder / "events").glob("*.jsonl"))
        if len(files) > MOST_FILES:
            files = [name for name in files if not name.startswith("rank-") or name == "rank-0.jsonl"]
        return [f"events/{name}" for name in files]
