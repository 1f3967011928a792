"""How each parameter is trained: the run file's groups over the defaults, by names and shapes alone.

Trainer and planner read the same: what the optimizer keeps of a parameter is what it is predicted to take.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from argosy.config.schema import OptimizerConfig, RunConfig
from argosy.errors import UserError

NOT_HIDDEN = ("embedding", "head", "router")
"""Modules whose matrices Muon leaves to AdamW: their rows stand for tokens or experts, one by one (Jordan 2024)."""
LEAST_INT8 = 4096
"""Smaller parameters keep fp32 state under `state = "int8"` (Dettmers et al. 2022)."""


RateFactor = Callable[[str, tuple[int, ...], str], float]
"""Name, whole shape and rule of a parameter -> the factor on its learning rate that its width asks for."""


def no_factor(name: str, shape: tuple[int, ...], rule: str) -> float:
    """The factor of the usual parametrization."""
    return 1.0


@dataclass(frozen=True)
class ParameterSettings:
    """How one parameter is trained."""

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
    matrix = len(shape) >= 2 and not name.endswith("bias")  # a stack of experts' biases has two dims as well
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


def check_patterns(run: RunConfig, names: Collection[str]) -> None:
    """Check `optimizer.groups` and `train.frozen` against `names`, those of all parameters of the whole model.

    Raises: UserError if a pattern matches none of them, or all are frozen.
    """
    for index, group in enumerate(run.optimizer.groups):
        if not any(fnmatchcase(name, group.match) for name in names):
            raise _no_match(f'optimizer.groups: match = "{group.match}" (number {index + 1})', group.match, names)
    for pattern in run.train.frozen:
        if not any(is_frozen(name, (pattern,)) for name in names):
            modules = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
            raise _no_match(f'train.frozen: "{pattern}"', pattern, [*names, *sorted(modules)])
    if names and all(is_frozen(name, run.train.frozen) for name in names):
        raise UserError("train.frozen matches every parameter, so there is nothing to train. Leave some out.")


def _no_match(said: str, pattern: str, names: Collection[str]) -> UserError:
    near = get_close_matches(pattern, names, n=3, cutoff=0.0)
    return UserError(
        f"{said} matches no parameter. The nearest names are {', '.join(near)}; "
        '"*" stands for any characters, dots included.'
    )
