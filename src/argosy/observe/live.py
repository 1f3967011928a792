"""Counts the memory that is alive, tensor by tensor: exact on any device, where the process's size says little."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch

from argosy.observe.dispatch import Watch, tensors_in


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
