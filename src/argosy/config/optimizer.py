"""The run file's tables `optimizer` and `schedule`, and how each parameter is trained: groups over the defaults.

That follows from names and shapes alone. Trainer and planner read the same: what the optimizer keeps of a parameter is
what it is predicted to take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from argosy.config.extend import one_of_or_declared
from argosy.config.section import Mark, Section
from argosy.errors import UserError

OPTIMIZERS = {"adamw": 2, "lion": 1, "muon": 1}
"""Built-in optimizers -> the moments that each keeps of an element."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerGroup(Section):
    """Parameters with settings of their own."""

    match: str
    """Names of the parameters; * stands for any characters, e.g. "*_norm.weight" or "head.*"."""
    lr_factor: NonNegativeFloat = 1.0
    """Factor on the learning rate. To freeze parameters, name them in train.frozen: that also saves the work."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of these parameters; none given: the default."""


class OptimizerConfig(Section):
    """The optimizer."""

    kind: Annotated[str, one_of_or_declared(*OPTIMIZERS)] = "adamw"
    """adamw; lion (Chen et al. 2023; needs a 3 to 10 times lower lr); muon (Jordan 2024), adamw beside it; or one of
    your own, by its name (docs/extending.md)."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    beta1: Beta = 0.9
    """adamw: decay of the first moment; lion: share of the momentum in a step."""
    beta2: Beta = 0.95
    """adamw: decay of the second moment; lion: decay of the momentum."""
    momentum: Beta = 0.95
    """muon: decay of the momentum."""
    eps: PositiveFloat = 1e-8
    """adamw, also that beside muon: added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only (not on norms, biases)."""
    state: Literal["fp32", "int8"] = "fp32"
    """Moments of adamw and lion: 4 bytes per number, or 1 (blocks of 256; Dettmers et al. 2022)."""
    groups: Annotated[tuple[OptimizerGroup, ...], Mark.NO_OPTION] = ()
    """Parameters with a learning rate or weight decay of their own; the first group that matches a name applies."""
    grad_clip: NonNegativeFloat = 1.0
    """Gradient clipping: largest global gradient norm; 0 does not clip."""


class ScheduleConfig(Section):
    """The schedule of the learning rate over the run, as a share of optimizer.lr."""

    kind: Literal["cosine", "wsd", "constant"] = "wsd"
    """cosine; wsd: warmup, stable, linear decay (Hu et al. 2024); constant after warmup."""
    warmup_steps: NonNegativeInt = 20
    """Warmup: steps in which the learning rate rises linearly."""
    warmup_fraction: Fraction = 0.0
    """Warmup as a share of the run, in place of warmup_steps if it is more than 0."""
    decay_fraction: Fraction = 0.3
    """wsd: share of the run that decays."""
    final_ratio: Fraction = 0.1
    """Learning rate at the end over its peak."""

    def warmup_of(self, steps: int | None) -> int:
        """Return the steps of warmup, of a run of `steps`; None: its length is not known yet."""
        return math.ceil(self.warmup_fraction * steps) if self.warmup_fraction and steps else self.warmup_steps


NOT_HIDDEN = ("embedding", "head", "score", "router", "q_conv", "k_conv", "v_conv")
"""Matrices that Muon leaves to AdamW: their rows stand for tokens, scores, experts or channels, one by one (Jordan
2024)."""
LEAST_INT8 = 4096
"""Smaller parameters keep fp32 state under `state = "int8"` (Dettmers et al. 2022)."""


RateFactor = Callable[[str, tuple[int, ...], str], float]
"""Name, whole shape and rule of a parameter -> the factor on its learning rate that its width asks for."""


def no_factor(name: str, shape: tuple[int, ...], rule: str) -> float:
    return 1.0


@dataclass(frozen=True)
class ParameterSettings:
    """The settings of one parameter's training."""

    rule: str
    """adamw, lion, muon, or the name of an optimizer of the user's."""
    int8: bool
    """True if its moments are kept in eight bits."""
    lr_factor: float
    weight_decay: float


def settings_of(
    name: str, shape: tuple[int, ...], config: OptimizerConfig, rate_factor: RateFactor = no_factor
) -> ParameterSettings:
    """Return the settings of the first group that matches `name`, over the defaults.

    `shape` is that of the whole parameter. A `rate_factor` leaves the weight decay of a step as it is, learning rate
    times `weight_decay`: the best is the same for all widths (Wang & Aitchison 2024, "How to set AdamW's weight decay
    as you scale model and dataset size").
    """
    # A stack of experts' biases, or of their adapters' lengths, has two dims as well.
    matrix = len(shape) >= 2 and not name.endswith(("bias", "magnitude"))
    group = next((group for group in config.groups if fnmatchcase(name, group.match)), None)
    weight_decay = config.weight_decay if matrix else 0.0
    if group is not None and group.weight_decay is not None:
        weight_decay = group.weight_decay
    rule = config.kind
    if rule == "muon" and not (matrix and is_hidden(name)):
        rule = "adamw"
    factor = rate_factor(name, shape, rule)
    return ParameterSettings(
        rule=rule,
        # Not Muon's momentum: making all singular values alike would make its rounding errors large.
        int8=config.state == "int8" and rule != "muon" and matrix and math.prod(shape) >= LEAST_INT8,
        lr_factor=factor * (group.lr_factor if group else 1.0),
        weight_decay=weight_decay / factor,
    )


def is_hidden(name: str) -> bool:
    """Return True if a parameter's input and output are both hidden states, as Muon needs."""
    return not set(NOT_HIDDEN) & set(name.split("."))


def is_frozen(name: str, patterns: Collection[str]) -> bool:
    """Return True if one of `train.frozen` matches the parameter, or a module that it is in."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def check_patterns(groups: Collection[OptimizerGroup], frozen: Collection[str], names: Collection[str]) -> None:
    """Check `optimizer.groups` and `train.frozen` against `names`, those of all parameters of the whole model.

    Raises: UserError if a pattern matches none of them.
    """
    for index, group in enumerate(groups):
        if not any(fnmatchcase(name, group.match) for name in names):
            raise _no_match(f'optimizer.groups: match = "{group.match}" (number {index + 1})', group.match, names)
    for pattern in frozen:
        if not any(is_frozen(name, (pattern,)) for name in names):
            modules = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
            raise _no_match(f'train.frozen: "{pattern}"', pattern, [*names, *sorted(modules)])


def _no_match(said: str, pattern: str, names: Collection[str]) -> UserError:
    near = get_close_matches(pattern, names, n=3, cutoff=0.0)
    return UserError(
        f"{said} matches no parameter. The nearest names are {', '.join(near)}; "
        '"*" stands for any characters, dots included.'
    )
