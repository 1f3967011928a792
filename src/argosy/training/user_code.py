"""Callbacks and metrics of the user's, called at the named points of a step such that none can break the run unnoticed.

What raises is switched off, with a message and an event, unless it asked to be `strict`. Random numbers that it drew
are put back. Weights or gradients that it wrote to end the run: no checkpoint or replay would know of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.errors import RunFailed
from argosy.extend import Point
from argosy.extend.declared import Declaration
from argosy.extend.loading import Extension, load_code, where
from argosy.observe.clock import StepClock
from argosy.parallel.world import World
from argosy.training.records import Records
from argosy.training.run_view import Guard, Now, RunView, number_of
from argosy.training.state import TrainState
from argosy.training.step import StepOutcome


class UserCode:
    """One process's part of the user's code. Without any, each method returns at once."""

    def __init__(
        self, run: RunConfig, state: TrainState, world: World, clock: StepClock, records: Records, run_dir: Path
    ):
        """Import the user's files. Raises: UserError if one cannot be imported."""
        extensions = load_code(run.extend.code)
        self.now = Now(run.train.steps or None)
        self._run = RunView(run.name, run_dir, world, state, self.now)
        self._records, self._clock, self._guard = records, clock, Guard(state, world.device)
        self._callbacks = [e for e in extensions if e.declared.kind == "callback"]
        self._metrics: list[Extension | None] = [e for e in extensions if e.declared.kind == "metric"]
        """None in place of one that is switched off here; all ranks have as many."""
        self._reductions = [(e.declared.name, e.declared.facts["reduce"]) for e in self._metrics if e]
        self._told: set[str] = set()

    def at(self, point: Point) -> None:
        """Call the callbacks of `point`. Raises: RunFailed."""
        here = [callback for callback in self._callbacks if callback.declared.facts["point"] == point]
        if not here:
            return
        with self._clock.time("user"):
            for callback in here:
                try:
                    self._call(callback)
                except _Off:
                    self._callbacks.remove(callback)

    def measure(self) -> Sequence[float]:
        """Return this rank's metrics, for a sum over ranks: two numbers each, its value and how many that is of."""
        if not self._metrics:
            return ()
        sums: list[float] = []
        with self._clock.time("user"):
            self.now.has_gradients = True
            for place, metric in enumerate(self._metrics):
                try:
                    value = math.nan if metric is None else self._value_of(metric)
                except _Off:
                    self._metrics[place], value = None, math.nan
                sums += [value, 1.0] if math.isfinite(value) else [0.0, 0.0]
            self.now.has_gradients = False
        return sums

    def exchanged(self, outcome: StepOutcome) -> None:
        """Log the metrics over all ranks, and call the callbacks that see the outcome. Raises: RunFailed."""
        self.now.loss, self.now.grad_norm = outcome.loss, outcome.gradient_norm
        for (name, reduce), total, count in zip(
            self._reductions, outcome.measured[::2], outcome.measured[1::2], strict=True
        ):
            if count:
                self._run.log(**{name: total / count if reduce == "mean" else total})
        self.now.has_gradients = True
        self.at("after_exchange")
        self.now.has_gradients = False

    def take_logged(self) -> dict[str, float]:
        """Return what this rank logged since the last call."""
        return self._run.take_logged()

    def _value_of(self, metric: Extension) -> float:
        value = number_of(self._call(metric), f"the metric {metric.declared.name}")
        if not math.isfinite(value):
            self._tell_once(metric.declared, f"gave {value}, which is left out")
        return value

    def _call(self, extension: Extension) -> object:
        """Call it with the run. Raises: _Off if it failed and is not to be called again; RunFailed."""
        declared = extension.declared
        file = declared.place.rpartition(":")[0]
        try:
            with self._guard:
                result = extension.function(self._run)
                if declared.kind == "metric":
                    number_of(result, "a metric")
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}"
            place = where(error, file)
            if declared.facts["strict"]:
                raise RunFailed(
                    f"{place}: the {declared} raised {why}, at step {self.now.step}. It is strict, so the run ends; "
                    "mend it, and go on with --accept-changes."
                ) from error
            self._records.switched_off(str(declared), place, why, self.now.step)
            raise _Off from None
        finally:
            self._check(declared)
        return result

    def _check(self, declared: Declaration) -> None:
        if changed := self._guard.put_back():
            self._tell_once(declared, f"changed {changed}, which were put back")
        if tensors := self._guard.changed_tensors():
            raise RunFailed(
                f"{declared.place}: the {declared} changed the weights or gradients of {tensors[0]}"
                f"{f' and {len(tensors) - 1} more' if len(tensors) > 1 else ''} at step {self.now.step}: callbacks and "
                "metrics may only read them, or no replay would repeat the run. Update weights in an optimizer of your "
                "own."
            )

    def _tell_once(self, declared: Declaration, what: str) -> None:
        if (said := f"the {declared} {what}") not in self._told:
            self._told.add(said)
            self._records.user_code(str(declared), declared.place, what, self.now.step)


class _Off(Exception):
    """The extension failed, and is switched off."""
