"""Watch every operation that torch runs: the basis for counting bytes on links and in memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented (torch.library), and without a public name

TRANSPARENT = ("argosy", "_c10d_functional")
"""Namespaces of operators that are also watched inside: our own, and DTensor's collectives."""


class Watch(TorchDispatchMode):
    """Sees every operation, also in backward, in hooks (FSDP2's), under DTensors and inside our own operators.

    While it is on, torch.compile runs eagerly.
    """

    @abstractmethod
    def saw(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """`operator(*args)` has just run and returned `result`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor: torch asks again about what it does with local tensors
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) in TRANSPARENT:
            return self._look_inside(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):  # the others are higher-order: they have no effect of their own
            self.saw(func, args, result)
        return result

    def _look_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator with this mode on: torch turns a mode off while it handles one.

        No public name says which kernel comes below the modes, so the dispatch key of the first tensor's device does.
        """
        device = next(tensors_in(args)).device.type
        below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
        super().__enter__()  # not `with self`: it is watching already
        try:
            return func.redispatch(below, *args, **kwargs)
        finally:
            super().__exit__(None, None, None)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, also those in lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)


def nbytes(tree: Any) -> int:
    """Return the bytes of all tensors in `tree`."""
    return sum(tensor.nbytes for tensor in tensors_in(tree))
