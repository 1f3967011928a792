"""The heartbeats of all ranks of a generation, and what the detectors find in them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from argosy.config.resilience import ResilienceConfig
from argosy.config.schema import RunConfig
from argosy.observe.line_follower import LineFollower
from argosy.plan.dealing import RankWork
from argosy.plan.plan import Plan
from argosy.resilience.detect.finding import Finding
from argosy.resilience.detect.hang import HangDetector
from argosy.resilience.detect.link import SlowLinkDetector
from argosy.resilience.detect.stages import UnevenStagesDetector
from argosy.resilience.detect.straggler import StragglerDetector
from argosy.resilience.detect.suspect import SuspectDetector
from argosy.supervise.node_report import NodeReport
from argosy.supervise.world_view import WorldView

READ_S = 1.0
"""How often the run's metrics are read: the disk may be slow."""
LAST_STEPS = 256
"""How many steps' times are kept."""


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
        self._took_s |= {line["step"]: line["step_time_s"] for line in self._metrics.take() if "step_time_s" in line}
        self._took_s = dict(list(self._took_s.items())[-LAST_STEPS:])
