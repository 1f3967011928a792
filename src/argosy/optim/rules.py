"""The rules that compute an element's step from that element alone: AdamW, Lion, and the user's own function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import ClassVar

import torch
from torch.optim.adamw import adamw

from argosy.config.optimizer import OptimizerConfig
from argosy.errors import RunFailed, UserError
from argosy.extend import Update
from argosy.extend.declared import CodeFile
from argosy.extend.loading import Extension, find, where
from argosy.optim.piece import Slot, opened


class UpdateRule(ABC):
    """The update rule of an optimizer: how one step changes weights and moments."""

    moments: tuple[str, ...]
    """Names of the tensors that it keeps for each parameter."""
    is_local: ClassVar[bool] = True
    """True if a step needs no other rank."""

    def __init__(self, config: OptimizerConfig):
        self.config = config

    def prepare(self, slots: Sequence[Slot]) -> None:  # noqa: B027  (most rules need nothing)
        """Compute all that the next step of `slots` needs of other ranks; weights and moments do not change."""

    @abstractmethod
    def step(self, slots: Sequence[Slot], lr: float, weight_decay: float) -> None:
        """Do one step of `slots`, which share these settings and are prepared. It needs no other rank."""


class AdamW(UpdateRule):
    """AdamW (Loshchilov & Hutter 2019), with torch's fused kernel."""

    moments = ("exp_avg", "exp_avg_sq")

    def step(self, slots: Sequence[Slot], lr: float, weight_decay: float) -> None:
        """Update all parameters that need no copies with one kernel; the others one at a time, to keep copies few."""
        for batch in _batches(slots):
            with opened(batch) as updates:
                # The kernel increments a scalar of its own for each parameter, on the device. They are filled there: a
                # list of numbers would be copied to a GPU, and the host would wait for all that the GPU has to do.
                counts, device = groupby(u.step - 1 for u in updates), updates[0].weight.device
                steps = torch.cat([torch.full((len(list(some)),), float(step), device=device) for step, some in counts])
                adamw(
                    [u.weight for u in updates],
                    [u.gradient for u in updates],
                    [u.moments["exp_avg"] for u in updates],
                    [u.moments["exp_avg_sq"] for u in updates],
                    [],
                    list(steps.unbind()),
                    fused=True,
                    amsgrad=False,
                    beta1=self.config.beta1,
                    beta2=self.config.beta2,
                    lr=lr,
                    weight_decay=weight_decay,
                    eps=self.config.eps,
                    maximize=False,
                )


class Lion(UpdateRule):
    """Lion: step by the sign of a momentum (Chen et al. 2023, "Symbolic discovery of optimization algorithms")."""

    moments = ("exp_avg",)

    def step(self, slots: Sequence[Slot], lr: float, weight_decay: float) -> None:
        """Step by the momentum with `beta1`; keep the momentum with `beta2`."""
        for slot in not_empty(slots):
            with opened([slot]) as (u,):
                sign = u.moments["exp_avg"].lerp(u.gradient, 1 - self.config.beta1).sign_()
                u.weight.mul_(1 - lr * weight_decay).sub_(sign, alpha=lr)
                u.moments["exp_avg"].lerp_(u.gradient, 1 - self.config.beta2)


def not_empty(slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots whose part on this rank has elements."""
    return [slot for slot in slots if slot.piece.value.numel()]


def _batches(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Yield the slots that open without copies in one batch for each device, and each of the others alone."""
    full = not_empty(slots)
    plain = [slot for slot in full if slot.is_plain]
    for device in dict.fromkeys(slot.piece.value.device for slot in plain):
        yield [slot for slot in plain if slot.piece.value.device == device]
    for slot in full:
        if not slot.is_plain:
            yield [slot]


SETTINGS = ("beta1", "beta2", "momentum", "eps")


class UserRule(UpdateRule):
    """The update that a function of the user's makes, parameter by parameter."""

    def __init__(self, extension: Extension, config: OptimizerConfig):
        super().__init__(config)
        self._extension = extension
        self.moments = extension.declared.facts["moments"]
        self._settings = {key: float(getattr(config, key)) for key in SETTINGS}

    def step(self, slots: Sequence[Slot], lr: float, weight_decay: float) -> None:
        """Call the function for each slot. Raises: RunFailed that names it, if it raises."""
        for slot in not_empty(slots):
            with opened([slot]) as (u,):
                name = slot.piece.name
                self.update(Update(name, u.weight, u.gradient, u.moments, u.step, lr, weight_decay, self._settings))

    def update(self, update: Update) -> None:
        """Call the function. Raises: RunFailed."""
        declared = self._extension.declared
        try:
            self._extension.function(update)
        except Exception as error:
            place = where(error, declared.place.rpartition(":")[0])
            raise RunFailed(
                f"{place}: the {declared} raised {type(error).__name__}: {error}, for {update.name} at its step "
                f"{update.step}. Mend it, and go on with --accept-changes."
            ) from error


def user_rule(code: Sequence[CodeFile], name: str) -> Callable[[OptimizerConfig], UserRule]:
    """Return what makes the rule of the optimizer `name`. Raises: UserError."""
    return partial(UserRule, find(code, "optimizer", name))


def check_rule(code: Sequence[CodeFile], config: OptimizerConfig) -> None:
    """Try the user's optimizer on a small parameter: twice, and cut in two as ranks might have it.

    Raises: UserError if it changes nothing, does not repeat itself and does not say so, or if an element's result
    depends on others.
    """
    rule = user_rule(code, config.kind)(config)
    declared = next(d for file in code for d in file.declarations if (d.kind, d.name) == ("optimizer", config.kind))
    try:
        whole, again = _tried(rule, [slice(0, 8)]), _tried(rule, [slice(0, 8)])
        cut = _tried(rule, [slice(0, 3), slice(3, 8)])
    except RunFailed as failed:
        raise UserError(str(failed).replace(", and go on with --accept-changes", "")) from failed
    if torch.equal(whole, _start()):
        raise UserError(f"{declared.place}: the {declared} changed no weight. Change update.weight in place.")
    if not declared.facts["deterministic"]:
        return
    if not torch.equal(whole, again):
        raise UserError(
            f"{declared.place}: the {declared} gave two results for one gradient. Make it repeat itself, or declare "
            "deterministic=False: then the run says that nothing repeats it."
        )
    if not torch.allclose(whole, cut, rtol=1e-5, atol=1e-7):
        raise UserError(
            f"{declared.place}: the {declared} gives an element another result where a rank has less of the parameter. "
            "Ranks have different parts under different plans, so it must compute each element from that element alone."
        )


def _start() -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 48).view(8, 6)


@torch.no_grad()
def _tried(rule: UserRule, parts: Sequence[slice]) -> torch.Tensor:
    """Return a weight after three steps of which each rank made its part."""
    weight = _start()
    gradient = torch.linspace(0.3, -0.7, 48).view(8, 6).square() - 0.1
    for part in parts:
        mine = weight[part].clone()
        moments = {name: torch.zeros_like(mine) for name in rule.moments}
        settings = {key: float(getattr(rule.config, key)) for key in SETTINGS}
        for step in (1, 2, 3):
            rule.update(Update("a.trial", mine, gradient[part] * step, moments, step, 1e-2, 0.1, settings))
        weight[part] = mine
    return weight
