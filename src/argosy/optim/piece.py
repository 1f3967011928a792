"""The optimizer's view of a parameter: this rank's part of it, and how to get the whole."""

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
    """The parameter's name in the whole model; the same on all ranks that share it."""
    value: Tensor
    """A plain tensor, updated in place: fp32, or bf16 where weights have no fp32 copy. It may be empty. Set its `grad`
    before a step (an empty piece needs none)."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    cut: frozenset[int] = frozenset()
    """The dims along which it is cut; the same on all ranks that share it, also on those whose part is empty."""
    gather: Callable[[Tensor], Tensor] = _identity
    """Turns a tensor cut like `value` into the whole, on every rank that shares it; a collective."""
    scatter: Callable[[Tensor], Tensor] = _identity
    """Turns the whole, which all ranks that share it know, into this rank's part, a box of it; no communication."""
    group: dist.ProcessGroup | None = None
    """All ranks that call `gather` for this parameter, replicas included: all that need the same update. They divide
    the work on whole parameters. None: each rank does all of it."""
