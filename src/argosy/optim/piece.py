"""What an optimizer sees of a parameter: this rank's part of it, and how to see the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


def _identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """A rank's part of one parameter. Ranks that share a parameter have its pieces in the same order."""

    name: str
    """The parameter's name in the whole model; equal on all ranks that share it."""
    value: Tensor
    """A plain tensor, updated in place: fp32, or bf16 where weights have no fp32 copy. May be empty. Its `grad` is set
    before a step (an empty piece needs none)."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    cut: frozenset[int] = frozenset()
    """The dims along which it is cut up; equal on all ranks that share it, those whose part is empty included."""
    gather: Callable[[Tensor], Tensor] = _identity
    """A tensor cut like `value` -> the whole of it, on every rank that shares it: a collective."""
    scatter: Callable[[Tensor], Tensor] = _identity
    """The whole, known to all ranks that share it -> this rank's part, a box of it: no communication."""
    group: dist.ProcessGroup | None = None
    """All ranks that call `gather` for this parameter, replicas included, that is all that need the same update: work
    on the whole parameter is dealt over them. None: each does all of it."""
