"""A link that became slow: steps take longer than before, and not because of any rank's own work.

A step without the own work of its slowest rank is time that all ranks wait: for collectives, and for each other's data.
It is compared with the run's own best under the same plan: a step that is longer because of waiting counts against
the links; a slow rank, a longer batch or a busy machine does not. Waiting inside layers (tensor and context
parallelism, fully sharded parameters) counts too, but for that of experts, which is timed as the ranks' own work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median

from argosy.observe.heartbeat import LAST_STEPS
from argosy.resilience.detect.finding import Finding, Latch
from argosy.resilience.detect.sample import Sample

GROWN = 0.5
"""Waiting must have grown by this share of a usual step."""
LASTING = 4
"""Number of windows for which it must last."""
MOST_STEPS = 0.75
"""Share of the steps in these windows that must be slow."""
SKIPPED = 2
"""The first steps of a world compile and warm up."""


@dataclass(frozen=True)
class _LinkStep:
    at_s: float
    took_s: float
    waited_s: float


class SlowLinkDetector:
    """Watch the steps of one world after the other."""

    def __init__(self, steps: int = 20, seconds: float = 10.0):
        """Arguments as the keys straggler_steps and straggler_s of [resilience]."""
        self._steps, self._seconds = steps, seconds
        self._plan = ""
        self._usual: _LinkStep | None = None
        self._start(-1)

    @property
    def step_s(self) -> float | None:
        """The usual time of a step of this world; None until there were enough of them."""
        return self._typical.took_s if len(self._window) >= self._steps else None

    def observe(self, sample: Sample, took_s: Mapping[int, float], plan: str) -> list[Finding]:
        """Return what is found in the newest sample. `took_s`: step -> how long it took, for the newest steps."""
        if sample.generation != self.generation:
            self._start(sample.generation)
            if plan != self._plan:
                self._plan, self._usual = plan, None
        self._own_s |= {times.step: float(times.busy_s.max()) for times in sample.took}
        for step in sorted(self._own_s)[:-LAST_STEPS]:
            del self._own_s[step]
        fresh = sorted(self._own_s.keys() & took_s.keys())
        for step in fresh:
            own_s = self._own_s.pop(step)
            self._take_in(step, _LinkStep(sample.at_s, took_s[step], max(0.0, took_s[step] - own_s)))
        return self._findings() if fresh and len(self._window) >= self._steps else []

    def _start(self, generation: int) -> None:
        self.generation, self._seen, self._last = generation, 0, -1
        self._window: deque[_LinkStep] = deque()
        self._own_s: dict[int, float] = {}
        """Step -> the longest own work of a rank, for steps of which it is not known yet how long they took."""
        self._latch = Latch()

    def _take_in(self, number: int, step: _LinkStep) -> None:
        self._seen, self._last = self._seen + 1, number
        if self._seen > SKIPPED:
            self._window.append(step)
        while len(self._window) > LASTING * self._steps and step.at_s - self._window[1].at_s >= LASTING * self._seconds:
            self._window.popleft()

    @property
    def _typical(self) -> _LinkStep:
        """The median step of the newest window."""
        steps = list(islice(reversed(self._window), self._steps))
        return _LinkStep(steps[-1].at_s, median(s.took_s for s in steps), median(s.waited_s for s in steps))

    def _findings(self) -> list[Finding]:
        now = self._typical
        if self._usual is None or now.took_s < self._usual.took_s:
            self._usual = now
        usual, steps = self._usual, self._window
        slow = sum(step.waited_s - usual.waited_s >= GROWN * usual.took_s for step in steps)
        spans = steps[-1].at_s - steps[0].at_s >= LASTING * self._seconds
        lasts = len(steps) >= LASTING * self._steps and spans and slow >= MOST_STEPS * len(steps)
        if not self._latch.rises("slow", is_wrong=lasts, is_right=slow < (1 - MOST_STEPS) * len(steps)):
            return []
        waited_s = median(step.waited_s for step in steps)
        evidence = {
            "factor": round(1 + (waited_s - usual.waited_s) / usual.took_s, 2),
            "step_s": round(now.took_s, 6),
            "usual_step_s": round(usual.took_s, 6),
            "waiting_s": round(waited_s, 6),
            "usual_waiting_s": round(usual.waited_s, 6),
            "slow_steps": slow,
            "steps": len(steps),
            "last_step": self._last,
        }
        why = (
            f"ranks wait {waited_s * 1e3:.0f} ms of a step for each other, and used to wait "
            f"{usual.waited_s * 1e3:.0f} ms: the links between them are slow, not their own work"
        )
        return [Finding("slow_link", "alarm", why, (), evidence)]
