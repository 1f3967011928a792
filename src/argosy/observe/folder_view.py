"""A run's view, kept up to date from its folder, with its events in a few words, and from this machine's heartbeats."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from heapq import merge
from pathlib import Path
from typing import Any

from argosy.config.load import load
from argosy.config.model_name import model_name
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyError
from argosy.observe.events import Tail, each_line
from argosy.observe.heartbeat import BESIDE, HeartbeatReading, read_heartbeat
from argosy.observe.panel import RunView, figures, step_in_words
from argosy.observe.records import evaluation_line, event_of, node_line, step_line
from argosy.plan.calibration.reconcile import PARTS, part_of
from argosy.plan.cost.estimate import count
from argosy.plan.cost.prediction import Prediction
from argosy.plan.flops import parameters
from argosy.plan.plan import Plan

GOOD, NOTE, BAD = "green", "yellow", "red"
Event = Mapping[str, Any]

WORDS: dict[str, tuple[str, Callable[[Event], str]]] = {
    "start": ("", lambda e: f"training goes on at step {e['step']}" if e["step"] else "training begins"),
    "recovered": (GOOD, lambda e: f"recovered at step {e['step']} ({e['source']}), {e['steps_lost']} steps lost"),
    "resume": (GOOD, lambda e: f"goes on from the checkpoint of step {e['step']}"),
    "save": (GOOD, lambda e: f"saved after {e['step']} steps"),
    "save_failed": (BAD, lambda e: f"saving failed: {e['error']}"),
    "writer_died": (NOTE, lambda e: f"the process that writes checkpoints died: {e['why']}"),
    "drain_failed": (NOTE, lambda e: f"copying a checkpoint away failed: {e['error']}"),
    "damaged_checkpoint": (BAD, lambda e: f"a checkpoint is damaged: {e['problem']}"),
    "worker_died": (BAD, lambda e: f"worker {_of(e, 'rank')} died: {e['why']}"),
    "killed": (NOTE, lambda e: f"worker {_of(e, 'rank')} was killed: {e['why']}"),
    "generation": ("", lambda e: f"{_processes(e['size'])} world {e['generation']}"),
    "replan": (NOTE, lambda e: f"another plan: {e['plan']}"),
    "rebalanced": (NOTE, lambda e: f"shares of microbatches {e['shares'] or 'even'} from step {e['step']} on"),
    "migrated": (NOTE, lambda e: f"migrated ({e['because']}): {e['why']}"),
    "node_refused": (BAD, lambda e: f"node {e['node']} is refused: {e['why']}"),
    "agent_left": (NOTE, lambda e: f"node {e['node']} left: {e['why']}"),
    "coordinator_lost": (NOTE, lambda e: f"the coordinator was lost: {e['why']}"),
    "bad_step": (NOTE, lambda e: f"step {e['step']} was bad ({e['reason']}): {e['outcome']}"),
    "transient": (NOTE, lambda e: f"step {e['step']} looked bad, and was fine when it was repeated"),
    "rewind": (NOTE, lambda e: f"went back to step {e['step']}"),
    "corruption": (BAD, lambda e: f"replicas differ at step {e['step']}: {e['outcome']}"),
    "gradient_corrupt": (BAD, lambda e: f"rank {e['rank']} computed a wrong gradient at step {e['step']}"),
    "collective_corrupt": (BAD, lambda e: f"a sum of gradients was wrong at step {e['step']}"),
    "bad_shard": (NOTE, lambda e: f"damaged data at step {e['step']}: {e['outcome']}"),
    "fault": (NOTE, lambda e: f"a fault was injected: {e['fault']}"),
    "length": ("", lambda e: f"{e['steps']} steps fit in the time"),
    "signal": (NOTE, lambda e: f"asked to stop by signal {e['number']}"),
    "profile": ("", lambda e: f"profiled steps {e['steps'][0]} to {e['steps'][1]}"),
    "alert": (BAD, lambda e: f"{e['alert']}: {e['why']}"),
}
"""Kind of event -> style (as rich names it), and its words. A kind that is not here is shown if it is a finding."""


def _processes(count: int) -> str:
    return "1 process forms" if count == 1 else f"{count} processes form"


def in_words(event: Event) -> tuple[str, str] | None:
    """Return words and style of an event; None for one that is of no interest here, or says less than it should."""
    kind = event.get("event", "")
    try:
        if kind in WORDS:
            style, words = WORDS[kind]
            return words(event), style
        if "action" in event and "why" in event:  # a finding
            return str(event["why"]), NOTE
    except (KeyError, IndexError, TypeError):  # another version wrote it
        pass
    return None


def _of(event: Event, key: str) -> str:
    value = event.get(key)
    return "" if value is None else str(value)


HISTORY_BYTES = 2**22
"""Bytes at the end of metrics.jsonl that are read when a run goes on: some thousand steps."""
EVENTS_BYTES = 2**16
MOST_POINTS = 8192
"""A curve that has more points loses every second one: no screen has more columns."""
LAST_STEPS = 20
"""The parts of a step, and the time to the end, are those of so many last steps."""
SLOW = 3.0
"""A step that took so many times the median compiled or was disturbed."""
MOST_EVENTS = 8
MOST_FILES = 64
"""Most processes whose events are followed: agents, the coordinator, the first rank."""
FILES_EVERY_S = 2.0
STANDS_S = 10.0
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
        if len(self.points) > MOST_POINTS:
            del self.points[1:-1:2]


class FolderView:
    """Follows a run's folder. Nothing in it is needed: what is missing or damaged is not shown."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._metrics = Tail(run_dir / "metrics.jsonl", HISTORY_BYTES)
        self._losses, self._validation = Curve(), Curve()
        self._record: dict[str, Any] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=LAST_STEPS)
        self._tails: dict[Path, Tail] = {}
        self._events: deque[tuple[float, str, str]] = deque(maxlen=MOST_EVENTS)
        self._looked_at = 0.0
        self._settled: dict[str, tuple[float, Any]] = {}
        self._progress: dict[int, tuple[Hashable, float]] = {}
        self._nodes: dict[Path, Tail] = {}
        self._nodes_at = 0.0
        self._own: dict[Path, tuple[int, dict[int, tuple[float, int]]]] = {}
        self.heartbeats: Path | None = None
        """The folder of this machine's heartbeats, once it is known."""

    def look(self) -> RunView:
        """Return the run as it is now."""
        self._read_metrics()
        self._read_events()
        run, (plan, prediction) = self._run(), self._plan()
        ranks, standing = self._ranks()
        steady = self._steady()
        return RunView(
            name=f"{run.name} {run.site}".rstrip() if run else self._run_dir.name,
            model=_model(run),
            plan=str(plan or ""),
            processes=plan.world_size if plan else 0,
            steps=(run.train.steps or None) if run else None,
            left_s=self._left_s(run, steady),
            record=self._record,
            losses=self._losses.points,
            validation=self._validation.points,
            parts=_mean_parts(steady),
            predicted_parts=_predicted_parts(plan, prediction),
            predicted_step_s=float(prediction.step_s.mid) if prediction else None,
            predicted_memory_bytes=float(prediction.memory_bytes.mid) if prediction else None,
            ranks=ranks,
            standing_s=standing,
            events=list(self._events),
        )

    def _read_metrics(self) -> None:
        for line in self._metrics.read():
            if (record := step_line(line)) is not None and {"seconds", "step_time_s"} <= record.keys():
                if record["step"] <= self._record.get("step", -1):
                    self._recent.clear()  # steps that are run again
                self._record = {"tokens": 0, "tokens_per_s": 0.0, **record}
                self._recent.append(record)
                if record["loss"] is not None:
                    self._losses.add(record["step"], record["loss"])
            elif (evaluation := evaluation_line(line)) is not None and "validation_loss" in evaluation:
                self._validation.add(evaluation["step"], evaluation["validation_loss"])

    def _read_events(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= FILES_EVERY_S or not self._tails:
            self._looked_at = now
            folder = self._run_dir / "events"
            names = [*folder.glob("launcher*.jsonl"), *(folder / f"{name}.jsonl" for name in ("coordinator", "rank-0"))]
            for path in names[:MOST_FILES]:
                self._tails.setdefault(path, Tail(path, EVENTS_BYTES))
        fresh = [event for tail in self._tails.values() for event in map(event_of, tail.read()) if event is not None]
        known = [(event["time_s"], *words) for event in fresh if (words := in_words(event)) is not None]
        if known:
            newest = sorted(
                dict.fromkeys([*self._events, *known]), key=lambda event: event[0]
            )  # several agents tell the same
            self._events = deque(newest, maxlen=MOST_EVENTS)

    def _run(self) -> RunConfig | None:
        return self._if_changed("run.toml", load)

    def _plan(self) -> tuple[Plan | None, Prediction | None]:
        found = self._if_changed("plan.toml", lambda path: (Plan.load(path), Prediction.load(path)))
        return found or (None, None)

    def _if_changed(self, name: str, read: Any) -> Any:
        """Return what `read` makes of a file that was changed since the last time, else what it made of it then."""
        with suppress(OSError, ArgosyError, ValueError, TypeError, KeyError):
            path = self._run_dir / name
            at = path.stat().st_mtime
            if name not in self._settled or self._settled[name][0] != at:
                self._settled[name] = at, None
                self._settled[name] = at, read(path)
        return self._settled.get(name, (0.0, None))[1]

    def _steady(self) -> list[dict[str, Any]]:
        """Return the last steps without those that were much slower than the others."""
        if not self._recent:
            return []
        usual = statistics.median(record["step_time_s"] for record in self._recent)
        return [record for record in self._recent if record["step_time_s"] <= SLOW * usual]

    def _left_s(self, run: RunConfig | None, steady: list[dict[str, Any]]) -> float | None:
        """Return the seconds to the end at the speed of the last steps, with what is done beside them."""
        if run is None or not run.train.steps or not steady:
            return None
        step_s = statistics.mean(record["step_time_s"] for record in steady)
        beside_s = sum(record["seconds"].get(name, 0.0) for record in self._recent for name in BESIDE)
        left = run.train.steps - self._record["step"] - 1
        return float(left * (step_s + beside_s / len(self._recent)))

    def _ranks(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return each rank's own seconds in a step, for as much work as most have, and how long those ranks stand still
        that do."""
        readings = [reading for reading in self._readings() if reading.rank >= 0]
        generation = max((reading.generation for reading in readings), default=0)
        newest = [reading for reading in readings if reading.generation == generation and reading.busy_s]
        common = set.intersection(*(set(reading.busy_s) for reading in newest)) if newest else set()
        last = sorted(common)[-LAST_STEPS:]
        own = {
            r.rank: (statistics.mean(r.busy_s[step] for step in last), r.microbatches.get(last[-1], 1))
            for r in newest
            if last
        }
        return _with_even_shares(self._ranks_of_nodes() | own), self._standing(newest)

    def _ranks_of_nodes(self) -> dict[int, tuple[float, int]]:
        """Return each rank's own seconds in the last step that its node has written down (nodes/NODE.jsonl), and how
        many microbatches it ran."""
        now = time.monotonic()
        if now - self._nodes_at >= FILES_EVERY_S:
            self._nodes_at = now
            for path in sorted((self._run_dir / "nodes").glob("*.jsonl"))[:MOST_FILES]:
                for record in map(node_line, self._nodes.setdefault(path, Tail(path, EVENTS_BYTES)).read()[-1:]):
                    with suppress(KeyError, IndexError, TypeError, ValueError):  # another version wrote it
                        ranks, (_, seconds) = record["ranks"], record["own"][-1]
                        many = record["microbatches"][-1][1] if "microbatches" in record else [1] * len(ranks)
                        of_ranks = zip(ranks, seconds, many, strict=True)
                        known = {r: (s, m) for r, s, m in of_ranks if s is not None and m is not None}
                        self._own[path] = record["generation"], known
        newest = max((generation for generation, _ in self._own.values()), default=0)
        return {r: s for generation, own in self._own.values() if generation == newest for r, s in own.items()}

    def _standing(self, readings: Iterable[HeartbeatReading]) -> dict[int, float]:
        now, before = time.monotonic(), self._progress
        self._progress = {}
        for reading in readings:
            progress = (reading.pid, reading.progress)
            known = before.get(reading.rank)
            self._progress[reading.rank] = (progress, known[1] if known and known[0] == progress else now)
        least = max(STANDS_S, STANDS_S * self._record.get("step_time_s", 0.0))
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
    run = FolderView(run_dir).look()
    folder = run_dir / "events"
    agents = sorted(folder.glob("launcher*.jsonl"))[:MOST_FILES]
    paths = [*agents, folder / "coordinator.jsonl", folder / "rank-0.jsonl"]
    events = [event for path in paths for event in map(event_of, each_line(path)) if event is not None]
    told = dict.fromkeys((event["time_s"], words[0]) for event in events if (words := in_words(event)) is not None)
    steps = map(step_line, each_line(run_dir / "metrics.jsonl"))
    lines = (
        (step.get("time_s", 0.0), step_in_words(step, run.steps) + figures({"tokens_per_s": 0.0, **step}, None, None))
        for step in steps
        if step is not None and "step_time_s" in step
    )
    for time_s, said in merge(sorted(told), lines):
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
        for name, part in PARTS.items()
    }


def _predicted_parts(plan: Plan | None, prediction: Prediction | None) -> Mapping[str, float]:
    if plan is None or prediction is None:
        return {}
    predicted = dict.fromkeys(PARTS, 0.0)
    for category, value in prediction.seconds.items():
        with suppress(StopIteration):  # a category of another version
            predicted[part_of(category, plan)] += value
    return predicted
