"""How good the forecast of a run's end is: at shares of finished runs, the end is forecast from what was known then.

    python benchmarks/forecast.py RUNS/FOLDER ...        # folders of finished runs

For each run and share it prints the forecast of the seconds left, the truth, and whether the interval of 90 % held it.
The truth is the time from the line of the last step that was known to the line of the last step of all. Beside that it
fits a power law to the loss up to then and compares what that says with the loss at the end.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from argosy.watch.columns import Floats
from argosy.watch.conclusions import facts_of
from argosy.watch.facts import RunFacts, Table
from argosy.watch.forecast import forecast
from argosy.watch.reader import RunReader
from argosy.watch.steps import ends

SHARES = (0.3, 0.6)
BINS = 40


@dataclass(frozen=True)
class Tried:
    """One forecast, and what came."""

    run: str
    share: float
    low: float
    mid: float
    high: float
    true: float
    loss: tuple[float, float, float, float] | None
    """Final loss by a power law: low, middle, high, truth; None if there are too few steps."""

    @property
    def held(self) -> bool:
        """True if the truth was in the interval."""
        return self.low <= self.true <= self.high


def main() -> None:
    """Print a line for each run and share, and how often the intervals held."""
    tried = [one for folder in map(Path, sys.argv[1:]) for one in backtest(folder)]
    print(f"{'run':28}{'at':>6}{'forecast s':>12}{'interval':>20}{'truth':>9}  held")
    for one in tried:
        interval, held = f"{one.low:.1f} to {one.high:.1f}", "yes" if one.held else "NO"
        print(f"{one.run:28}{one.share:>6.0%}{one.mid:>12.1f}{interval:>20}{one.true:>9.1f}  {held}")
    for share in SHARES:
        of = [one for one in tried if one.share == share]
        errors = [abs(np.log(one.true / one.mid)) for one in of]
        width = np.median([one.high / one.low for one in of])
        error, right = np.expm1(np.median(errors)), sum(one.held for one in of)
        print(f"at {share:.0%}: {right} of {len(of)} held; median error {error:.1%}, median high / low {width:.2f}")
        losses = [one.loss for one in of if one.loss is not None]
        right = sum(low <= true <= high for low, _, high, true in losses)
        print(f"  power law of the loss: {right} of {len(losses)} held")


def backtest(folder: Path) -> list[Tried]:
    """Return the forecasts of a finished run."""
    reader = RunReader.read(folder)
    whole = with_times(facts_of(reader))
    return [tried for share in SHARES if (tried := _try(whole, share, folder.name)) is not None]


def with_times(facts: RunFacts) -> RunFacts:
    """Return the facts with times of lines: runs of older versions have none, but their starts and steps tell."""
    times = facts.column("time_s")
    if np.isfinite(times).all():
        return facts
    steps, took = facts.column("step"), facts.column("seconds.step")
    times = np.empty(len(steps))
    for start in facts.starts:
        first = int(np.searchsorted(steps, int(start["step"])))
        times[first:] = float(start["time_s"]) + np.cumsum(took[first:])
    return replace(facts, steps={**{key: facts.steps[key] for key in list(facts.steps.keys())}, "time_s": times})


def known_at(whole: RunFacts, count: int) -> RunFacts:
    """Return what was known when the line of the `count`-th step was written."""
    now_s = float(whole.column("time_s")[count - 1])
    last_step = float(whole.column("step")[count - 1])
    steps: Table = {key: whole.steps[key][:count] for key in list(whole.steps.keys())}
    ended = whole.evaluated("step") <= last_step
    evaluations: Table = {key: whole.evaluated(key)[ended] for key in list(whole.evaluations.keys())}
    events = [event for event in whole.events if float(event["time_s"]) <= now_s and event["event"] != "end"]
    # All that a resumed run's folder tells of its present.
    return RunFacts(
        now_s=now_s, state="training", run=whole.run, plan=whole.plan, prediction=whole.prediction, steps=steps,
        evaluations=evaluations, events=events, folder=whole.folder,
    )  # fmt: skip


def _try(whole: RunFacts, share: float, name: str) -> Tried | None:
    count = int(share * len(whole))
    said = forecast(known_at(whole, count)) if count else None
    if said is None:
        return None
    times = whole.column("time_s")
    low, mid, high = ends(said.left_s)
    return Tried(name, share, low, mid, high, float(times[-1] - times[count - 1]), _loss(whole, count))


def _loss(whole: RunFacts, count: int) -> tuple[float, float, float, float] | None:
    """Fit E + A t^-a to the last two thirds of the loss so far, in bins; the interval is from bootstraps."""
    loss, step = whole.column("loss"), whole.column("step") + 1
    part = slice(count // 3, count)
    if part.stop - part.start < 4 * BINS:
        return None
    x = np.array([some.mean() for some in np.array_split(step[part], BINS)])
    y = np.array([np.nanmean(some) for some in np.array_split(loss[part], BINS)])
    end = float(np.nanmean(loss[-max(20, len(loss) // 50) :]))
    random = np.random.default_rng(0)
    draws = []
    for _ in range(200):
        rows = random.integers(0, BINS, BINS)
        draws.append(_power_law(x[rows], y[rows], float(step[-1])))
    low, high = np.quantile(draws, [0.05, 0.95])
    return float(low), _power_law(x, y, float(step[-1])), float(high), end


def _power_law(x: Floats, y: Floats, at: float) -> float:
    """Return the value at a later step of the least-squares fit, the exponent from a grid."""
    best = (np.inf, 0.0)
    for exponent in np.linspace(0.05, 1.5, 30):
        design = np.column_stack([np.ones_like(x), x**-exponent])
        found, *_ = np.linalg.lstsq(design, y, rcond=None)
        error = float(((design @ found - y) ** 2).sum())
        best = min(best, (error, float(found[0] + found[1] * at**-exponent)))
    return best[1]


if __name__ == "__main__":
    main()
