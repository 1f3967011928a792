"""The matrices that Muon makes orthogonal: how many there are, how large they are, and what it computes for them.

Newton-Schulz's iteration for a matrix of M rows and N >= M columns (its transpose, if it has more rows) takes, in each
of its steps, a product of the matrix with itself, one of that, and one with the matrix: 4 M^2 N + 2 M^3 FLOPs (Jordan
2024, kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.config.optimizer import settings_of
from argosy.config.schema import RunConfig
from argosy.plan.parameters import run_table

NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class HiddenMatrices:
    """All such matrices outside of routed experts, or all stacks of experts' matrices; each stack counts as one."""

    are_stacks: bool
    many: int
    numbers: int
    """Elements of all of them."""
    flops: int
    """FLOPs for all of them."""
    largest_numbers: int
    largest_flops: int
    largest_gram: int
    """Elements of a matrix's product with itself."""


def hidden_matrices(run: RunConfig) -> tuple[HiddenMatrices, ...]:
    """Return what Muon trains of the whole model: single matrices, and stacks; of these those that there are."""
    found: dict[bool, list[tuple[int, int, int]]] = {}
    for name, parameter in run_table(run).items() if run.optimizer.kind == "muon" else ():
        if parameter.is_trained and settings_of(name, parameter.shape, run.optimizer).rule == "muon":
            *stack, rows, columns = parameter.shape
            each, least, most = math.prod(stack), min(rows, columns), max(rows, columns)
            flops = NEWTON_SCHULZ_STEPS * each * (4 * least**2 * most + 2 * least**3)
            sizes = each * rows * columns, flops, each * least**2
            found.setdefault(parameter.is_expert, []).append(sizes)
    return tuple(
        HiddenMatrices(
            are_stacks,
            len(sizes),
            sum(numbers),
            sum(flops),
            max(numbers),
            max(flops),
            max(grams),
        )
        for are_stacks, sizes in found.items()
        for numbers, flops, grams in [tuple(zip(*sizes, strict=True))]
    )
