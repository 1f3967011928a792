"""A run's folder, read while the run writes to it, after it, or as a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from argosy.observe.events import Tail
from argosy.watch.columns import STEP, Columns
from argosy.watch.metrics_table import MetricsTable
from argosy.watch.nodes import MOST_RECORDS, Record
from argosy.watch.run_files import RECENT_STEPS, Part, RunFiles, is_run

MOST_SAMPLES = 1000

__all__ = ["RunReader", "is_run"]


class RunReader(RunFiles):
    """All that a run's folder tells. `refresh` reads what was added; between two calls nothing changes.

    Nothing is ever written to the folder. Not for several threads at once.
    """

    def __init__(self, folder: Path):
        """Raises: UserError if `folder` does not hold a run. Nothing is read before `refresh`."""
        super().__init__(folder)
        self._metrics = MetricsTable(folder / "metrics.jsonl")
        self._samples = Tail(folder / "samples.jsonl")
        self.samples: list[Record] = []
        """Lines of samples.jsonl: step, time_s, prompt, text."""

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
    def nbytes(self) -> int:
        """Bytes that the numbers take."""
        return self.steps.nbytes + self.evaluations.nbytes + self.norms.nbytes

    @property
    def problems(self) -> list[str]:
        """What could not be read, or is not shown, in sentences."""
        found = []
        if self._metrics.is_missing:
            found.append("metrics.jsonl is not there: it is being rotated, or the run has made no step yet")
        if self._metrics.bad_lines:
            found.append(f"metrics.jsonl: {self._metrics.bad_lines} lines are no records and were passed over")
        if left_out := self.steps.left_out:
            found.append(f"metrics.jsonl: {len(left_out)} keys found no room, e.g. {min(left_out)}")
        return found + super().problems

    def keys(self) -> list[str]:
        """Return the keys of numbers by step that are known, whether they are in memory or not."""
        return [*self._metrics.keys(), *(f"norms.{key}" for key in self.norms if key != STEP)]

    def _parts(self) -> dict[str, Part]:
        return {"metrics.jsonl": self._read_metrics, "samples.jsonl": self._read_samples, **super()._parts()}

    def _read_metrics(self) -> bool:
        changed = self._metrics.refresh()
        self.last_line = self._metrics.last_line
        if len(self.evaluations):
            self.last_evaluation = {key: float(self.evaluations[key][-1]) for key in self.evaluations}
        return changed

    def _read_samples(self) -> bool:
        new = [record for record in self._samples.read() if isinstance(record.get("text"), str)]
        self.samples = [*self.samples, *new][-MOST_SAMPLES:]
        return bool(new)

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
        window = times[at + 1 :][:1] if later else times[at:][:1]
        if not len(window) or not np.isfinite(window[0]):
            return None
        # A node's line is about the steps of some seconds, and comes after them.
        slack_s = 2 * max(self.run.observe.ranks_every_s if self.run else 0.0, 5.0)
        return float(window[0]) + (slack_s if later else -slack_s)


def _overlaps(steps: Any, first: float, last: float) -> bool:
    """Return True if a line is about one of these steps; one that does not say about which is."""
    if not isinstance(steps, list) or len(steps) != 2:
        return True
    return bool(steps[0] <= last and steps[1] >= first)
