"""A run's folder, read while the run writes to it, after it, or as a copy. Nothing is ever written to it."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyError, UserError
from argosy.observe.events import Tail
from argosy.plan.cost.prediction import Prediction
from argosy.plan.plan import Plan
from argosy.watch.columns import STEP, Columns
from argosy.watch.event_log import Event, EventLog
from argosy.watch.metrics_table import MetricsTable
from argosy.watch.node_series import MOST_RECORDS, NodeSeries, Record
from argosy.watch.state import Condition, State, condition

MARKS = ("metrics.jsonl", "events", "plan.toml", "report.json")
"""A folder with run.toml and any of these, or with the first, holds a run."""
MOST_SAMPLES = 1000
MOST_NODES = 20_000
MOST_DOCUMENT_BYTES = 2**24
"""run.toml, plan.toml or report.json that is larger is not ours."""
RECENT_STEPS = 20

T = TypeVar("T")


def is_run(folder: Path) -> bool:
    """Return True if `folder` looks like that of a run."""
    try:
        if (folder / MARKS[0]).is_file():
            return True
        return (folder / "run.toml").is_file() and any((folder / mark).exists() for mark in MARKS)
    except OSError:
        return False


class RunReader:
    """All that a run's folder tells. `refresh` reads what was added; between two calls nothing changes.

    Not for several threads at once.
    """

    def __init__(self, folder: Path):
        """Raises: UserError if `folder` does not hold a run. Nothing is read before `refresh`."""
        if not is_run(folder):
            what = "has no metrics.jsonl, and no run.toml with events" if folder.is_dir() else "is no folder"
            raise UserError(f"{folder}: not a run: it {what}. Name a run's folder, such as runs/demo.")
        self.folder = folder
        self._metrics = MetricsTable(folder / "metrics.jsonl")
        self._events = EventLog(folder / "events")
        self._samples = Tail(folder / "samples.jsonl")
        self._run = _Document(folder / "run.toml", lambda path: load(str(path)))
        self._plan = _Document(folder / "plan.toml", Plan.load)
        self._prediction = _Document(folder / "plan.toml", Prediction.load)
        self._report = _Document(folder / "report.json", _table)
        self._io_problems: dict[str, str] = {}
        self._condition = Condition("training")
        self.samples: list[Record] = []
        """Lines of samples.jsonl: step, time_s, prompt, text."""
        self.nodes: dict[str, NodeSeries] = {}
        """By the launcher's name of the node."""

    @property
    def steps(self) -> Columns:
        """The lines of steps; of a long run, a group of keys is read when it is first asked for."""
        return self._metrics.steps

    @property
    def evaluations(self) -> Columns:
        """The lines of evaluations: validation_loss, bits_per_byte."""
        return self._metrics.evaluations

    @property
    def norms(self) -> Columns:
        """The norms of the steps that were due: LAYER.weight, LAYER.gradient, LAYER.update."""
        return self._metrics.norms

    @property
    def last_line(self) -> dict[str, Any]:
        """The whole line of the newest step, its lists too; empty before the first."""
        return self._metrics.last_line

    @property
    def events(self) -> list[Event]:
        """Events of all processes in the order of time, each with its `process`; the number held is bounded."""
        return self._events.events

    @property
    def run(self) -> RunConfig | None:
        """run.toml; None if it is missing or from another version."""
        return self._run.value

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""
        return self._plan.value

    @property
    def prediction(self) -> Prediction | None:
        """The prediction for that plan, for the machine that it runs on."""
        return self._prediction.value

    @property
    def report(self) -> dict[str, Any] | None:
        """report.json, written at the run's end."""
        return self._report.value

    @property
    def state(self) -> State:
        """What became of the run, as of the last `refresh`."""
        return self._condition.state

    @property
    def why(self) -> str:
        """One sentence on a state that is not `training` or `finished`; it may be empty."""
        return self._condition.why

    @property
    def problems(self) -> list[str]:
        """What could not be read, or is not shown, in sentences."""
        found = list(self._io_problems.values())
        if self._metrics.is_missing:
            found.append("metrics.jsonl is not there: it is being rotated, or the run has made no step yet")
        if self._metrics.bad_lines:
            found.append(f"metrics.jsonl: {self._metrics.bad_lines} lines are no records and were passed over")
        if self._events.left_out:
            found.append(f"events: {self._events.left_out} of single ranks, or old, are not shown")
        if left_out := self.steps.left_out:
            found.append(f"metrics.jsonl: {len(left_out)} keys found no room, e.g. {min(left_out)}")
        documents = (self._run, self._plan, self._report)
        return found + [document.problem for document in documents if document.problem]

    def keys(self) -> list[str]:
        """Return the keys of numbers by step that are known, whether they are in memory or not."""
        return [*self._metrics.keys(), *(f"norms.{key}" for key in self.norms if key != STEP)]

    def refresh(self) -> bool:
        """Read what was added since; return True if anything changed. What cannot be read becomes a problem."""
        parts: dict[str, Callable[[], bool]] = {
            "metrics.jsonl": self._metrics.refresh,
            "events": self._events.refresh,
            "samples.jsonl": self._read_samples,
            "nodes": self._read_nodes,
            "run.toml": self._run.refresh,
            "plan.toml": lambda: self._plan.refresh() | self._prediction.refresh(),
            "report.json": self._report.refresh,
        }
        changed = [self._try(name, part) for name, part in parts.items()]
        before = self._condition
        self._condition = condition(self.events, self.report, self.alive_s, time.time(), self.recent_step_s)
        return any(changed) or before != self._condition

    @property
    def alive_s(self) -> float:
        """The time of the run's last sign of life, in seconds since 1970; 0 if it gave none."""
        times = [self.last_line.get("time_s"), *(series.last.get("time_s") for series in self.nodes.values())]
        if self.events:
            times.append(self.events[-1]["time_s"])
        if "time_s" not in self.last_line:  # of an older version
            times.append(_modified_s(self.folder / "metrics.jsonl"))
        return max((time_s for time_s in times if isinstance(time_s, int | float)), default=0.0)

    @property
    def recent_step_s(self) -> float | None:
        """The median of the last steps' `step_time_s`; None if there is none."""
        recent = self.steps["step_time_s"][-RECENT_STEPS:]
        recent = recent[np.isfinite(recent)]
        return float(np.median(recent)) if len(recent) else None

    def node_records(
        self, node: str, first: float | None = None, last: float | None = None, most: int = MOST_RECORDS
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
        times, at = self.steps["time_s"], int(np.searchsorted(self.steps[STEP], step))
        # A node's line is about the steps of some seconds, and comes after them: the lines around count as well.
        window = times[at:][:1] if not later else times[at + 1 :][:1]
        if not len(window) or not np.isfinite(window[0]):
            return None
        slack_s = 2 * max(self.run.observe.ranks_every_s if self.run else 0.0, 5.0)
        return float(window[0]) + (slack_s if later else -slack_s)

    def _read_samples(self) -> bool:
        new = [record for record in self._samples.read() if isinstance(record.get("text"), str)]
        self.samples = [*self.samples, *new][-MOST_SAMPLES:]
        return bool(new)

    def _read_nodes(self) -> bool:
        try:
            with os.scandir(self.folder / "nodes") as entries:
                names = [e.name for e in entries if e.name.endswith(".jsonl") and e.is_file(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return False
        for name in sorted(names)[:MOST_NODES]:
            self.nodes.setdefault(name.removesuffix(".jsonl"), NodeSeries(self.folder / "nodes" / name))
        return sum(series.refresh() for series in self.nodes.values()) > 0

    def _try(self, name: str, part: Callable[[], bool]) -> bool:
        try:
            if _leads_away(self.folder, name):
                raise OSError(0, "a link out of the run's folder, or no file")
            changed = part()
        except OSError as problem:
            was = self._io_problems.get(name)
            self._io_problems[name] = f"{name}: cannot be read ({problem.strerror})"
            return was is None
        return self._io_problems.pop(name, None) is not None or changed


class _Document(Generic[T]):
    """A small file that is replaced as a whole, and parsed anew when it was."""

    def __init__(self, path: Path, parse: Callable[[Path], T]):
        self._path, self._parse = path, parse
        self._version: tuple[int, int, int] | None = None
        self.value: T | None = None
        self.problem = ""

    def refresh(self) -> bool:
        """Parse the file if it is another than before; return True if it was. Raises: OSError."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            changed, self.value, self._version, self.problem = self._version is not None, None, None, ""
            return changed
        version = (found.st_ino, found.st_size, found.st_mtime_ns)
        if version == self._version:
            return False
        self._version, self.value, self.problem = version, None, ""
        if found.st_size > MOST_DOCUMENT_BYTES:
            self.problem = f"{self._path.name}: too large to be a run's, and not read"
            return True
        try:
            self.value = self._parse(self._path)
        except FileNotFoundError:
            self._version = None
        except (ArgosyError, ValueError, TypeError, KeyError, RecursionError) as error:
            first_line = str(error).partition("\n")[0]
            self.problem = f"{self._path.name}: cannot be understood ({first_line[:300]})"
        return True


def _leads_away(folder: Path, name: str) -> bool:
    """Return True for what must not be read: a link to outside of `folder`, a pipe, a device."""
    path = folder / name
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # there is nothing, which is for the reader to say
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return True
    return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())


def _table(path: Path) -> dict[str, Any]:
    table = json.loads(path.read_bytes())
    if not isinstance(table, dict):
        raise ValueError("no table")
    return table


def _modified_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _overlaps(steps: Any, first: float, last: float) -> bool:
    """Return True if a line is about one of these steps; one that does not say about which is."""
    if not isinstance(steps, list) or len(steps) != 2:
        return True
    return bool(steps[0] <= last and steps[1] >= first)
