"""The ranks of one generation, put together from the reports of their nodes, and what the detectors find in them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.observe.heartbeat import LAST_STEPS
from argosy.observe.line_follower import LineFollower
from argosy.plan.dealing import RankWork
from argosy.plan.plan import Plan
from argosy.resilience.detect.finding import Finding, Sample, StepTimes, SuspectDetector, Suspicion, WorkerSeen
from argosy.resilience.detect.hang import HangDetector
from argosy.resilience.detect.slow import SlowLinkDetector, StragglerDetector, UnevenStagesDetector
from argosy.supervise.node_report import NodeReport

PENDING_STEPS = 3 * LAST_STEPS
"""The times of this many steps may be known of some ranks only."""


class _NodeView:
    """One node's ranks."""

    def __init__(self, workers: list[tuple[int, int]]):
        self.pids = dict(workers)
        self.ranks = np.fromiter(self.pids, dtype=np.intp, count=len(self.pids))
        self.step, self.waiting = -1, 0
        self.microbatches = np.ones(len(self.ranks))
        """The number that each rank computes in a step, as in the steps that were told."""
        self.told_step = -1
        """The newest step whose times were told."""
        self.seen: dict[int, WorkerSeen] = {}
        self.suspicions: dict[int, int] = {}


class WorldView:
    """All ranks of one generation, as far as their nodes have told of them."""

    def __init__(self, generation: int, size: int):
        self.generation, self.size = generation, size
        self._nodes: dict[str, _NodeView] = {}
        self._unheard: set[str] = set()
        self._moved, self._beaten = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
        self._has_evaluated = False
        self.has_made_a_step = False
        """True once a rank has ended a step."""
        self._times = _StepGather(size)

    def take(self, node: str, report: NodeReport) -> None:
        """Take in the report of a node; one of another generation is ignored."""
        if report.generation != self.generation:
            self._nodes.pop(node, None)
            self._unheard.discard(node)
            return
        before = of = self._nodes.get(node)
        if report.workers is not None:
            of = self._nodes[node] = _NodeView([(rank, pid) for rank, pid in report.workers if rank < self.size])
            of.told_step = -1 if before is None else before.told_step  # it starts over
        if of is None:
            return
        self._unheard.discard(node)
        of.step, of.waiting = report.step, report.waiting
        self._has_evaluated |= report.has_evaluated
        of.suspicions |= report.suspicions
        _mark(self._moved, of, report.still)
        _mark(self._beaten, of, report.silent)
        if of.seen:
            still = set(report.still)
            of.seen = {rank: seen for rank, seen in of.seen.items() if rank in still}
        of.seen |= {rank: seen for rank, seen in report.seen.items() if rank in of.pids}
        if report.microbatches is not None and len(report.microbatches) == len(of.ranks):
            of.microbatches = np.array(report.microbatches, float)
        for step, busy_s in report.took:
            if len(busy_s) == len(of.ranks) and step > of.told_step:
                self.has_made_a_step, of.told_step = True, step
                self._times.put(step, of.ranks, busy_s, of.microbatches)

    def shown_by(self) -> dict[str, int]:
        """Return node -> how many of its ranks have shown themselves."""
        return {name: len(node.ranks) for name, node in self._nodes.items()}

    @property
    def step(self) -> int:
        """The newest step that a rank is in, or has made last; -1 before the first."""
        return max((node.step for node in self._nodes.values()), default=-1)

    def do_all_wait(self) -> bool:
        """Return True if all ranks wait for the next world."""
        return sum(node.waiting for node in self._nodes.values()) == self.size

    def sample(self, at_s: float, every_s: float) -> Sample | None:
        """Return what has changed since the sample before; None until all ranks were told of, and each of their nodes
        has reported since: a node that cannot must not make its ranks look hung."""
        if self._unheard or sum(len(node.ranks) for node in self._nodes.values()) < self.size:
            return None
        self._unheard = {name for name, node in self._nodes.items() if len(node.ranks)}
        moved, beaten, has_evaluated = self._moved, self._beaten, self._has_evaluated
        self._moved, self._beaten, self._has_evaluated = np.zeros_like(moved), np.zeros_like(beaten), False
        return Sample(
            at_s,
            self.generation,
            moved,
            beaten,
            every_s,
            step=self.step,
            has_evaluated=has_evaluated,
            took=self._times.take(),
            suspicions={
                rank: Suspicion(name, node.pids[rank], times)
                for name, node in self._nodes.items()
                for rank, times in node.suspicions.items()
                if rank in node.pids
            },
            seen={rank: seen for node in self._nodes.values() for rank, seen in node.seen.items()},
        )


def _mark(flags: np.ndarray, node: _NodeView, unless: list[int]) -> None:
    """Set the flags of a node's ranks but those that are named."""
    if not unless:
        flags[node.ranks] = True
    else:
        flags[[rank for rank in node.pids if rank not in unless]] = True


class _StepGather:
    """The times of steps, until those of all ranks are known."""

    def __init__(self, size: int):
        self._size, self._last = size, -1
        self._pending: dict[int, tuple[np.ndarray, np.ndarray, int]] = {}
        """Step -> the times, the microbatches, and of how many ranks they are known."""
        self._done: list[StepTimes] = []

    def put(self, step: int, ranks: np.ndarray, busy_s: list[float], microbatches: np.ndarray) -> None:
        """Take in the times of a step on some ranks; each is told once."""
        if step <= self._last:
            return
        times, many, known = self._pending.pop(step, None) or (np.zeros(self._size), np.ones(self._size), 0)
        times[ranks], many[ranks] = busy_s, microbatches
        if known + len(ranks) < self._size:
            self._pending[step] = times, many, known + len(ranks)
            if len(self._pending) > PENDING_STEPS:
                del self._pending[min(self._pending)]
        else:
            self._done.append(StepTimes(step, times, many))

    def take(self) -> list[StepTimes]:
        """Return the steps that have become whole since the last time, ascending."""
        done, self._done = sorted(self._done, key=lambda times: times.step), []
        done = [times for times in done if times.step > self._last]
        self._last = max((times.step for times in done), default=self._last)
        return done


READ_S = 1.0
"""Time between two looks at the run's metrics: the disk may be slow."""
METRICS_STEPS = 256
"""Number of steps whose times are kept."""


class RunWatch:
    """Watch the ranks of one generation after the other."""

    def __init__(self, settings: ResilienceConfig, metrics: Path | None = None, run: RunConfig | None = None):
        """`metrics`: the run's metrics.jsonl, which says how long its steps took. `run`: its model says how much work
        each rank has under a plan; without it all ranks have the same."""
        self._hang = HangDetector(settings.hang_s, settings.heartbeat_timeout_s, settings.first_step_s)
        self._straggler = StragglerDetector(settings.straggler_factor, settings.straggler_steps, settings.straggler_s)
        self._link = SlowLinkDetector(settings.straggler_steps, settings.straggler_s)
        self._metrics, self._took_s = LineFollower.near_end(metrics) if metrics else None, dict[int, float]()
        self._read_s = 0.0
        self._suspect = SuspectDetector()
        self._stages = UnevenStagesDetector(run) if run is not None and settings.rebalance else None
        self._run = run
        self._work_of = lru_cache(4)(self._find_work)
        self._view = WorldView(0, 0)

    @property
    def generation(self) -> int:
        """The generation that was shown last."""
        return self._view.generation

    def shown(self, generation: int, size: int, node: str, report: NodeReport) -> None:
        """Take in what `node` reports, while a world of `size` is the newest; of other generations is ignored."""
        if (generation, size) != (self._view.generation, self._view.size):
            self._view = WorldView(generation, size)
            self._took_s.clear()
        self._view.take(node, report)

    def shown_by(self, generation: int) -> dict[str, int]:
        """Return node -> how many of its ranks have shown themselves in the world of `generation`."""
        return self._view.shown_by() if generation == self._view.generation else {}

    @property
    def wants_all(self) -> bool:
        """True if agents are to report all that each rank shows."""
        return self._hang.wants_all

    @property
    def step_s(self) -> float | None:
        """The usual time of a step of this generation; None until there were enough of them."""
        return self._link.step_s if self.generation == self._link.generation else None

    @property
    def has_made_a_step(self) -> bool:
        """True once the generation's world has finished a step."""
        return self._view.has_made_a_step

    @property
    def step(self) -> int:
        """The newest step of the generation's world."""
        return self._view.step

    def do_all_wait(self, size: int) -> bool:
        """Return True if all `size` ranks wait for the next world."""
        return size == self._view.size and self._view.do_all_wait()

    def findings(self, at_s: float, plan: str = "", every_s: float = 0.5) -> list[Finding]:
        """Return what is wrong at `at_s` (CLOCK_MONOTONIC of this process) with the world, which is laid out by `plan`.

        Empty until all ranks were seen and each of their nodes has reported since the last look: a node that cannot
        must not make its ranks look hung. `every_s`: how often nodes report.
        """
        sample = self._view.sample(at_s, every_s)
        if sample is None:
            return []
        self._read_metrics(at_s)
        uneven = self._stages.observe(sample, plan) if self._stages is not None else []
        slow = [
            *uneven,
            *self._straggler.observe(sample, self._work_of(plan)),
            *self._link.observe(sample, self._took_s, plan),
        ]
        return [*self._hang.observe(sample), *slow, *self._suspect.observe(sample)]

    def _find_work(self, plan: str) -> RankWork | None:
        return None if self._run is None else RankWork.of(Plan.parse(plan), self._run.model, self._run.data.seq_len)

    def _read_metrics(self, at_s: float) -> None:
        if self._metrics is None or at_s - self._read_s < READ_S:
            return
        self._read_s = at_s
        lines = self._metrics.take()
        if self._metrics.was_cut:  # the run went back, and makes these steps again
            self._took_s.clear()
        self._took_s |= {line["step"]: line["step_time_s"] for line in lines if "step_time_s" in line}
        self._took_s = dict(list(self._took_s.items())[-METRICS_STEPS:])
