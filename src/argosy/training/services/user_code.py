"""Callbacks and metrics of the user's, called at the named points of a step such that none can break the run unnoticed.

What raises is switched off, with a message and an event, unless it asked to be `strict`. Random numbers that it drew
are put back. Weights or gradients that it wrote to end the run: no checkpoint or replay would know of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.accelerator import random_state, set_random_state
from argosy.config.schema import RunConfig
from argosy.errors import RunFailed, some_of
from argosy.extend import Point
from argosy.extend.declared import Declaration
from argosy.extend.loading import Extension, load_code, where
from argosy.observe.clock import StepClock
from argosy.parallel.world import World
from argosy.training.evaluation import Score
from argosy.training.parts import Parts
from argosy.training.records import Records
from argosy.training.services.service import Service
from argosy.training.state import TrainState
from argosy.training.step import StepOutcome


class UserCode(Service):
    """One process's part of the user's code. Without any, each method returns at once."""

    @classmethod
    def of(cls, parts: Parts) -> UserCode:
        return cls(parts.run, parts.state, parts.world, parts.clock, parts.records, parts.run_dir)

    def __init__(
        self, run: RunConfig, state: TrainState, world: World, clock: StepClock, records: Records, run_dir: Path
    ):
        """Import the user's files. Raises: UserError if one cannot be imported."""
        extensions = load_code(run.extend.code)
        self._now = StepView(run.train.steps or None)
        self._run = UserView(run.name, run_dir, world, state, self._now)
        self._records, self._clock, self._guard = records, clock, SideEffectGuard(state, world.device)
        self._callbacks = [e for e in extensions if e.declared.kind == "callback"]
        self._metrics: list[Extension | None] = [e for e in extensions if e.declared.kind == "metric"]
        """None in place of one that is switched off here; all ranks have as many."""
        self._reductions = [(e.declared.name, e.declared.facts["reduce"]) for e in self._metrics if e]
        self._means: dict[str, float] = {}
        """The metrics of the step at hand, over all ranks."""
        self._told: set[str] = set()

    def start(self, step: int) -> None:
        self._now.step = step
        self._at("start")

    def before_step(self, step: int, steps: int | None) -> None:
        self._now.begin(step, steps)
        self._at("before_step")

    def after_backward(self) -> None:
        self._at("after_backward")

    def measure(self) -> Sequence[float]:
        """Return this rank's metrics, for a sum over ranks: two numbers each, its value and how many that is of."""
        if not self._metrics:
            return ()
        sums: list[float] = []
        with self._clock.time("user"):
            self._now.has_gradients = True
            for place, metric in enumerate(self._metrics):
                try:
                    value = math.nan if metric is None else self._value_of(metric)
                except _Off:
                    self._metrics[place], value = None, math.nan
                sums += [value, 1.0] if math.isfinite(value) else [0.0, 0.0]
            self._now.has_gradients = False
        return sums

    def after_exchange(self, outcome: StepOutcome, sums: Sequence[float]) -> None:
        """Log the metrics over all ranks, and call the callbacks that see the outcome. Raises: RunFailed."""
        self._now.loss, self._now.grad_norm = outcome.loss, outcome.gradient_norm
        self._means = {}  # not those of a step that did not count
        for (name, reduce), total, count in zip(self._reductions, sums[::2], sums[1::2], strict=True):
            if count and math.isfinite(total):
                self._means[name] = total / count if reduce == "mean" else total
        self._now.has_gradients = True
        self._at("after_exchange")
        self._now.has_gradients = False

    def after_step(self, step: int, learning_rate: float) -> None:
        self._now.lr = learning_rate
        self._at("after_step")

    def evaluated(self, score: Score) -> None:
        self._now.validation_loss = score.loss
        self._at("evaluate")

    def line(self, step: int) -> Mapping[str, Any]:
        """Return the metrics, and what this rank logged since the last call."""
        logged, self._means = self._means | self._run.take_logged(), {}
        return {"user": logged} if logged else {}

    def saved(self) -> None:
        self._at("save")

    def finish(self) -> Mapping[str, Any]:
        self._at("end")
        return self.line(self._now.step)

    def _at(self, point: Point) -> None:
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
                    f"{place}: the {declared} raised {why}, at step {self._now.step}. It is strict, so the run ends; "
                    "mend it, and go on with --accept-changes."
                ) from error
            self._records.switched_off(str(declared), place, why, self._now.step)
            raise _Off from None
        finally:
            self._check(declared)
        return result

    def _check(self, declared: Declaration) -> None:
        if changed := self._guard.put_back():
            self._tell_once(declared, f"changed {changed}, which were put back")
        if tensors := self._guard.changed_tensors():
            raise RunFailed(
                f"{declared.place}: the {declared} changed the weights or gradients of {some_of(tensors, 1)} at step "
                f"{self._now.step}: callbacks and metrics may only read them, or no replay would repeat the run. "
                "Update weights in an optimizer of your own."
            )

    def _tell_once(self, declared: Declaration, what: str) -> None:
        if (said := f"the {declared} {what}") not in self._told:
            self._told.add(said)
            self._records.user_code(str(declared), declared.place, what, self._now.step)


class _Off(Exception):
    """The extension failed, and is switched off."""


MOST_LOGGED = 1000
"""Most names that may be logged in one step: more are a mistake, and whatever shows the run keeps each in memory."""


@dataclass
class StepView:
    """The numbers of a run and of its step at hand, as the trainer knows them; NaN where they are not known yet."""

    steps: int | None
    step: int = 0
    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = math.nan
    validation_loss: float = math.nan
    has_gradients: bool = False
    """Every piece has its whole gradient, not clipped."""

    def begin(self, step: int, steps: int | None) -> None:
        """Forget the numbers of the step before."""
        self.step, self.steps, self.loss, self.grad_norm, self.lr = step, steps, math.nan, math.nan, math.nan


class UserView:
    """`extend.Run`: what user code sees, to read. `extend.register` says what each attribute is."""

    def __init__(self, name: str, folder: Path, world: World, state: TrainState, now: StepView):
        self._name, self._folder, self._world, self._state, self._now = name, folder, world, state, now
        self._logged: dict[str, float] = {}

    name = property(lambda self: self._name)
    folder = property(lambda self: self._folder)
    rank = property(lambda self: self._world.rank)
    world_size = property(lambda self: self._world.size)
    step = property(lambda self: self._now.step)
    steps = property(lambda self: self._now.steps)
    tokens = property(lambda self: self._state.tokens)
    loss = property(lambda self: self._now.loss)
    grad_norm = property(lambda self: self._now.grad_norm)
    lr = property(lambda self: self._now.lr)
    validation_loss = property(lambda self: self._now.validation_loss)

    def weights(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the parameters, by name: live tensors, local shapes; without those that are
        quantised (`lora.base`)."""
        model = self._state.model
        pieces = (*model.pieces, *model.frozen)
        return {piece.name: piece.value.detach() for piece in pieces if piece.scheme is None}

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of `weights()` where they are whole and not clipped, else nothing."""
        if not self._now.has_gradients:
            return {}
        found = ((piece.name, piece.value.grad) for piece in self._state.model.pieces)
        return {name: gradient.detach() for name, gradient in found if gradient is not None}

    def log(self, /, **values: float) -> None:
        """Keep numbers for the line of the step. Raises: TypeError, ValueError."""
        for name, value in values.items():
            number = number_of(value, f"run.log({name}=...)")
            if math.isfinite(number):
                self._logged[name] = number
        if len(self._logged) > MOST_LOGGED:
            self._logged.clear()
            raise ValueError(f"run.log got more than {MOST_LOGGED} names in one step")

    def take_logged(self) -> dict[str, float]:
        """Return what was logged since the last call."""
        logged, self._logged = self._logged, {}
        return logged


def number_of(value: Any, what: str) -> float:
    """Return `value` as a number; a tensor must have one element. Raises: TypeError that names `what`."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float) and not hasattr(value, "__float__"):
        raise TypeError(f"{what} takes a number, not {value!r:.60}")
    return float(value)


class SideEffectGuard:
    """Notices what user code may not change: random generators and settings of torch, weights and gradients.

    Settings and generators are put back. Tensors are told apart by their version counters, which count what is written
    in place; what goes past them (`tensor.data`) is left to the comparison of replicas.
    """

    def __init__(self, state: TrainState, device: torch.device):
        self._state, self._device = state, device

    def __enter__(self) -> None:
        self._before = self._generators(), self._settings(), self._versions()

    def __exit__(self, *_: object) -> None:
        pass

    def put_back(self) -> str:
        """Put back what can be; return what the user code changed, in words, or the empty string."""
        generators, settings, _ = self._before
        changed = []
        if not all(map(torch.equal, generators, self._generators())):
            torch.set_rng_state(generators[0])
            if len(generators) > 1:
                set_random_state(generators[1], self._device)
            changed.append("torch's random numbers")
        if settings != self._settings():
            dtype, is_deterministic, has_grad, threads, precision = settings
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(is_deterministic)
            torch.set_grad_enabled(has_grad)
            torch.set_num_threads(threads)
            if precision:
                torch.set_float32_matmul_precision(precision)
            changed.append("settings of torch")
        return " and ".join(changed)

    def changed_tensors(self) -> list[str]:
        """Return the names of parameters whose weight or gradient was written to, or replaced."""
        before, now = self._before[2], self._versions()
        return [name for name, version in now.items() if before.get(name) != version]

    def _generators(self) -> list[Tensor]:
        of_device = random_state(self._device)
        return [torch.get_rng_state()] if of_device is None else [torch.get_rng_state(), of_device]

    def _settings(self) -> tuple[torch.dtype, bool, bool, int, str]:
        return (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            _matmul_precision(),
        )

    def _versions(self) -> dict[str, tuple[int, ...]]:
        versions = {}
        model = self._state.model
        for piece in (*model.pieces, *model.masters, *model.frozen):
            value, gradient = piece.value, piece.value.grad
            of_gradient = (id(gradient), gradient._version) if gradient is not None else ()
            key = piece.name if piece.name not in versions else f"{piece.name} (its copy)"
            versions[key] = (value.data_ptr(), value._version, *of_gradient)
        return versions


def _matmul_precision() -> str:
    """Return how fp32 matrices are multiplied; empty where backends were set apart, of which torch gives no name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""
