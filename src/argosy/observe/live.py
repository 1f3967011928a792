"""Memory that is alive, counted tensor by tensor: exact on any device, where the process's size tells little."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from argosy.observe.dispatch import Watch, tensors_in


class LiveBytes(Watch):
    """Counts the bytes of tensors that were made while it is on and are still alive.

        with LiveBytes() as live:
            ...
        live.most

    Memory that several tensors share counts once; what was there before does not count, nor does memory that a kernel
    takes for itself and gives back. While it is on, nothing is compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes alive."""
        self.most = 0
        """The most that were alive at once."""
        self._alive: set[int] = set()

    def saw(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Count what the operation has made."""
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args)}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in given and address not in self._alive:
                self._alive.add(address)
                self.now += size
                self.most = max(self.most, self.now)
                # A storage's Python object lives as long as its memory.
                weakref.finalize(storage, self._died, address, size).atexit = False

    def _died(self, address: int, size: int) -> None:
        self._alive.remove(address)
        self.now -= size
