"""Memory that is alive, counted tensor by tensor: exact on any device, where the process's size tells little."""

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

    Memory that several tensors share counts once, and as much as it has now (FSDP2 empties and refills what it
    gathered). What was there before does not count, nor does memory that a kernel takes for itself and gives back, nor
    that of tensors on the meta device, which have none. While it is on, nothing is compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive."""
        self.most = 0
        """The most that were alive at once."""
        self._sizes: dict[int, int] = {}
        self._resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> Self:
        """Begin to count. A storage that changes its size does so past the dispatcher: that call is watched too."""
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
        """Count no more; what dies later is still subtracted."""
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
        """Memory that is known as `memory` had `before` bytes and has `after`: for who wants to know which."""

    def freed(self, memory: int) -> None:
        """It is gone; other memory may come to be known by this number."""

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
