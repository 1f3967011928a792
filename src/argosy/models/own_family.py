"""Model families of the user's: Llama's decoder with another feed-forward, known in a process that has loaded them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from argosy.config.model import FAMILIES, ModelConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.extend.declared import Declaration
from argosy.extend.loading import Extension, find, where
from argosy.models.layers import ACTIVATIONS, Activation

_LOADED: dict[str, Extension] = {}


def load_family(run: RunConfig) -> None:
    """Import the family of `run`, if it is the user's, so that this process can build models of it.

    Raises: UserError if its file cannot be imported, or its activation is not what it must be.
    """
    name = run.model.family
    if name in FAMILIES:
        return
    _LOADED[name] = extension = find(run.extend.code, "family", name)
    _check(extension)


def activation_of(config: ModelConfig) -> Activation:
    """Return the activation of the feed-forward. Raises: UserError if the family is not known in this process."""
    return ACTIVATIONS.get(config.activation, F.silu) if config.family in FAMILIES else _loaded(config.family).function


def declared_family(family: str) -> Declaration:
    """Return what the user's family declares. Raises: UserError if it is not known in this process."""
    return _loaded(family).declared


def _loaded(family: str) -> Extension:
    if family not in _LOADED:
        raise UserError(f"model.family = {family!r} is not known here. Use it in a run whose extend.files declare it.")
    return _LOADED[family]


def _check(extension: Extension) -> None:
    """Try the activation on a few numbers. Raises: UserError."""
    declared = extension.declared
    whole, again, parts = (_tried(extension, cut) for cut in ([8], [8], [3, 5]))
    if not torch.equal(whole, again):
        raise UserError(
            f"{declared.place}: the {declared} gave two results for the same numbers. Make it repeat itself."
        )
    if not torch.allclose(whole, parts, rtol=1e-5, atol=1e-7):
        raise UserError(
            f"{declared.place}: the {declared} gives an element another result beside others. Tensor parallelism cuts "
            "what it is given, so each element must follow from that element alone."
        )


@torch.enable_grad()
def _tried(extension: Extension, cut: Sequence[int]) -> torch.Tensor:
    """Return results and gradients for numbers that are given in parts."""
    declared = extension.declared
    found = []
    for part in torch.linspace(-3.0, 3.0, 16).view(8, 2).split(list(cut)):
        x = part.clone().requires_grad_()
        try:
            y = extension.function(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
        except Exception as error:
            place = where(error, declared.place.rpartition(":")[0])
            raise UserError(f"{place}: the {declared} raised {type(error).__name__}: {error}.") from error
        if y.shape != x.shape:
            raise UserError(
                f"{declared.place}: the {declared} returned {list(y.shape)} for {list(x.shape)}; the shape must stay."
            )
        found.append(torch.cat([y.detach(), gradient], dim=1))
    return torch.cat(found)
