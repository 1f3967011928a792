"""Pipeline stages whose layers do not fit the speed of their ranks.

A rank's own work of a step, in the layers that it has, is its speed. With the speeds of all follows the deal of layers
whose slowest rank ends first, and how long a step would take under it (`plan.dealing`). It is told of if it saves
`LEAST_SAVED` of the step, by the medians of a window of steps and in most of these steps by themselves: noise spreads
over all ranks, so that no one deal saves that much in many steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from argosy.config.schema import RunConfig
from argosy.plan.dealing import PipelineWork
from argosy.plan.plan import Plan
from argosy.resilience.detect.finding import Finding, Sample, StepTimes, Times

LEAST_SAVED = 0.1
"""Share of the pipeline's time that another deal must save."""
MOST_STEPS = 0.75
"""Share of a window's steps in which it must save that."""
MOST_WATCHED = 16
"""Times the first window: after each finding twice as many steps are watched, up to that."""
SKIPPED = 2
"""The first steps of a world compile and warm up."""


@dataclass(frozen=True)
class _StageStep:
    number: int
    at_s: float
    stage_s: Times
    """Own seconds of each pipeline rank for a microbatch: of its slowest rank. Shape: (pp,)."""


class UnevenStagesDetector:
    """Watch the stages of one world after the other."""

    def __init__(self, run: RunConfig):
        """Windows are those of stragglers: resilience.straggler_steps and straggler_s."""
        self._model, self._seq_len = run.model, run.data.seq_len
        self._steps, self._seconds = run.resilience.straggler_steps, run.resilience.straggler_s
        self._watched = 1
        self._start(-1, "", 0)

    def observe(self, sample: Sample, plan: str) -> list[Finding]:
        """Return what is found in the newest sample of a world that is laid out by `plan`."""
        if (sample.generation, plan) != (self._generation, self._said):
            self._start(sample.generation, plan, sample.size)
        work = self._work
        if work is None:
            return []
        for times in sample.took:
            self._take_in(times, sample.at_s)
        if not sample.took or not self._is_full:
            return []
        found = self._finding(work)
        if found is not None:
            self._watched = min(2 * self._watched, MOST_WATCHED)
            self._window.clear()
        return [] if found is None else [found]

    def _start(self, generation: int, said: str, size: int) -> None:
        self._generation, self._said, self._seen, self._microbatches = generation, said, 0, 0
        self._window: deque[_StageStep] = deque()
        plan = Plan.parse(said)
        is_one = plan.pp > 1 and plan.world_size == size and plan.sync != "async"
        self._work = PipelineWork.of(plan, self._model, self._seq_len) if is_one else None

    def _take_in(self, times: StepTimes, at_s: float) -> None:
        assert self._work is not None
        self._seen += 1
        microbatches = int(times.microbatches.max())
        if microbatches != self._microbatches:  # another batch, or other shares
            self._window.clear()
            self._microbatches = microbatches
        if self._seen > SKIPPED:
            own_s = times.busy_s.reshape(self._work.plan.pp, -1).max(axis=1)
            self._window.append(_StageStep(times.step, at_s, own_s / microbatches))
        while len(self._window) > self._watched * self._steps and self._spans(1):
            self._window.popleft()

    def _spans(self, first: int) -> bool:
        return self._window[-1].at_s - self._window[first].at_s >= self._watched * self._seconds

    @property
    def _is_full(self) -> bool:
        return len(self._window) >= self._watched * self._steps and self._spans(0)

    def _finding(self, work: PipelineWork) -> Finding | None:
        each = np.array([step.stage_s for step in self._window])
        stage_s = np.median(each, axis=0)
        if not stage_s.min() > 0:
            return None
        dealt = work.dealt_by_speed(stage_s)
        if dealt is None:
            return None
        saved = float(self._saves(work, dealt, stage_s))
        if saved < LEAST_SAVED or np.mean(self._saves(work, dealt, each) >= LEAST_SAVED) < MOST_STEPS:
            return None
        of_layer = stage_s / work.units
        slowest = int(of_layer.argmax())
        factor = float(of_layer.max() / of_layer.min())
        evidence = {
            "factor": round(factor, 2),
            "stage_s": [round(float(seconds), 6) for seconds in stage_s],
            "microbatches": self._microbatches,
            "layers": ":".join(f"{n:.0f}" for n in work.layers),
            "steps": len(each),
            "last_step": self._window[-1].number,
        }
        why = (
            f"pipeline rank {slowest} takes {factor:.1f} times as long for a layer as the fastest: layers "
            f"{dealt.plan.layers} in place of {evidence['layers']} save {saved:.0%} of the "
            "pipeline's time"
        )
        return Finding("uneven_stages", "alarm", why, (), evidence)

    def _saves(self, now: PipelineWork, dealt: PipelineWork, stage_s: Times) -> Any:
        now_s = now.takes_s(stage_s, now, self._microbatches)
        return 1 - dealt.takes_s(stage_s, now, self._microbatches) / np.maximum(now_s, 1e-9)
