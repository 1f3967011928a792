"""The run file's table `lora`: a low-rank adapter that is trained in place of the weights, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from argosy.config.section import Section
from argosy.errors import UserError

ALL_LINEAR = "all-linear"
BASE_BLOCK = 64
"""Numbers of a row that share a scale, where the weights beside an adapter are quantised (Dettmers et al. 2023)."""
BASE_BITS = {"nf4": 4, "int8": 8}


class LoraConfig(Section):
    """A low-rank adapter (LoRA, Hu et al. 2021): model.weights stay as they are, and two narrow matrices beside each
    target are trained. rank = 0: there is none, and the weights are trained."""

    rank: NonNegativeInt = 0
    """Rank of the adapter: each target of N outputs and M inputs gets rank * (N + M) parameters."""
    alpha: PositiveFloat = 32.0
    """The adapter's part is multiplied by alpha / rank. With 32 the best learning rate hardly depends on the rank
    (Schulman et al. 2025, "LoRA Without Regret")."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (ALL_LINEAR,)
    """Linear layers that get an adapter: all-linear (of blocks, experts included; Dettmers et al. 2023 and Schulman et
    al. 2025 find that attention alone is worse), or names such as "q", "attention.*", "blocks.0.mlp.down"; * stands for
    any characters."""
    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora; rslora: the factor is alpha / sqrt(rank) (Kalajdzievski 2023); dora: the length of each output's weights
    is trained apart from their direction (Liu et al. 2024)."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """First values of the inner matrix: within 1/sqrt(inputs), as PEFT and Schulman et al. 2025; or normal with a
    standard deviation of 1/rank. The outer one begins with zeros."""
    base: Literal["auto", "nf4", "int8"] = "auto"
    """Format of the matrices of linear layers beside the adapter: auto: in bf16 where the plan multiplies in bf16,
    else as plan.weights says; nf4 (QLoRA, Dettmers et al. 2023) in 4.5 bits and int8 in 8.5 bits for each number, and
    dequantised wherever they are multiplied."""

    @model_validator(mode="after")
    def _only_what_is_not_trained_is_quantised(self) -> Self:
        if self.base != "auto" and not self.rank:
            raise ValueError(
                f'base = "{self.base}" with rank = 0: weights that are trained are not quantised; set rank = 16, say, '
                'or base = "auto"'
            )
        return self

    @property
    def scale(self) -> float:
        """The factor on the adapter's part."""
        return self.alpha / (self.rank**0.5 if self.kind == "rslora" else self.rank)

    @property
    def is_quantised(self) -> bool:
        """True if the matrices beside the adapter are held in fewer bits than they are multiplied in."""
        return self.rank > 0 and self.base in BASE_BITS

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a quantised row: of each block that it begins, an fp32 scale and the codes."""
        return math.ceil(columns / BASE_BLOCK) * (4 + BASE_BLOCK * BASE_BITS[self.base] // 8)

    def has_target(self, module: str) -> bool:
        """Return True if a linear layer of this name, such as blocks.0.attention.q, gets an adapter."""
        return any(_matches(module, target) for target in self.targets)


def _matches(module: str, target: str) -> bool:
    return target == ALL_LINEAR or fnmatchcase(module, target) or fnmatchcase(module, f"*.{target}")


def check_targets(lora: LoraConfig, modules: Collection[str]) -> None:
    """Check `lora.targets` against the names of all linear layers. Raises: UserError if one matches none."""
    for target in lora.targets if lora.rank else ():
        if not any(_matches(module, target) for module in modules):
            near = get_close_matches(target, sorted({m.split(".", 2)[-1] for m in modules}), n=3, cutoff=0.0)
            raise UserError(
                f'lora.targets: "{target}" matches no linear layer. The nearest names are {", ".join(near)}; '
                f'"{ALL_LINEAR}" takes all.'
            )
