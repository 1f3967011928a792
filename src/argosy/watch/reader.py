"""A run's folder, read while the run writes to it, after it, or as a copy; nothing is ever written to it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.credentials import redact
from argosy.errors import UserError, encodable
from argosy.files import RUN_LOCK, is_abandoned, text_at_end
from argosy.observe.events import from_the_end, plan_since
from argosy.observe.line_follower import LineFollower
from argosy.observe.records import Record, evaluation_line, record_of, report_of, step_line
from argosy.plan.cost.prediction import Prediction
from argosy.plan.plan import Plan
from argosy.watch.columns import STEP_COLUMN, Columns
from argosy.watch.linefile import Event, EventLog, WatchedFile, leads_away, spread_lines, table_of
from argosy.watch.metrics_table import MetricsTable
from argosy.watch.nodes import MOST_RECORDS, NodeSeries
from argosy.watch.timeline import RunStatus, State, condition

MARKS = ("metrics.jsonl", "events", "plan.toml", "report.json")
"""A folder with run.toml and any of these, or with the first, holds a run."""
RECENT_STEPS = 20
LAST_LINES = 2000
"""The newest evaluation is looked for in so many last lines."""
LONGEST_READ_BYTES = 2**20
SPARKS = 60
"""Points of the little curve of the loss in a list of runs."""

LAST_WORDS_BYTES, LAST_WORDS = 2**12, 120
"""Read of the end of a log, and shown of its last line."""

Part = Callable[[], bool]


def is_run(folder: Path) -> bool:
    """Return True if `folder` looks like that of a run."""
    try:
        if (folder / MARKS[0]).is_file():
            return True
        return (folder / "run.toml").is_file() and any((folder / mark).exists() for mark in MARKS)
    except OSError:
        return False


def is_gone(folder: Path) -> bool:
    """Return True if the processes that held a run are known to be gone: each was on this machine, and none is left."""
    locks = list(folder.glob(f"{RUN_LOCK}*"))
    return bool(locks) and all(map(is_abandoned, locks))


def _last_words(folder: Path, last_line: Record) -> str:
    """Return the last line that a run printed, of the newest log, or else of its last step."""
    logs = [] if leads_away(folder, "logs") else [path for path in folder.glob("logs/*.log") if not path.is_symlink()]
    with suppress(OSError, ValueError):
        newest = max((path for path in logs if path.is_file()), key=lambda path: path.stat().st_mtime)
        lines = text_at_end(newest, LAST_WORDS_BYTES).split("\n")
        if words := next((line.strip() for line in reversed(lines) if line.strip()), ""):
            return redact(words[:LAST_WORDS])
    loss = last_line.get("loss")
    told = f", loss {loss:.3f}" if isinstance(loss, int | float) else ""
    return f"step {last_line['step'] + 1}{told}" if last_line else ""


class RunFiles:
    """A run's folder, of which all but the metrics are read. Nothing is ever written to it.

    Not for several threads at once. `refresh` reads what was added; between two calls nothing changes.
    """

    most_nodes = 20_000

    def __init__(self, folder: Path):
        """Nothing is read before `refresh`."""
        self.folder = folder
        self._events = EventLog(folder / "events")
        self._run = WatchedFile(folder / "run.toml", lambda path: load(str(path), is_settled=True))
        self._plan = WatchedFile(folder / "plan.toml", Plan.load)
        self._prediction = WatchedFile(folder / "plan.toml", Prediction.load)
        self._report = WatchedFile(folder / "report.json", lambda path: report_of(table_of(path)))
        self._io_problems: dict[str, str] = {}
        self.events: list[Event] = []
        """Events of all processes in the order of time, each with its `process`; the number held is bounded."""
        self.run: RunConfig | None = None
        """run.toml; None if it is missing or from another version."""
        self.plan: Plan | None = None
        self.prediction: Prediction | None = None
        """The prediction for that plan, for the machine that it runs on."""
        self.report: Record | None = None
        """report.json, written at the run's end."""
        self.status = RunStatus("training")
        """The run's state, as of the last `refresh`."""
        self.nodes: dict[str, NodeSeries] = {}
        """Nodes by the names that the launcher gives them."""
        self.last_line: Record = {}
        """The whole line of the newest step, its lists too; empty before the first."""
        self.last_evaluation: Record = {}
        """The line of the newest evaluation."""
        self.recent_steps: list[Record] = []
        """The lines of the last steps."""

    @property
    def state(self) -> State:
        """The state alone, in a word."""
        return self.status.state

    @property
    def why(self) -> str:
        """One sentence on a state that is not `training` or `finished`; it may be empty."""
        return self.status.why

    @property
    def event_counts(self) -> Counter[str]:
        """Kind of event -> how often it came, also of events that are not held."""
        return self._events.counts

    @property
    def problems(self) -> list[str]:
        """Files that could not be read, and records that are not shown, in sentences."""
        found = list(self._io_problems.values())
        if self._events.left_out:
            found.append(f"events: {self._events.left_out} of single ranks, or old, are not shown")
        documents = (self._run, self._plan, self._prediction, self._report)
        return found + list(dict.fromkeys(document.problem for document in documents if document.problem))

    def refresh(self) -> bool:
        """Read what was added since; return True if anything changed. What cannot be read becomes a problem."""
        changed = [self._try(name, part) for name, part in self._parts().items()]
        self.events, self.run, self.plan = self._events.events, self._run.value, self._plan.value
        self.prediction, self.report = self._prediction.value, self._report.value
        before = self.status
        found = condition(
            self.events, self.report, self.alive_s, time.time(), self.recent_step_s, lambda: is_gone(self.folder)
        )
        if found.is_gone and (words := _last_words(self.folder, self.last_line)):
            found = replace(found, why=f"{found.why}; the last that it printed: {words}")
        self.status = found
        return any(changed) or before != found

    def _parts(self) -> dict[str, Part]:
        """Return what is to be read, by name of the file or folder."""
        return {
            "events": self._events.refresh,
            "nodes": self._read_nodes,
            "run.toml": self._run.refresh,
            "plan.toml": lambda: self._plan.refresh() | self._prediction.refresh(),
            "report.json": self._report.refresh,
        }

    @property
    def plan_since(self) -> int:
        """The step from which on the plan in force has been in force."""
        return plan_since(event for event in self.events if event["event"] == "start" and event["process"] == "rank-0")

    @property
    def steps_to_make(self) -> int | None:
        """The length of the run; None while a run in minutes does not know it."""
        lengths = [event["steps"] for event in self.events if event["event"] == "length" and event.get("steps")]
        planned = self.run.train.steps if self.run else 0
        return planned or (lengths[-1] if lengths else None)

    @property
    def alive_s(self) -> float:
        """The time of the run's last sign of life, in seconds since 1970; 0 if it gave none."""
        times = [self.last_line.get("time_s"), *(series.last.get("time_s") for series in self.nodes.values())]
        if self.events:
            times.append(self.events[-1]["time_s"])
        if "time_s" not in self.last_line:  # of an older version
            with suppress(OSError):
                times.append((self.folder / "metrics.jsonl").stat().st_mtime)
        found = [time_s for time_s in times if isinstance(time_s, int | float)]
        if not found:  # it has just begun
            with suppress(OSError):
                found.append((self.folder / "run.toml").stat().st_mtime)
        return max(found, default=0.0)

    @property
    def recent_step_s(self) -> float | None:
        """The median of the last steps' `step_time_s`; None if there is none."""
        return self.recent("step_time_s")

    def recent(self, key: str) -> float | None:
        """Return the median of a number of the last steps; None if there is none."""
        known = [value for line in self.recent_steps if isinstance(value := line.get(key), int | float)]
        return float(np.median(known)) if known else None

    def _read_nodes(self) -> bool:
        try:
            with os.scandir(self.folder / "nodes") as entries:
                names = [e.name for e in entries if e.name.endswith(".jsonl") and e.is_file(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return False
        for name in sorted(names)[: self.most_nodes]:
            self.nodes.setdefault(name.removesuffix(".jsonl"), NodeSeries(self.folder / "nodes" / name))
        return sum(series.refresh() for series in self.nodes.values()) > 0

    def _try(self, name: str, part: Part) -> bool:
        try:
            if leads_away(self.folder, name):
                raise OSError(0, "a link out of the run's folder, or no file")
            changed = part()
        except Exception as problem:  # whatever the file holds: the others are shown
            why = problem.strerror if isinstance(problem, OSError) else f"{type(problem).__name__}: {problem}"
            was = self._io_problems.get(name)
            self._io_problems[name] = f"{name}: cannot be read ({encodable(str(why))[:200]})"
            return was is None
        return self._io_problems.pop(name, None) is not None or changed


class RunTail(RunFiles):
    """A run in a list of runs: of its metrics, only the end is read, and some points of the loss."""

    most_nodes = 4096

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._metrics_path = folder / "metrics.jsonl"
        self._version = (-1, -1)
        self.spark: list[float] = []
        """Losses that are evenly spread over the run."""
        self._spark_bytes = 0

    def _parts(self) -> dict[str, Part]:
        return {"metrics.jsonl": self._read_end, **super()._parts()}

    def _read_end(self) -> bool:
        try:
            found = self._metrics_path.stat()
        except FileNotFoundError:
            return False
        version = (found.st_size, found.st_mtime_ns)
        if version == self._version:
            return False
        self._version = version
        steps: list[Record] = []
        evaluation: Record = {}
        for count, line in enumerate(from_the_end(self._metrics_path)):
            if len(steps) < RECENT_STEPS and (step := step_line(line)) is not None:
                steps.append(step)
            elif not evaluation:
                evaluation = evaluation_line(line) or {}
            if count > LAST_LINES or (evaluation and len(steps) == RECENT_STEPS):
                break
        self.recent_steps, self.last_line = steps[::-1], steps[0] if steps else {}
        self.last_evaluation = evaluation or self.last_evaluation
        if not 0.98 * found.st_size <= self._spark_bytes <= found.st_size:
            lines = spread_lines(self._metrics_path, found.st_size, SPARKS, LONGEST_READ_BYTES)
            losses = [(record_of(line) or {}).get("loss") for line in lines]
            self.spark = [float(loss) for loss in losses if isinstance(loss, int | float)]
            self._spark_bytes = found.st_size
        return True


MOST_READ_SAMPLES = 1000


class RunReader(RunFiles):
    """All that a run's folder tells. `refresh` reads what was added; between two calls nothing changes.

    Nothing is ever written to the folder. Not for several threads at once.
    """

    def __init__(self, folder: Path):
        """Raises: UserError if `folder` does not hold a run. Nothing is read before `refresh`."""
        if not is_run(folder):
            what = "has no metrics.jsonl, and no run.toml with events" if folder.is_dir() else "is not a folder"
            inside = (path for each in ("sites/*", "*") for path in sorted(folder.glob(each)) if is_run(path))
            example = next(inside, "runs/demo")
            raise UserError(f"{folder}: not a run: it {what}. Name a run's folder, such as {example}.")
        super().__init__(folder)
        self._metrics = MetricsTable(folder / "metrics.jsonl")
        self._samples = LineFollower.near_end(folder / "samples.jsonl")
        self.samples: list[Record] = []
        """Lines of samples.jsonl: step, time_s, prompt, text."""
        self._scores = LineFollower.near_end(folder / "scores.jsonl")
        self.scores: list[Record] = []
        """Lines of scores.jsonl, of `argosy evaluate --tasks`: step, time_s, tasks."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the reader of a run's folder, refreshed. Raises: as the constructor."""
        reader = cls(folder)
        reader.refresh()
        return reader

    @property
    def steps(self) -> Columns:
        """The lines of steps; of a long run, a group of keys is read when it is first asked for."""
        return self._metrics.steps

    @property
    def evaluations(self) -> Columns:
        """The lines of evaluations: validation_loss, bits_per_byte, tasks.TASK.METRIC."""
        return self._metrics.evaluations

    @property
    def norms(self) -> Columns:
        """The norms of the steps that were due: LAYER.weight, LAYER.gradient, LAYER.update."""
        return self._metrics.norms

    @property
    def nbytes(self) -> int:
        return self.steps.nbytes + self.evaluations.nbytes + self.norms.nbytes

    @property
    def problems(self) -> list[str]:
        """Files that could not be read, and records that are not shown, in sentences."""
        found = []
        if self._metrics.is_missing:
            found.append("metrics.jsonl is not there: it is being rotated, or the run has made no step yet")
        if self._metrics.bad_lines:
            found.append(f"metrics.jsonl: {self._metrics.bad_lines} lines are no records and were passed over")
        if left_out := self.steps.left_out:
            found.append(f"metrics.jsonl: {len(left_out)} keys found no room, e.g. {min(left_out)}")
        return found + super().problems

    def keys(self) -> list[str]:
        """Return the keys of numbers by step that are known, whether they are in memory or not."""
        return [*self._metrics.keys(), *(f"norms.{key}" for key in self.norms if key != STEP_COLUMN)]

    def _parts(self) -> dict[str, Part]:
        return {
            "metrics.jsonl": self._read_metrics,
            "samples.jsonl": self._read_samples,
            "scores.jsonl": self._read_scores,
            **super()._parts(),
        }

    def _read_metrics(self) -> bool:
        changed = self._metrics.refresh()
        self.last_line = self._metrics.last_line
        newest = self.evaluations if len(self.evaluations) else ()
        self.last_evaluation = {key: float(self.evaluations[key][-1]) for key in newest}
        return changed

    def _read_samples(self) -> bool:
        new = [record for record in self._samples.take() if isinstance(record.get("text"), str)]
        self.samples = [*self.samples, *new][-MOST_READ_SAMPLES:]
        return bool(new)

    def _read_scores(self) -> bool:
        new = [line for record in self._scores.take() if (line := evaluation_line(record)) and "tasks" in line]
        self.scores = [*self.scores, *new][-MOST_READ_SAMPLES:]
        return bool(new)

    def task_scores(self) -> dict[str, list[tuple[int, float]]]:
        """Return TASK.METRIC -> (step, score) in the order of steps, of evaluations while it trained and afterwards."""
        found = {
            (key, int(step)): float(value)
            for key in self.evaluations
            if key.startswith("tasks.")
            for step, value in zip(self.evaluations["step"], self.evaluations[key], strict=True)
            if np.isfinite(value)
        }
        for line in self.scores:
            for task, metrics in line["tasks"].items():
                found |= {(f"tasks.{task}.{name}", line["step"]): value for name, value in metrics.items()}
        curves: dict[str, list[tuple[int, float]]] = {}
        for (key, step), value in sorted(found.items()):
            curves.setdefault(key.removeprefix("tasks."), []).append((step, value))
        return curves

    def recent(self, key: str) -> float | None:
        """Return the median of a number of the last steps; None if there is none."""
        recent = self.steps[key][-RECENT_STEPS:] if len(self.steps) else np.empty(0)
        recent = recent[np.isfinite(recent)]
        return float(np.median(recent)) if len(recent) else None

    def node_records(
        self, node: str, first: float | None, last: float | None = None, most: int = MOST_RECORDS
    ) -> tuple[list[Record], bool]:
        """Return the lines of a node about the steps from `first` to `last`, and True if these are all.

        As `NodeSeries.records`: of many lines, some that are evenly spread.
        """
        begin_s, end_s = self._time_of(first), self._time_of(last, later=True)
        records, all_there = self.nodes[node].records(begin_s, end_s, most)
        low, high = -np.inf if first is None else first, np.inf if last is None else last
        return [r for r in records if _overlaps(r.get("steps"), low, high)], all_there

    def release(self) -> None:
        """Give back the memory of what can be read again when it is asked for."""
        self._metrics.drop_all_but_first()

    def _time_of(self, step: float | None, later: bool = False) -> float | None:
        """Return a time before which the step had not begun, or after which lines are about later ones."""
        if step is None or not len(self.steps):
            return None
        times, at = self.steps["time_s"], int(np.searchsorted(self.steps[STEP_COLUMN], step))
        window = times[at + 1 :][:1] if later else times[at:][:1]
        if not len(window) or not np.isfinite(window[0]):
            return None
        # A node's line is about the steps of some seconds, and comes after them.
        slack_s = 2 * max(self.run.observe.ranks_every_s if self.run else 0.0, 5.0)
        return float(window[0]) + (slack_s if later else -slack_s)


def _overlaps(steps: Any, first: float, last: float) -> bool:
    """Return True if a line is about one of these steps; one that does not say about which is."""
    if not isinstance(steps, list) or len(steps) != 2:
        return True
    return bool(steps[0] <= last and steps[1] >= first)
