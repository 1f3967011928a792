"""The runs under a folder, and what a list of runs shows of each: its documents, its events, the ends of its metrics,
and its state, told from its last events and the time of its last sign of life.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.credentials import redact
from argosy.errors import STOP_SIGNALS, UserError
from argosy.files import LOCK, is_abandoned
from argosy.observe.events import from_the_end
from argosy.observe.records import encodable, evaluation_line, record_of, report_of, step_line
from argosy.plan.cost.prediction import Prediction
from argosy.plan.plan import Plan
from argosy.watch.linefile import Event, EventLog, WatchedFile, leads_away, spread_lines, table_of
from argosy.watch.nodes import NodeSeries

State = Literal["training", "finished", "stopped", "failed", "silent", "dead"]

SILENT_AFTER_S = 120.0
"""A run that shows no sign of life for so long is silent, or for SILENT_STEPS of its steps if that is longer."""
SILENT_STEPS = 20
STARTING_S = 900.0
"""Until its first step after a start, it may be compiling."""
BEGINNINGS = ("start", "generation", "agent_came", "coordinator_started", "worker_started")
STOPPED_BY_SIGNAL = tuple(128 + number for number in STOP_SIGNALS)


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, and why."""

    state: State
    why: str = ""
    is_gone: bool = False
    """True if its processes ended without a word."""


def condition(
    events: Iterable[dict[str, Any]],
    report: dict[str, Any] | None,
    alive_s: float,
    now_s: float,
    step_s: float | None,
    is_gone: Callable[[], bool] = lambda: False,
) -> RunStatus:
    """Return the state of a run.

    events: in the order of time; at least the last ones of rank 0, agents and coordinator. alive_s: its last sign of
    life, and now_s the time, in seconds since 1970. step_s: of its last steps; None if there is none. is_gone: returns
    True if the processes that held the run are known to be gone; asked of a run that has not said that it ended.
    """
    begun_s, ended_s = -1.0, -1.0
    finish: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    end: dict[str, Any] = {}
    for event in events:
        if event["event"] in BEGINNINGS:
            begun_s = event["time_s"]
        elif event["event"] == "signal":
            asked = event
        elif event["event"] == "finish":
            finish, ended_s = event, event["time_s"]
        elif event["event"] == "end" and event.get("process") == "rank-0":
            end, ended_s = event, event["time_s"]
    if ended_s >= begun_s and (finish or end):
        return _ended(finish if finish.get("time_s", -1.0) >= begun_s else {}, end, report)
    if begun_s < 0 and report:
        return _ended({}, {}, report)
    if is_gone():
        if asked and asked["time_s"] >= begun_s:
            return RunStatus("stopped", f"{_signal(asked)} stopped it before its state was saved", True)
        return RunStatus("dead", "its processes are gone, and no event says why", True)
    quiet_s, allowed_s = now_s - alive_s, SILENT_AFTER_S
    if step_s is None or alive_s - begun_s < STARTING_S:
        allowed_s = STARTING_S if step_s is None else max(allowed_s, STARTING_S - (alive_s - begun_s))
    allowed_s = max(allowed_s, SILENT_STEPS * (step_s or 0.0))
    if quiet_s > allowed_s:
        return RunStatus("silent", f"no sign of life for {_duration(quiet_s)}, and no event says that it ended")
    return RunStatus("training")


def _ended(finish: dict[str, Any], end: dict[str, Any], report: dict[str, Any] | None) -> RunStatus:
    code, why = finish.get("exit_code", 0), str(finish.get("why", ""))
    if code in STOPPED_BY_SIGNAL:
        return RunStatus("stopped", why)
    if code:
        return RunStatus("failed", why)
    finished = end.get("finished", finish.get("finished", (report or {}).get("status") == "finished"))
    if finished:
        return RunStatus("finished")
    paused = end.get("paused_at")
    by = f"paused at step {paused}, as train.pause_at says" if paused else "a signal stopped it"
    return RunStatus("stopped", f"{by}; its state is saved")


def _signal(event: dict[str, Any]) -> str:
    try:
        return signal.Signals(event["number"]).name
    except (KeyError, ValueError):
        return "a signal"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


MARKS = ("metrics.jsonl", "events", "plan.toml", "report.json")
"""A folder with run.toml and any of these, or with the first, holds a run."""
RECENT_STEPS = 20
LAST_LINES = 2000
"""The newest evaluation is looked for in so many last lines."""
LONGEST_LINE_BYTES = 2**20
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
    locks = list(folder.glob(f"{LOCK}*"))
    return bool(locks) and all(map(is_abandoned, locks))


def _last_words(folder: Path, last_line: dict[str, Any]) -> str:
    """Return the last line that a run printed, of the newest log, or else of its last step."""
    logs = [] if leads_away(folder, "logs") else [path for path in folder.glob("logs/*.log") if not path.is_symlink()]
    with suppress(OSError, ValueError):
        newest = max((path for path in logs if path.is_file()), key=lambda path: path.stat().st_mtime)
        with newest.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
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
        """Raises: UserError if `folder` does not hold a run. Nothing is read before `refresh`."""
        if not is_run(folder):
            what = "has no metrics.jsonl, and no run.toml with events" if folder.is_dir() else "is no folder"
            raise UserError(f"{folder}: not a run: it {what}. Name a run's folder, such as runs/demo.")
        self.folder = folder
        self._events = EventLog(folder / "events")
        self._run = WatchedFile(folder / "run.toml", lambda path: load(str(path)))
        self._plan = WatchedFile(folder / "plan.toml", Plan.load)
        self._prediction = WatchedFile(folder / "plan.toml", Prediction.load)
        self._report = WatchedFile(folder / "report.json", lambda path: report_of(table_of(path)))
        self._io_problems: dict[str, str] = {}
        self._condition = RunStatus("training")
        self.nodes: dict[str, NodeSeries] = {}
        """By the launcher's name of the node."""
        self.last_line: dict[str, Any] = {}
        """The whole line of the newest step, its lists too; empty before the first."""
        self.last_evaluation: dict[str, Any] = {}
        """The line of the newest evaluation."""
        self.recent_steps: list[dict[str, Any]] = []
        """The lines of the last steps."""

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
        if self._events.left_out:
            found.append(f"events: {self._events.left_out} of single ranks, or old, are not shown")
        documents = (self._run, self._plan, self._prediction, self._report)
        return found + list(dict.fromkeys(document.problem for document in documents if document.problem))

    def refresh(self) -> bool:
        """Read what was added since; return True if anything changed. What cannot be read becomes a problem."""
        changed = [self._try(name, part) for name, part in self._parts().items()]
        before = self._condition
        found = condition(
            self.events, self.report, self.alive_s, time.time(), self.recent_step_s, lambda: is_gone(self.folder)
        )
        if found.is_gone and (words := _last_words(self.folder, self.last_line)):
            found = replace(found, why=f"{found.why}; the last that it printed: {words}")
        self._condition = found
        return any(changed) or before != self._condition

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
        recent = [line.get("step_time_s") for line in self.recent_steps]
        known = [value for value in recent if isinstance(value, int | float)]
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
        """Raises: UserError if `folder` does not hold a run. Nothing is read before `refresh`."""
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
        steps: list[dict[str, Any]] = []
        evaluation: dict[str, Any] = {}
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
            lines = spread_lines(self._metrics_path, found.st_size, SPARKS, LONGEST_LINE_BYTES)
            losses = [(record_of(line) or {}).get("loss") for line in lines]
            self.spark = [float(loss) for loss in losses if isinstance(loss, int | float)]
            self._spark_bytes = found.st_size
        return True


MOST_RUNS = 5000
DEEPEST = 4
"""A run is looked for in so many levels of folders."""
MOST_FOLDERS = 50_000
"""Most folders that are looked into."""


def find_runs(root: Path) -> dict[str, Path]:
    """Return the runs in and under `root`: path relative to it -> folder, in alphabetical order.

    A link is not followed, so nothing outside of `root` is found. A run within a run's folder is none of its own.
    """
    if is_run(root):
        return {own_id(root): root}
    found = dict(_runs_under(root))
    return dict(sorted(found.items()))


def own_id(run: Path) -> str:
    """Return the id of a run that was named itself, and is no run under a folder: its folder's name."""
    return run.resolve().name.lstrip(".") or "run"


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of the run with this id. Raises: UserError if `root` has no such run, or it lies outside."""
    unknown = UserError(f"no run {run_id!r} in {root}")
    if "\0" in run_id or run_id.startswith(("/", "\\")):
        raise unknown
    parts = run_id.split("/")
    if is_run(root) and run_id == own_id(root):
        return root.resolve()
    if any(not part or part.startswith(".") for part in parts):
        raise unknown
    try:
        home = root.resolve(strict=True)
        folder = (home / run_id).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # a circle of links, a name that is too long
        raise unknown from None
    if not folder.is_relative_to(home) or not is_run(folder):
        raise unknown
    return folder


def _runs_under(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield runs, level by level, so that in a huge tree the nearest ones are found."""
    level, seen, count = [root], 0, 0
    for _ in range(DEEPEST):
        below: list[Path] = []
        for folder in level:
            for child in _folders_in(folder):
                seen += 1
                if seen > MOST_FOLDERS or count >= MOST_RUNS:
                    return
                if is_run(child):
                    count += 1
                    yield child.relative_to(root).as_posix(), child
                else:
                    below.append(child)
        level = below


def _folders_in(folder: Path) -> list[Path]:
    found: list[Path] = []
    with suppress(OSError), os.scandir(folder) as entries:  # one that may not be read is passed over
        found = [Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    return sorted(found)
