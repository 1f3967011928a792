"""What code of the user's sees of the run on this rank: `extend.Run`, filled in by the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.parallel.world import World
from argosy.training.state import TrainState

MOST_VALUES = 1000
"""Most names that may be logged in one step: more are a mistake, and whatever shows the run keeps each in memory."""


@dataclass
class Now:
    """The numbers of a run and of its step at hand, as the trainer knows them; NaN where they are not known yet."""

    steps: int | None
    step: int = 0
    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = math.nan
    validation_loss: float = math.nan
    has_gradients: bool = False
    """Every piece has its whole gradient, not clipped."""

    def begin(self, step: int) -> None:
        """Forget the numbers of the step before."""
        self.step, self.loss, self.grad_norm, self.lr = step, math.nan, math.nan, math.nan


class RunView:
    """`extend.Run`: what user code sees, to read. `extend.views` says what each attribute is."""

    def __init__(self, name: str, folder: Path, world: World, state: TrainState, now: Now):
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
        """Return this rank's parts of the parameters, by name: live tensors, local shapes."""
        return {piece.name: piece.value.detach() for piece in self._state.model.pieces}

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of `weights()` where they are whole and not clipped, else nothing."""
        if not self._now.has_gradients:
            return {}
        found = ((piece.name, piece.value.grad) for piece in self._state.model.pieces)
        return {name: gradient.detach() for name, gradient in found if gradient is not None}

    def log(self, **values: float) -> None:
        """Keep numbers for the line of the step. Raises: TypeError, ValueError."""
        for name, value in values.items():
            number = number_of(value, f"run.log({name}=...)")
            if math.isfinite(number):
                self._logged[name] = number
        if len(self._logged) > MOST_VALUES:
            self._logged.clear()
            raise ValueError(f"run.log got more than {MOST_VALUES} names in one step")

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


class Guard:
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
                torch.cuda.set_rng_state(generators[1], self._device)
            changed.append("torch's random numbers")
        if settings != self._settings():
            dtype, is_deterministic, has_grad, threads = settings
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(is_deterministic)
            torch.set_grad_enabled(has_grad)
            torch.set_num_threads(threads)
            changed.append("settings of torch")
        return " and ".join(changed)

    def changed_tensors(self) -> list[str]:
        """Return the names of parameters whose weight or gradient was written to, or replaced."""
        before, now = self._before[2], self._versions()
        return [name for name, version in now.items() if before.get(name) != version]

    def _generators(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states

    def _settings(self) -> tuple[torch.dtype, bool, bool, int]:
        return (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
        )

    def _versions(self) -> dict[str, tuple[int, ...]]:
        versions = {}
        model = self._state.model
        for piece in (*model.pieces, *model.masters):
            value, gradient = piece.value, piece.value.grad
            of_gradient = (id(gradient), gradient._version) if gradient is not None else ()
            key = piece.name if piece.name not in versions else f"{piece.name} (its copy)"
            versions[key] = (value.data_ptr(), value._version, *of_gradient)
        return versions
