"""Operators that are executed: the FLOPs of each, and the bytes of tensors that live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Self

import torch
from torch.utils.flop_counter import flop_registry

from argosy.observe.wire import Watch, tensors_in

Formula = Callable[..., int]
"""(operator's arguments..., out_val=its result) -> FLOPs."""


def flops_of(operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> int:
    """Return the FLOPs of `operator(*args)`, a multiplication and an addition being two; 0 unless it is a contraction.

    Causal attention counts the half that is not masked, and its backward as two forwards, as `plan.flops` does: that a
    fused kernel computes the scores once more does not count.
    """
    formula = _formula(operator.overloadpacket)
    return 0 if formula is None else int(formula(*args, out_val=result))


@cache
def _formula(packet: Any) -> Formula | None:
    return _ATTENTION.get(str(packet)) or flop_registry.get(packet)


def _attention(q_BHTE: Any, k_BKSE: Any, v: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    return int(4 * q_BHTE.numel() * k_BKSE.shape[2]) // (2 if causal else 1)


def _attention_backward(
    dy: Any, q_BHTE: Any, k_BKSE: Any, v: Any, y: Any, lse: Any, dropout: float, causal: bool, **_: Any
) -> int:
    return 2 * _attention(q_BHTE, k_BKSE, v, dropout, causal)


# A dispatch mode sees the private operators under F.scaled_dot_product_attention on a CPU.
_ATTENTION: dict[str, Formula] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}


class LiveBytes(Watch):
    """Counts the bytes of tensors that were made while it is on and are still alive.

        with LiveBytes() as live:
            ...
        live.most

    Memory that several tensors share counts once, with its present size (FSDP2 empties and refills what it gathered).
    These do not count: memory from before, memory that a kernel takes for itself and gives back, and tensors on the
    meta device, which have none. While it is on, nothing is compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive."""
        self.most = 0
        """The most bytes that were alive at once."""
        self._sizes: dict[int, int] = {}
        self._resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        """Begin to count. A storage changes its size without the dispatcher, so that call is watched too."""
        self._resize = resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._sizes:
                self._set(id(storage), storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = watched  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop counting new memory; memory that is freed later is still subtracted."""
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[assignment, method-assign]

    def saw(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Count what the operation has made."""
        given = {id(tensor.untyped_storage()) for tensor in tensors_in(args)}
        for tensor in tensors_in(result):
            if tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()  # the same Python object for as long as its memory lives
            key = id(storage)
            if key not in given and key not in self._sizes:
                self._set(key, storage.nbytes())
                weakref.finalize(storage, self._died, key).atexit = False

    def changed(self, memory: int, before: int, after: int) -> None:
        """The memory with this number had `before` bytes and now has `after`. For subclasses."""

    def freed(self, memory: int) -> None:
        """The memory with this number is gone; other memory may get the number. For subclasses."""

    def _set(self, key: int, size: int) -> None:
        before = self._sizes.get(key, 0)
        self._sizes[key] = size
        self.now += size - before
        self.most = max(self.most, self.now)
        self.changed(key, before, size)

    def _died(self, key: int) -> None:
        size = self._sizes.pop(key)
        self.now -= size
        self.changed(key, size, 0)
        self.freed(key)
