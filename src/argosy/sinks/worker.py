"""The process of one sink: it follows the run's folder, and tells the sink what is new.

It is ended from outside when it hangs, and begun again where it was: `RUN/sinks/NAME.json` says how far it has read.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from argosy.config.load import load
from argosy.errors import ArgosyError
from argosy.files import write_unsynced
from argosy.observe.line_follower import LineFollower
from argosy.plan.plan import Plan
from argosy.processes.child import Channel, ChannelClosed, channel_to_parent, end_with_parent
from argosy.sinks.sink import About, Record, Sink
from argosy.sinks.table import entry_of, file_name_of
from argosy.watch.linefile import tells_of_the_run

LINES_AT_ONCE = 2000
"""Most lines of a file that are taken at once: a long run that is read from its start must not fill the memory."""
MOST_FOLLOWED = 64
"""A run with more processes than this is followed by the events of its first, its agents and its coordinator."""


class StartOver(Exception):
    """Lines were lost, and the sink cannot take back what it was told: it needs all of the run again."""


@dataclass
class NewRows:
    """Lines that were added to a run's files."""

    rewound_to: int | None = None
    """The first step whose lines were forgotten; None if none were."""
    metrics: list[Record] = field(default_factory=list)
    """Lines of steps and of evaluations, in their order."""
    events: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    is_more: bool = False
    """There may be more at once."""

    def tell(self, sink: Sink) -> None:
        if self.rewound_to is not None:
            if not sink.can_rewind:
                raise StartOver
            sink.rewind(self.rewound_to)
        if self.events:
            sink.events(self.events)
        for is_step, records in groupby(self.metrics, key=lambda line: "loss" in line):  # an evaluation's has none
            (sink.steps if is_step else sink.evaluations)(list(records))
        if self.samples:
            sink.samples(self.samples)


class Feed:
    """Follows metrics.jsonl, samples.jsonl and the events of a run."""

    def __init__(self, folder: Path, marks: Mapping[str, Any]):
        """`marks`: what `marks` returned before; empty: from the start."""
        self._folder, self._marks = folder, dict(marks)
        self._files: dict[str, LineFollower] = {}

    def take(self) -> NewRows:
        """Return what is new, in parts of `LINES_AT_ONCE` lines of a file."""
        news = NewRows()
        lines = self._lines("metrics.jsonl")
        records = lines.take(LINES_AT_ONCE)
        if lines.was_cut:
            news.rewound_to = 0 if lines.kept is None else int(lines.kept["step"]) + 1
        news.metrics = records
        news.samples = self._lines("samples.jsonl").take(LINES_AT_ONCE)
        for name in self._event_files():
            process = Path(name).stem
            news.events += [{"process": process, **event} for event in self._lines(name).take(LINES_AT_ONCE)]
        news.events.sort(key=lambda record: record.get("time_s", 0.0))
        news.is_more = max(map(len, (records, news.samples, news.events))) >= LINES_AT_ONCE
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
        if len(files) > MOST_FOLLOWED:
            files = [name for name in files if tells_of_the_run(name.removesuffix(".jsonl"))]
        return [f"events/{name}" for name in files]


SINKS_FOLDER = "sinks"
"""Folder of a run for what each sink keeps of itself."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks at the folder."""
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}
"""Switches that keep libraries from reporting a run to places that the user has not named."""
SINK_NICENESS = 10
"""Training comes first (nice(2))."""


class SinkState:
    """A sink's state over restarts: how far it has read, and what it keeps of itself."""

    def __init__(self, folder: Path, name: str):
        self._path = folder / SINKS_FOLDER / f"{file_name_of(name)}.json"
        self._text = ""

    def read(self) -> dict[str, Any]:
        """Return the saved state: "marks" and "state"."""
        with suppress(OSError, ValueError):
            kept = json.loads(self._path.read_text())
            if isinstance(kept, dict) and {"marks", "state"} <= kept.keys():
                return kept
        return {"marks": {}, "state": {}}

    def write(self, marks: dict[str, Any], state: dict[str, Any], ended_at: int | None = None) -> None:
        """Keep it, if it has changed. It is not synced: a disk must not be made to wait for a sink.

        ended_at: the steps of the report with which the sink was closed; None: it was not.
        """
        text = json.dumps({"marks": marks, "state": state, "ended_at": ended_at})
        if text != self._text:
            self._path.parent.mkdir(exist_ok=True)
            write_unsynced(self._path, text.encode())
            self._text = text


def has_all(folder: Path, name: str) -> bool:
    """Return True if a sink was closed after the last of the steps that the run's report tells of."""
    report = _report(folder)
    return report is not None and SinkState(folder, name).read().get("ended_at") == report.get("steps")


def about(folder: Path, state: dict[str, Any]) -> About:
    """Return what a sink learns of the run in `folder`."""
    run, plan = load(folder / "run.toml"), Plan.load(folder / "plan.toml")
    config = run.model_dump(mode="json")
    return About(run.name, folder, config, plan.model_dump(mode="json"), str(plan), state)


class SinkSession:
    """A sink, and how far it has been told of its run."""

    def __init__(self, folder: Path, name: str):
        """Begin the sink where it was. Raises: whatever the sink does."""
        self._folder, self._kept = folder, SinkState(folder, name)
        before = self._kept.read()
        extend = load(folder / "run.toml").extend
        self.sink: Sink = entry_of(name, extend).load()(about(folder, before["state"]))
        self._feed = Feed(folder, before["marks"])
        self._keep()  # what names the run at its server holds, whatever becomes of the first lines
        if self.sink.must_start_over:
            self._start_over()

    def catch_up(self, alive: Callable[[], None] = lambda: None) -> None:
        """Tell it all that is new; `alive` is called after each part of that."""
        is_more = True
        while is_more:
            try:
                news = self._feed.take()
                news.tell(self.sink)
                is_more = news.is_more
            except StartOver:
                self._start_over()
                continue
            self.sink.tick()
            self._keep()
            alive()

    def close(self) -> None:
        """Tell it that the run ends here."""
        report = _report(self._folder)
        self.sink.close(report)
        ended_at = None if report is None else report.get("steps")
        self._kept.write(self._feed.marks(), self.sink.state, ended_at)

    def _start_over(self) -> None:
        self.sink.start_over()
        self._feed = Feed(self._folder, {})
        self._keep()

    def _keep(self) -> None:
        self._kept.write(self._feed.marks(), self.sink.state)


def follow(folder: Path, name: str, channel: Channel, is_over: threading.Event) -> None:
    """Tell the sink what is new in `folder`, until the run is over and all is told."""
    told = SinkSession(folder, name)
    channel.send("started", state=told.sink.state)
    is_last = False
    while not is_last:
        is_last = is_over.is_set()
        told.catch_up(lambda: channel.send("alive"))
        if not is_last:
            is_over.wait(LOOK_EVERY_S)
    told.close()


def _report(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        report = json.loads((folder / "report.json").read_bytes())
        return report if isinstance(report, dict) else None
    return None


def main() -> None:
    """Entry of the process: the run's folder, the sink's name, and the bytes of memory that it may take."""
    folder, name, memory_bytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    channel, is_over = channel_to_parent(), threading.Event()
    os.nice(SINK_NICENESS)
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    end_with_parent(channel, is_over)  # whatever the sink waits for
    try:
        follow(folder, name, channel, is_over)
    except ChannelClosed:
        os._exit(1)
    except BaseException as error:
        why = str(error) if isinstance(error, ArgosyError) else f"{type(error).__name__}: {error}"
        with suppress(ChannelClosed):
            channel.send("failed", why=" ".join(why.split())[:500])
        raise
    sys.stdout.flush()
    os._exit(0)  # threads that a package left behind have had their time


if __name__ == "__main__":
    main()
