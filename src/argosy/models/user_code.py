"""The user's code in a model: a loss, and a family, which is Llama's decoder with another feed-forward.

A loss is a function of the logits of a chunk of tokens, whose gradient autograd gives. A family is known in a process
that has loaded it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.config.model import FAMILIES, ModelConfig
from argosy.config.schema import RunConfig
from argosy.data.packing import IGNORED
from argosy.errors import RunFailed, UserError, a_kind
from argosy.extend.declared import CodeFile, Declaration
from argosy.extend.loading import Extension, find
from argosy.models.layers import ACTIVATIONS, Activation

# C tokens of a chunk, V vocabulary


class UserLoss:
    """A `models.loss.ChunkLoss` that calls a function of the user's with the whole vocabulary's logits."""

    def __init__(self, extension: Extension):
        self.declared = extension.declared
        self._extension = extension

    def __call__(self, logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's loss and the gradient of their sum. Raises: RunFailed that names the function."""
        with torch.enable_grad():
            logits = logits_CV.detach().float().requires_grad_()
            losses_C = self._losses(logits, targets_C.clamp(min=0))
            losses_C = torch.where(targets_C == IGNORED, 0.0, losses_C.float())
            (gradient_CV,) = torch.autograd.grad(losses_C.sum(), logits)
        return losses_C.detach(), gradient_CV.to(logits_CV.dtype)

    def _losses(self, logits_CV: Tensor, targets_C: Tensor) -> Tensor:
        try:
            losses_C = self._extension.function(logits_CV, targets_C)
        except Exception as error:
            raise RunFailed(f"{self._extension.raised(error)}.") from error
        if not isinstance(losses_C, Tensor) or losses_C.shape != targets_C.shape or not losses_C.requires_grad:
            what = f"{list(losses_C.shape)}" if isinstance(losses_C, Tensor) else a_kind(losses_C)
            what += " without a gradient" if isinstance(losses_C, Tensor) and not losses_C.requires_grad else ""
            raise RunFailed(
                f"{self.declared.place}: the {self.declared} returned {what}; it must return a loss for "
                f"each token, [{len(targets_C)}], computed from the logits."
            )
        return losses_C


def user_loss(code: Sequence[CodeFile], name: str) -> UserLoss:
    """Return the loss `name`. Raises: UserError."""
    return UserLoss(find(code, "loss", name))


def check_loss(code: Sequence[CodeFile], name: str) -> None:
    """Try the user's loss on a few tokens: twice, and token by token.

    Raises: UserError if it returns what it must not, does not repeat itself and does not say so, or if a token's loss
    depends on others.
    """
    loss = user_loss(code, name)
    declared = loss.declared
    logits_CV, targets_C = torch.linspace(-3.0, 3.0, 66).view(6, 11).sin() * 4, torch.tensor([0, 10, 3, 3, 7, 5])
    try:
        whole, again = loss(logits_CV, targets_C), loss(logits_CV, targets_C)
        single = [loss(logits_CV[i : i + 1], targets_C[i : i + 1]) for i in range(6)]
    except RunFailed as failed:
        raise UserError(str(failed)) from failed
    if not whole[0].isfinite().all() or not whole[1].isfinite().all():
        raise UserError(f"{declared.place}: the {declared}, or its gradient, is not finite for plain logits.")
    if not declared.facts["deterministic"]:
        return
    if not all(map(torch.equal, whole, again)):
        raise UserError(
            f"{declared.place}: the {declared} gave two results for the same logits. Make it repeat itself, or declare "
            "deterministic=False: then the run says that nothing repeats it."
        )
    if not torch.allclose(whole[1], torch.cat([gradient for _, gradient in single]), rtol=1e-4, atol=1e-6):
        raise UserError(
            f"{declared.place}: the {declared} of a token depends on other tokens. Tokens come in chunks of any "
            "length, so a token's loss must follow from its own logits and target."
        )


_FAMILIES: dict[str, Extension] = {}


def load_family(run: RunConfig) -> None:
    """Import the family of `run`, if it is the user's, so that this process can build models of it.

    Raises: UserError if its file cannot be imported, or its activation is not what it must be.
    """
    name = run.model.family
    if name in FAMILIES:
        return
    _FAMILIES[name] = extension = find(run.extend.code, "family", name)
    _check_activation(extension)


def activation_of(config: ModelConfig) -> Activation:
    """Return the activation of the feed-forward. Raises: UserError if the family is not known in this process."""
    return ACTIVATIONS.get(config.activation, F.silu) if config.family in FAMILIES else _family(config.family).function


def declared_family(family: str) -> Declaration:
    """Return what the user's family declares. Raises: UserError if it is not known in this process."""
    return _family(family).declared


def _family(family: str) -> Extension:
    if family not in _FAMILIES:
        raise UserError(f"model.family = {family!r} is not known here. Use it in a run whose extend.files declare it.")
    return _FAMILIES[family]


def _check_activation(extension: Extension) -> None:
    """Try the activation on a few numbers. Raises: UserError."""
    declared = extension.declared
    whole, again, parts = (_tried_activation(extension, cut) for cut in ([8], [8], [3, 5]))
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
def _tried_activation(extension: Extension, cut: Sequence[int]) -> Tensor:
    """Return results and gradients for numbers that are given in parts."""
    declared = extension.declared
    found = []
    for part in torch.linspace(-3.0, 3.0, 16).view(8, 2).split(list(cut)):
        x = part.clone().requires_grad_()
        try:
            y = extension.function(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
        except Exception as error:
            raise UserError(f"{extension.raised(error)}.") from error
        if y.shape != x.shape:
            raise UserError(
                f"{declared.place}: the {declared} returned {list(y.shape)} for {list(x.shape)}; the shape must stay."
            )
        found.append(torch.cat([y.detach(), gradient], dim=1))
    return torch.cat(found)
