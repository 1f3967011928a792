"""The heartbeats of all ranks of a generation, and what the detectors find in them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from argosy.config.schema import ResilienceConfig
from argosy.observe.events import Tail
from argosy.observe.heartbeat import Phase
from argosy.resilience.detect.finding import Finding, Sample, WorkerSeen
from argosy.resilience.detect.hang import HangDetector
from argosy.resilience.detect.link import SlowLinkDetector
from argosy.resilience.detect.straggler import StragglerDetector
from argosy.resilience.detect.suspect import SuspectDetector

READ_S = 1.0
"""How often the run's metrics are read: the disk may be slow."""
LAST_STEPS = 256
"""How many steps' times are kept."""


class RunWatch:
    """Watch the ranks of one generation after the other."""

    def __init__(self, settings: ResilienceConfig, metrics: Path | None = None):
        """`metrics`: the run's metrics.jsonl, which says how long its steps took."""
        self._hang = HangDetector(settings.hang_s, settings.heartbeat_timeout_s, settings.first_step_s)
        self._straggler = StragglerDetector(settings.straggler_factor, settings.straggler_steps, settings.straggler_s)
        self._link = SlowLinkDetector(settings.straggler_steps, settings.straggler_s)
        self._metrics, self._took_s = Tail(metrics) if metrics else None, dict[int, float]()
        self._read_s = 0.0
        self._suspect = SuspectDetector()
        self.generation = 0
        """The generation that was shown last."""
        self._nodes: dict[str, dict[int, WorkerSeen]] = {}
        self._unheard: set[str] = set()

    def shown(self, generation: int, node: str, workers: Sequence[WorkerSeen]) -> tuple[int, int]:
        """Take in the heartbeats of all workers of `node`; those of another generation are ignored.

        Return the furthest step that any of them is in, and the newest step that any of them could go back to; -1 if
        there is none.
        """
        if generation != self.generation:
            self.generation, self._nodes, self._unheard = generation, {}, set()
        seen: dict[int, WorkerSeen] = {}
        self._nodes[node] = seen  # workers that it no longer shows have ended
        self._unheard.discard(node)
        step = safe_step = -1
        for worker in workers:
            reading = worker.reading
            if reading.generation == generation:
                seen[reading.rank] = worker
                step, safe_step = max(step, reading.step), max(safe_step, reading.safe_step)
        return step, safe_step

    @property
    def step_s(self) -> float | None:
        """The usual time of a step of this generation; None until there were enough of them."""
        return self._link.step_s if self.generation == self._link.generation else None

    @property
    def has_made_a_step(self) -> bool:
        """True once the generation's world has finished a step."""
        return any(worker.reading.busy_s for worker in self._workers.values())

    def are_all(self, phase: Phase, size: int) -> bool:
        """Return True if all `size` ranks are in this phase."""
        return len(self._workers) == size and all(w.reading.phase == phase for w in self._workers.values())

    def findings(self, at_s: float, size: int, plan: str = "") -> list[Finding]:
        """Return what is wrong at `at_s` (CLOCK_MONOTONIC of this process) with a world of `size` under `plan`.

        Empty until all ranks were seen and each of their nodes has sent heartbeats since the last look: a node that
        cannot send them must not make its ranks look hung.
        """
        if self._unheard:
            return []
        self._unheard = {node for node, seen in self._nodes.items() if seen}
        sample = Sample(at_s, self._workers)
        if len(sample.workers) < size:
            return []
        self._read_metrics(at_s)
        slow = [*self._straggler.observe(sample), *self._link.observe(sample, self._took_s, plan)]
        return [*self._hang.observe(sample), *slow, *self._suspect.observe(sample)]

    @property
    def _workers(self) -> dict[int, WorkerSeen]:
        return {rank: worker for seen in self._nodes.values() for rank, worker in seen.items()}

    def _read_metrics(self, at_s: float) -> None:
        if self._metrics is None or at_s - self._read_s < READ_S:
            return
        self._read_s = at_s
        self._took_s |= {line["step"]: line["step_time_s"] for line in self._metrics.read() if "step_time_s" in line}
        self._took_s = dict(list(self._took_s.items())[-LAST_STEPS:])
