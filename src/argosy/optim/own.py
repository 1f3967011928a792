"""An optimizer of the user's: a function that updates one parameter's part at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from argosy.config.optimizer import OptimizerConfig
from argosy.errors import RunFailed, UserError
from argosy.extend import Update
from argosy.extend.declared import CodeFile
from argosy.extend.loading import Extension, find, where
from argosy.optim.rules import UpdateRule, not_empty
from argosy.optim.slot import Slot, opened

SETTINGS = ("beta1", "beta2", "momentum", "eps")


class OwnRule(UpdateRule):
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


def own_rule(code: Sequence[CodeFile], name: str) -> Callable[[OptimizerConfig], OwnRule]:
    """Return what makes the rule of the optimizer `name`. Raises: UserError."""
    return partial(OwnRule, find(code, "optimizer", name))


def check_rule(code: Sequence[CodeFile], config: OptimizerConfig) -> None:
    """Try the user's optimizer on a small parameter: twice, and cut in two as ranks might have it.

    Raises: UserError if it changes nothing, does not repeat itself and does not say so, or if an element's result
    depends on others.
    """
    rule = own_rule(code, config.kind)(config)
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
def _tried(rule: OwnRule, parts: Sequence[slice]) -> torch.Tensor:
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
