"""A run in a terminal or a notebook: its view, kept up to date from its folder, and from this machine's heartbeats; the
panel of `argosy watch --terminal`, for runs that train elsewhere or did so; its lines, told again.
"""

from __future__ import annotations

import os
import select
import statistics
import sys
import termios
import time
import tty
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from heapq import merge
from pathlib import Path
from typing import Any

import numpy as np

from argosy.config.load import model_name
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyError, UserError
from argosy.observe.events import each_line
from argosy.observe.heartbeat import BESIDE, HeartbeatReading, read_heartbeat
from argosy.observe.line_follower import LineFollower
from argosy.observe.panel import RunView, duration, figures, one_line, step_in_words
from argosy.observe.records import evaluation_line, step_line
from argosy.observe.report import SLOW_STEP
from argosy.observe.surfaces import TerminalSurface
from argosy.observe.terminal import has_live_line, printable
from argosy.plan.calibration import CALIBRATED_PARTS, part_of
from argosy.plan.cost.estimate import count
from argosy.plan.cost.prediction import Prediction
from argosy.plan.parameters import parameters
from argosy.plan.plan import Plan
from argosy.plan.report.explain import count_of_stops, shown_stops, unlike
from argosy.watch.facts import RunFacts
from argosy.watch.library import find_runs
from argosy.watch.linefile import tells_of_the_run
from argosy.watch.reader import RECENT_STEPS, Part, RunFiles
from argosy.watch.rules.planner import Planner
from argosy.watch.rules.stops import stops_so_far
from argosy.watch.timeline import ENDED_RUN_STATES, in_words

HISTORY_BYTES = 2**22
"""Bytes at the end of metrics.jsonl that are read when a run goes on: some thousand steps."""
CURVE_POINTS = 8192
"""A curve that has more points loses every second one: no screen has more columns."""
SHOWN_EVENTS = 8
ODD_STOPS = "yellow"
"""Colour of stops that are more or fewer than nine times of ten."""
READING_SHARE = 0.05
"""Most of a processor that goes into reading other files than the metrics: there may be thousands."""
RANK_STANDS_S = 10.0
"""A rank that makes no progress for so long, and for so many times the step's time, is named."""


class Curve:
    """(step, value) in order; steps that are run again replace what there was, and old points are thinned out."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def add(self, step: int, value: float) -> None:
        """Add a point, and forget those of `step` and later."""
        while self.points and self.points[-1][0] >= step:
            self.points.pop()
        self.points.append((step, value))
        if len(self.points) > CURVE_POINTS:
            del self.points[1:-1:2]


class FolderView(RunFiles):
    """A run's folder for the panel. Nothing in it is needed: what is missing or damaged is not shown."""

    most_nodes = 64

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._metrics = LineFollower.near_end(folder / "metrics.jsonl", HISTORY_BYTES)
        self._losses, self._validation = Curve(), Curve()
        self._refresh_at_s = 0.0
        self._progress: dict[int, tuple[Hashable, float]] = {}
        self._own: dict[str, tuple[int, dict[int, tuple[float, int]]]] = {}
        self._stops: list[tuple[str, str]] = []
        self.heartbeats: Path | None = None
        """The folder of this machine's heartbeats, once it is known."""

    def look(self) -> RunView:
        """Return the run as it is now; of a large run, events and nodes as they were a moment ago."""
        began_s = time.monotonic()
        if began_s >= self._refresh_at_s:
            self.refresh()
            self._stops = self._stops_so_far()
            ended_s = time.monotonic()
            self._refresh_at_s = ended_s + (ended_s - began_s) / READING_SHARE
        else:
            self._read_metrics()
        run, plan, prediction = self.run, self.plan, self.prediction
        ranks, standing = self._ranks()
        steady = self._steady()
        timed = prediction if self._batch(self.last_line) == self._batch({}) else None  # it is of the largest batch
        return RunView(
            name=f"{run.name} {run.site}".rstrip() if run else self.folder.name,
            model=_model(run),
            plan=str(plan or ""),
            processes=plan.world_size if plan else 0,
            steps=self.steps_to_make,
            left_s=self._left_s(run, steady),
            record={"tokens": 0, "tokens_per_s": 0.0, **self.last_line} if self.last_line else {},
            losses=self._losses.points,
            validation=self._validation.points,
            parts=_mean_parts(steady),
            predicted_parts=_predicted_parts(plan, timed),
            predicted_step_s=float(timed.step_s.mid) if timed else None,
            predicted_memory_bytes=float(prediction.memory_bytes.mid) if prediction else None,
            ranks=ranks,
            standing_s=standing,
            stops=self._stops,
            events=self.told()[-SHOWN_EVENTS:],
        )

    def told(self) -> list[tuple[float, str, str]]:
        """Return time, words and style of the events that a person is told of, by time; what several say, once."""
        of_run = (event for event in self.events if tells_of_the_run(event["process"]))
        return list(dict.fromkeys((e["time_s"], *words) for e in of_run if (words := in_words(e)) is not None))

    def _parts(self) -> dict[str, Part]:
        return {"metrics.jsonl": self._read_metrics, **super()._parts()}

    def _read_metrics(self) -> bool:
        new = self._metrics.take()
        for line in new:
            if (record := step_line(line)) is not None and {"seconds", "step_time_s"} <= record.keys():
                if record["step"] <= self.last_line.get("step", -1):
                    self.recent_steps = []  # steps that are run again
                self.last_line = record
                self.recent_steps = [*self.recent_steps, record][-RECENT_STEPS:]
                if record["loss"] is not None:
                    self._losses.add(record["step"], record["loss"])
            elif (evaluation := evaluation_line(line)) is not None and "validation_loss" in evaluation:
                self._validation.add(evaluation["step"], evaluation["validation_loss"])
        return bool(new)

    def _stops_so_far(self) -> list[tuple[str, str]]:
        """Return words and style of the stops of the run and of each component, those that were seen first."""
        signs = {"time_s": np.array([line["time_s"] for line in self.recent_steps if "time_s" in line], dtype=float)}
        facts = RunFacts(time.time(), run=self.run, plan=self.plan, steps=signs, events=self.events)
        found = None
        with suppress(ArgosyError, KeyError, TypeError, ValueError):  # events of another version
            found = stops_so_far(facts, Planner(facts))
        shown = shown_stops(found.components) if found else []
        if found is None or not (found.seen or shown):
            return []
        low, mid, high = found.expected
        in_all = f"{found.seen} seen, {count_of_stops(mid)} expected ({low:.0f} to {high:.0f})"
        return [
            (in_all, ODD_STOPS if not low <= found.seen <= high else ""),
            *(
                (f"{c.called} {c.seen or 0}, {count_of_stops(c.expected)} expected", ODD_STOPS if unlike(c) else "")
                for c in sorted(shown, key=lambda c: -(c.seen or 0))
            ),
        ]

    def _steady(self) -> list[dict[str, Any]]:
        """Return the last steps of one plan and one batch without those that were much slower than the others."""
        under = [record for record in self.recent_steps if record["step"] >= self.plan_since]
        alike = [record for record in under if self._batch(record) == self._batch(self.last_line)]
        usual = statistics.median(record["step_time_s"] for record in alike) if alike else 0.0
        return [record for record in alike if record["step_time_s"] <= SLOW_STEP * usual]

    def _batch(self, record: Mapping[str, Any]) -> int:
        """Return the batch of a step's line, the largest one without a step."""
        batches = self.run.train.batches if self.run is not None else None
        return 1 if batches is None else batches.at(record["step"]) if "step" in record else batches.largest

    def _left_s(self, run: RunConfig | None, steady: list[dict[str, Any]]) -> float | None:
        """Return the seconds to the end at the speed of the last steps, with what is done beside them."""
        steps = self.steps_to_make
        if run is None or not steps or not steady:
            return None
        step_s = statistics.mean(record["step_time_s"] for record in steady)
        beside_s = sum(record["seconds"].get(name, 0.0) for record in self.recent_steps for name in BESIDE)
        last = self.last_line["step"]
        left = run.train.batches.steps_like(last, last + 1, steps)
        if self.plan is not None and self.plan.has_servers:  # other workers make steps too
            left *= len(self.recent_steps) / (last - self.recent_steps[0]["step"] + 1)
        return float(left * (step_s + beside_s / len(self.recent_steps)))

    def _ranks(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return each rank's own seconds in a step, for as much work as most have, and how long those ranks stand still
        that do."""
        readings = [reading for reading in self._readings() if reading.rank >= 0]
        generation = max((reading.generation for reading in readings), default=0)
        newest = [reading for reading in readings if reading.generation == generation and reading.busy_s]
        common = set.intersection(*(set(reading.busy_s) for reading in newest)) if newest else set()
        last = sorted(common)[-RECENT_STEPS:]
        own = {
            r.rank: (statistics.mean(r.busy_s[step] for step in last), r.microbatches.get(last[-1], 1))
            for r in newest
            if last
        }
        return _with_even_shares(self._ranks_of_nodes() | own), self._standing(newest)

    def _ranks_of_nodes(self) -> dict[int, tuple[float, int]]:
        """Return each rank's own seconds in the last step that its node has written down, and its microbatches."""
        for node, series in self.nodes.items():
            with suppress(KeyError, IndexError, TypeError, ValueError):  # a line of a node that ended no step
                record = series.last
                ranks, (_, seconds) = record["ranks"], record["own"][-1]
                many = record["microbatches"][-1][1] if "microbatches" in record else [1] * len(ranks)
                of_ranks = zip(ranks, seconds, many, strict=True)
                known = {r: (s, m) for r, s, m in of_ranks if s is not None and m is not None}
                self._own[node] = record["generation"], known
        newest = max((generation for generation, _ in self._own.values()), default=0)
        return {r: s for generation, own in self._own.values() if generation == newest for r, s in own.items()}

    def _standing(self, readings: Iterable[HeartbeatReading]) -> dict[int, float]:
        now, before = time.monotonic(), self._progress
        self._progress = {}
        for reading in readings:
            progress = (reading.pid, reading.progress)
            known = before.get(reading.rank)
            self._progress[reading.rank] = (progress, known[1] if known and known[0] == progress else now)
        least = max(RANK_STANDS_S, RANK_STANDS_S * self.last_line.get("step_time_s", 0.0))
        return {rank: now - since for rank, (_, since) in self._progress.items() if now - since > least}

    def _readings(self) -> list[HeartbeatReading]:
        found = []
        with suppress(OSError, ValueError):
            for path in self.heartbeats.glob("worker-*.heartbeat") if self.heartbeats else ():
                reading = read_heartbeat(path)
                if reading is not None:
                    found.append(reading)
        return found


def retold(run_dir: Path) -> Iterator[str]:
    """Yield lines about a run as it prints them, told anew by its folder: its events and its steps, by time."""
    folder = FolderView(run_dir)
    run = folder.look()
    steps = map(step_line, each_line(run_dir / "metrics.jsonl"))
    lines = (
        (step.get("time_s", 0.0), step_in_words(step, run.steps) + figures({"tokens_per_s": 0.0, **step}, None, None))
        for step in steps
        if step is not None and "step_time_s" in step
    )
    for time_s, said in merge([(time_s, words) for time_s, words, _ in folder.told()], lines):
        yield f"{datetime.fromtimestamp(time_s):%Y-%m-%d %H:%M:%S}  {said.strip().replace('  eta ?', '')}"


def _with_even_shares(own: Mapping[int, tuple[float, int]]) -> dict[int, float]:
    """Return the seconds that each rank would take for the microbatches that most have; `own`: seconds, and its own."""
    usual = statistics.median_low(many for _, many in own.values()) if own else 1
    return {rank: own_s if many == usual else own_s * usual / max(1, many) for rank, (own_s, many) in own.items()}


def _model(run: RunConfig | None) -> str:
    with suppress(ArgosyError, ValueError, OSError):
        if run is not None:
            return f"{model_name(run.model)} ({count(parameters(run.model))})"
    return ""


def _mean_parts(records: list[dict[str, Any]]) -> dict[str, float]:
    if not records:
        return {}
    return {
        name: statistics.mean(sum(record["seconds"].get(c, 0.0) for c in part.measured) for record in records)
        for name, part in CALIBRATED_PARTS.items()
    }


def _predicted_parts(plan: Plan | None, prediction: Prediction | None) -> Mapping[str, float]:
    if plan is None or prediction is None:
        return {}
    predicted = dict.fromkeys(CALIBRATED_PARTS, 0.0)
    for category, value in prediction.seconds.items():
        with suppress(StopIteration):  # a category of another version
            predicted[part_of(category, plan)] += value
    return predicted


REFRESH_S = 0.5
RUN_SILENT_S = 60.0
"""A run that is not finished and has written nothing for so long is said to be silent."""
NEXT, BEFORE, QUIT = ("\x1b[B", "\x1b[C", "n"), ("\x1b[A", "\x1b[D", "p"), ("q", "\x03", "\x04")
"""Keys: arrows down and right, or n; arrows up and left, or p; q."""


def main(root: Path) -> int:
    """Show the run in `root`, or the runs under it, until q is typed. Without a terminal print a line for each run.

    Raises: UserError if there is no run.
    """
    runs = list(find_runs(root).values())
    if not runs:
        raise UserError(
            f"{root} holds no run. Name a run's folder, or one that holds runs: argosy watch runs --terminal"
        )
    if not has_live_line(sys.stdout) or not sys.stdin.isatty():
        for run in runs:
            view = seen(FolderView(run))
            print(f"{view.name}{one_line(view).plain}")
        return 0
    with _keys():
        _show(runs)
    return 0


def seen(folder: FolderView) -> RunView:
    """Return the run as it is now, with a word on whether it still trains."""
    view = _in_printable_words(folder.look())
    silent_s = time.time() - folder.alive_s
    if (folder.folder / "report.json").exists():
        doing = "ended"
    elif folder.state in ENDED_RUN_STATES:  # as its events say: the folder of parameter servers has no report
        doing = folder.state
    elif not folder.last_line:
        return replace(view, doing="no step yet")
    else:
        return replace(view, doing=f"silent for {duration(silent_s)}") if silent_s > RUN_SILENT_S else view
    return replace(view, doing=doing, left_s=0.0 if view.step == view.steps else None)


def _in_printable_words(view: RunView) -> RunView:
    """Return the view with what the run's files say in text only as text: they may be a stranger's."""
    return replace(
        view,
        name=printable(view.name),
        model=printable(view.model),
        plan=printable(view.plan),
        doing=printable(view.doing),
        events=[(time_s, printable(words), style) for time_s, words, style in view.events],
    )


def _show(runs: list[Path]) -> None:
    at, folders, view = 0, {0: FolderView(runs[0])}, RunView()
    surface = TerminalSurface(sys.stdout, is_named=len(runs) > 1)
    try:
        while True:
            view = seen(folders.setdefault(at, FolderView(runs[at])))
            if len(runs) > 1:
                view = replace(view, name=f"{view.name} ({at + 1} of {len(runs)})")
            surface.show([], view)
            key = typed_key(REFRESH_S)
            if key in QUIT:
                break
            at = (at + (key in NEXT) - (key in BEFORE)) % len(runs)
    except KeyboardInterrupt:
        pass
    surface.close([], view, is_told=False)


@contextmanager
def _keys() -> Iterator[None]:
    """Read single keys in this block; the terminal is as it was afterwards."""
    was = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, was)


def typed_key(timeout_s: float) -> str:
    """Return what was typed within this time, one key with its whole escape sequence; "" if nothing was."""
    key = b""
    while select.select([sys.stdin], [], [], 0.0 if key else timeout_s)[0]:
        key += (byte := os.read(sys.stdin.fileno(), 1))
        if not byte or key[:1] != b"\x1b" or (len(key) > 2 and byte.isalpha()) or byte == b"~":
            break
    return key.decode(errors="replace")
