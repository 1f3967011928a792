"""The result of a sweep: a table, JSON, a plot, and the run file of the best trial.

The plot is an SVG with a panel for the trials in their order, and one for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from argosy.config.dump import save_run
from argosy.files import atomic_write
from argosy.sweep.load import Sweep, SweepParameter, short
from argosy.sweep.study import Study, Trial, trial_folder
from argosy.sweep.trials import steps_of

PLOT, BEST = "trials.svg", "best.toml"
TRIAL_STATES = {"done": "done", "stopped": "not promoted", "failed": "failed", "open": "not done"}
MOST_REASON = 200


@dataclass(frozen=True)
class Result:
    """The trials of a sweep, and the best of them."""

    sweep: Sweep
    folder: Path
    trials: list[Trial]
    """By number."""
    steps: list[int]
    """Steps that each trial has made."""
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

    def record(self) -> SweepRecord:
        """Return what a program reads."""
        best, config = self.best, self.sweep.config
        return SweepRecord(
            name=config.name,
            folder=self.folder,
            method=config.method,
            metric=config.metric,
            direction=config.direction,
            best=None if best is None else best.number,
            importance=self.importance,
            trials=[self._row(trial, steps) for trial, steps in zip(self.trials, self.steps, strict=True)],
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
        counts = {state: sum(trial.state == state for trial in self.trials) for state in TRIAL_STATES}
        return (
            ", ".join(f"{count} {TRIAL_STATES[state]}" for state, count in counts.items() if count) or "no trials yet"
        )

    def _importance_in_words(self) -> list[str]:
        if not self.importance:
            return []
        shares = sorted(self.importance.items(), key=lambda item: -item[1])
        return ["importance: " + ", ".join(f"{self._name(key)} {share:.0%}" for key, share in shares)]

    def _remark(self, trial: Trial) -> str:
        if trial == self.best:
            return "best"
        same = "" if trial.same_as is None else f"as {trial.same_as:04d}"
        if trial.state == "failed":
            return f"failed: {trial.reason[:MOST_REASON]}".replace("\n", " ")
        return same if trial.state == "done" else TRIAL_STATES[trial.state]

    def _name(self, key: str) -> str:
        """Return the last name of a key, or all of it if another one ends so too."""
        last = key.rpartition(".")[2]
        return last if sum(p.key.rpartition(".")[2] == last for p in self.sweep.parameters) == 1 else key

    def _ordered(self, which: Callable[[Trial], bool]) -> list[Trial]:
        sign = 1 if self.sweep.config.direction == "minimize" else -1
        found = [(trial.metric, trial) for trial in self.trials if which(trial) and trial.metric is not None]
        return [trial for _, trial in sorted(found, key=lambda pair: (sign * pair[0], pair[1].number))]

    def _row(self, trial: Trial, steps: int) -> TrialRecord:
        return TrialRecord(
            trial=trial.number,
            run_dir=trial_folder(self.folder, trial.number if trial.same_as is None else trial.same_as),
            state=trial.state,
            values=dict(trial.values),
            metric=trial.metric,
            steps=steps,
            rungs={str(at): value for at, value in trial.rungs.items()},
            reason=trial.reason,
            same_as=trial.same_as,
        )


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A trial, as a program reads it."""

    trial: int
    run_dir: Path
    state: str
    """open (it trains, is to train, or waits at a rung), done, stopped (not promoted) or failed."""
    values: dict[str, Any]
    """Values by key of the run."""
    metric: float | None
    """The metric at its last rung, or at its end."""
    steps: int
    """Steps that it has made."""
    rungs: dict[str, float]
    """Steps -> metric, where it was judged."""
    reason: str
    """Why it failed."""
    same_as: int | None
    """The trial with the same values, whose result it has."""


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """A sweep, as a program reads it."""

    name: str
    folder: Path
    method: str
    metric: str
    direction: str
    """minimize or maximize."""
    best: int | None
    """The trial with the best metric of those that have come to their end."""
    importance: dict[str, float]
    """Share of each parameter in what makes a trial good; empty if the trials are too few to tell."""
    trials: list[TrialRecord]
    """By number."""


PANEL_WIDTH, PANEL_HEIGHT, PANEL_MARGIN, PANEL_GAP = 300, 220, 56, 18
PANEL_COLUMNS = 3
DOT = 4
TRIAL_COLOURS = {"done": "#2563eb", "stopped": "#94a3b8", "best": "#ea580c"}
PADDING = 0.05
"""Share of an axis that is left free at each end."""
MOST_TICKS = 6
WIDE_RATIO = 20
"""Numbers of a list that are so far apart stand on a logarithmic axis."""


@dataclass(frozen=True)
class Axis:
    """An axis of a panel: positions from 0 to 1, and what is written at some of them."""

    low: float
    high: float
    is_log: bool = False
    values: tuple[float, ...] = ()
    """Values that are written; empty: both ends and the middle."""
    names: tuple[str, ...] = ()
    """Names of values that are no numbers, in order; they stand at 0, 1, 2, ..."""

    def place(self, value: float) -> float:
        """Return where a value stands, 0 to 1."""
        low, high, at = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        return PADDING + (1 - 2 * PADDING) * (at - low) / (high - low) if high > low else 0.5

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """(place, text) of what is written."""
        if self.names:
            return [(self.place(at), name) for at, name in enumerate(self.names)]
        if self.values:
            return [(self.place(value), f"{value:.3g}") for value in self.values]
        middle = math.sqrt(self.low * self.high) if self.is_log else (self.low + self.high) / 2
        return [(self.place(v), f"{v:.3g}") for v in dict.fromkeys((self.low, middle, self.high))]


def plot(sweep: Sweep, trials: Sequence[Trial], best: Trial | None) -> str:
    """Return the SVG. Trials that failed, or have no metric yet, are left out."""
    shown = [trial for trial in trials if trial.metric is not None and trial.state in ("done", "stopped")]
    metric = sweep.config.metric
    y = _axis([trial.metric for trial in shown if trial.metric is not None])
    panels = [_panel("trial", metric, _axis([float(t.number) for t in trials]), y,
                     [(float(t.number), t) for t in shown], best)]  # fmt: skip
    for parameter in sweep.parameters:
        x = _axis_of(parameter)
        panels.append(_panel(parameter.key, metric, x, y, [(_x(parameter, x, t), t) for t in shown], best))
    columns = min(PANEL_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    across, down = PANEL_WIDTH + PANEL_MARGIN + PANEL_GAP, PANEL_HEIGHT + PANEL_MARGIN + PANEL_GAP
    width, height = columns * across, rows * down + 24
    placed = [
        f'<g transform="translate({at % columns * across + PANEL_MARGIN},{at // columns * down + 36})">{panel}</g>'
        for at, panel in enumerate(panels)
    ]
    title = escape(f"sweep {sweep.config.name}: {sweep.config.direction} {metric}")
    if any(trial.state == "stopped" for trial in shown):
        title += " (grey: not promoted, at its last rung)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="20" font-size="14">{title}</text>{"".join(placed)}</svg>\n'
    )


def _panel(name: str, metric: str, x: Axis, y: Axis, points: Sequence[tuple[float, Trial]], best: Trial | None) -> str:
    parts = [f'<rect width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#cbd5e1"/>']
    for at, text in x.ticks:
        parts.append(
            f'<text x="{at * PANEL_WIDTH:.1f}" y="{PANEL_HEIGHT + 14}" text-anchor="middle" '
            f'fill="#475569">{escape(text)}</text>'
        )
    for at, text in y.ticks:
        down = (1 - at) * PANEL_HEIGHT
        parts.append(f'<text x="-5" y="{down + 4:.1f}" text-anchor="end" fill="#475569">{escape(text)}</text>')
    parts.append(f'<text x="{PANEL_WIDTH / 2}" y="{PANEL_HEIGHT + 30}" text-anchor="middle">{escape(name)}</text>')
    for value, trial in sorted(points, key=lambda point: point[1] == best):
        assert trial.metric is not None
        colour = TRIAL_COLOURS["best" if trial == best else trial.state]
        about = escape(f"trial {trial.number:04d}: {metric} {trial.metric:.6g}, {name} {short(value)}")
        parts.append(
            f'<circle cx="{x.place(value) * PANEL_WIDTH:.1f}" cy="{(1 - y.place(trial.metric)) * PANEL_HEIGHT:.1f}" '
            f'r="{DOT + 2 * (trial == best)}" fill="{colour}" fill-opacity="0.8"><title>{about}</title></circle>'
        )
    return "".join(parts)


def _axis(values: Sequence[float]) -> Axis:
    return Axis(min(values), max(values)) if values else Axis(0.0, 1.0)


def _axis_of(parameter: SweepParameter) -> Axis:
    if not parameter.is_list:
        return Axis(parameter.low, parameter.high, parameter.log)
    numbers = _numbers(parameter)
    if not numbers:
        return Axis(0.0, max(1.0, len(parameter.values) - 1.0), names=tuple(short(v) for v in parameter.values))
    low, high = min(numbers), max(numbers)
    written = tuple(sorted(numbers)) if len(numbers) <= MOST_TICKS else ()
    return Axis(low, high, low > 0 and high / low >= WIDE_RATIO, written)


def _numbers(parameter: SweepParameter) -> list[float]:
    """Return the values of a list if all are numbers; else none."""
    found = [float(v) for v in parameter.values if isinstance(v, int | float) and not isinstance(v, bool)]
    return found if len(found) == len(parameter.values) else []


def _x(parameter: SweepParameter, axis: Axis, trial: Trial) -> float:
    value = trial.values[parameter.key]
    return float(parameter.values.index(value)) if axis.names else float(value)
