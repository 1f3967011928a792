"""All ranks of an epoch as their agents show them, and what the detectors find in that."""

from __future__ import annotations

from typing import Any

from argosy.config.schema import ResilienceConfig
from argosy.observe.vitals import VitalsReading
from argosy.resilience.detect.finding import Finding, Sample, WorkerSeen
from argosy.resilience.detect.hang import Hang
from argosy.resilience.detect.straggler import Straggler


class RunWatch:
    """Watches the ranks of one epoch after the other."""

    def __init__(self, settings: ResilienceConfig):
        self._hang = Hang(settings.hang_s, settings.beat_timeout_s, settings.first_step_s)
        self._straggler = Straggler(settings.straggler_factor, settings.straggler_steps, settings.straggler_s)
        self._epoch = 0
        self._nodes: dict[str, dict[int, WorkerSeen]] = {}

    def shown(self, epoch: int, node: str, workers: list[dict[str, Any]]) -> int:
        """Take in what the agent of `node` shows of all its workers; what is not of `epoch` counts for nothing.

        Returns the furthest step that any of them is in, -1 if none is in a step.
        """
        if epoch != self._epoch:
            self._epoch, self._nodes = epoch, {}
        seen: dict[int, WorkerSeen] = {}
        self._nodes[node] = seen  # those that it no longer shows have ended
        step = -1
        for worker in workers:
            reading = VitalsReading.from_record(worker["reading"])
            if reading.epoch == epoch:
                seen[reading.rank] = WorkerSeen(reading, worker["state"])
                step = max(step, reading.step)
        return step

    def findings(self, at_s: float, size: int) -> list[Finding]:
        """What is wrong at `at_s` (CLOCK_MONOTONIC of this process) with a world of `size`, once all are seen."""
        sample = Sample(at_s, {rank: worker for seen in self._nodes.values() for rank, worker in seen.items()})
        if len(sample.workers) < size:
            return []
        return [*self._hang.observe(sample), *self._straggler.observe(sample)]
