"""What a sweep has found, as a table, as JSON, as a plot, and as the run file of the best trial."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.config.dump import save_run
from argosy.files import atomic_write
from argosy.sweep.folder import trial_folder
from argosy.sweep.load import Sweep
from argosy.sweep.plot import plot
from argosy.sweep.space import short
from argosy.sweep.study import Study, Trial
from argosy.sweep.trial import steps_of

PLOT, BEST = "trials.svg", "best.toml"
STATES = {"done": "done", "stopped": "not promoted", "failed": "failed", "open": "not done"}
MOST_REASON = 200


@dataclass(frozen=True)
class Result:
    """The trials of a sweep, and the best of them."""

    sweep: Sweep
    folder: Path
    trials: list[Trial]
    """By number."""
    steps: list[int]
    """That each has made."""
    importance: dict[str, float]
    """Share of each parameter in what makes a trial good; empty if the trials are too few to tell."""

    @classmethod
    def of(cls, sweep: Sweep, folder: Path, study: Study) -> Result:
        """Return what the journal and the trials' folders say now."""
        trials = study.trials()
        steps = [steps_of(trial_folder(folder, t.number if t.same_as is None else t.same_as)) for t in trials]
        return cls(sweep, folder, trials, steps, study.importance())

    @property
    def best(self) -> Trial | None:
        """The trial with the best metric of those that have come to their end; the first of several."""
        return next(iter(self._ordered(lambda trial: trial.state == "done")), None)

    def write(self) -> None:
        """Write the plot, and the run file of the best trial, to the sweep's folder."""
        with atomic_write(self.folder / PLOT) as file:
            file.write(plot(self.sweep, self.trials, self.best).encode())
        if self.best is not None:
            name = f"{self.sweep.config.name}-best"
            save_run(self.sweep.run_of(self.best.values, name=name), self.folder / BEST)

    def json(self) -> str:
        """Return all of it as one JSON object."""
        best = self.best
        return json.dumps(
            {
                "name": self.sweep.config.name,
                "folder": str(self.folder),
                "method": self.sweep.config.method,
                "metric": self.sweep.config.metric,
                "direction": self.sweep.config.direction,
                "best": None if best is None else best.number,
                "importance": self.importance,
                "trials": [self._row(trial, steps) for trial, steps in zip(self.trials, self.steps, strict=True)],
            },
            indent=1,
        )

    def in_words(self) -> str:
        """Return the table, best trial first, and what is to be said beside it."""
        config = self.sweep.config
        head = f"sweep {config.name}: {config.method}, {config.direction} {config.metric}, {self._counts()}"
        order = [
            *self._ordered(lambda trial: trial.state == "done"),
            *self._ordered(lambda trial: trial.state == "stopped"),
            *(trial for trial in self.trials if trial.state in ("open", "failed")),
        ]
        keys = [parameter.key for parameter in self.sweep.parameters]
        rows = [["trial", config.metric, "step", *map(self._name, keys), ""]]
        for trial in order:
            metric = "" if trial.metric is None or trial.state == "failed" else f"{trial.metric:.6g}"
            values = [short(trial.values[key]) for key in keys]
            rows.append([f"{trial.number:04d}", metric, str(self.steps[trial.number]), *values, self._remark(trial)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False))
            + f"  {row[-1]}".rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines, *self._importance_in_words()])

    def _counts(self) -> str:
        counts = {state: sum(trial.state == state for trial in self.trials) for state in STATES}
        return ", ".join(f"{count} {STATES[state]}" for state, count in counts.items() if count) or "no trials yet"

    def _importance_in_words(self) -> list[str]:
        if not self.importance:
            return []
        shares = sorted(self.importance.items(), key=lambda item: -item[1])
        return ["importance: " + ", ".join(f"{self._name(key)} {share:.0%}" for key, share in shares)]

    def _remark(self, trial: Trial) -> str:
        if self.best is not None and trial.number == self.best.number:
            return "best"
        same = "" if trial.same_as is None else f"as {trial.same_as:04d}"
        if trial.state == "failed":
            return f"failed: {trial.reason[:MOST_REASON]}".replace("\n", " ")
        return same if trial.state == "done" else STATES[trial.state]

    def _name(self, key: str) -> str:
        """Return the last name of a key, or all of it if another one ends so too."""
        last = key.rpartition(".")[2]
        return last if sum(p.key.rpartition(".")[2] == last for p in self.sweep.parameters) == 1 else key

    def _ordered(self, which: Callable[[Trial], bool]) -> list[Trial]:
        sign = 1 if self.sweep.config.direction == "minimize" else -1
        found = [(trial.metric, trial) for trial in self.trials if which(trial) and trial.metric is not None]
        return [trial for _, trial in sorted(found, key=lambda pair: (sign * pair[0], pair[1].number))]

    def _row(self, trial: Trial, steps: int) -> dict[str, Any]:
        return {
            "trial": trial.number,
            "run_dir": str(trial_folder(self.folder, trial.number if trial.same_as is None else trial.same_as)),
            "state": trial.state,
            "values": dict(trial.values),
            "metric": trial.metric,
            "steps": steps,
            "rungs": {str(at): value for at, value in trial.rungs.items()},
            "reason": trial.reason,
            "same_as": trial.same_as,
        }
