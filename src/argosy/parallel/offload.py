"""Offloading to host memory: activations that wait there for backward, and an optimizer that works there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from argosy.accelerator import current_stream, is_accelerator, new_stream, on_stream
from argosy.models.layers import local
from argosy.observe.wire import tensors_in

SMALLEST_OFFLOADED_BYTES = 2**16
"""Smaller tensors stay on the device: a copy would cost the link's latency, and free next to nothing."""


class ActivationOffload:
    """The activations that `offload_activations` moved to the host."""

    def __init__(self, smallest_bytes: int) -> None:
        self.smallest_bytes = smallest_bytes
        self._waiting: WeakSet[_OnHost] = WeakSet()
        self._streams: dict[torch.device, torch.Stream] = {}

    @property
    def host_bytes(self) -> int:
        """Bytes of the activations that are on the host now."""
        return sum(copy.host.nbytes for copy in self._waiting)

    def to_host(self, tensor: Tensor) -> _OnHost:
        """Copy `tensor` to the host; on an accelerator beside the computation, from now on in its order."""
        if not is_accelerator(tensor.device):
            copy = _OnHost(tensor.clone(), tensor.device)
        else:
            if tensor.device not in self._streams:
                self._streams[tensor.device] = new_stream(tensor.device)
            stream = self._streams[tensor.device]
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            stream.wait_stream(current_stream(tensor.device))
            with on_stream(stream):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # or the allocator would give its memory away before it is read
            copy = _OnHost(host, tensor.device, stream.record_event())
        self._waiting.add(copy)
        return copy


@dataclass(eq=False)
class _OnHost:
    """A tensor's copy on the host, and the way back."""

    host: Tensor
    device: torch.device
    copied: torch.Event | None = None

    def to_device(self) -> Tensor:
        """Return a copy on the device; on an accelerator in the computation's order, so that what needs it waits."""
        if self.copied is not None:
            current_stream(self.device).wait_event(self.copied)
        return self.host.to(self.device, non_blocking=True)


def offload_activations(
    blocks: Iterable[tuple[int, nn.Module]], smallest_bytes: int = SMALLEST_OFFLOADED_BYTES
) -> ActivationOffload:
    """Keep what each block saves for backward in host memory, pinned where the device is an accelerator, in place.

    Weights (cast and transposed too), inputs without gradient, which the blocks share, and tensors below
    `smallest_bytes` stay on the device. What a block saves twice is copied once. Combines with `apply_recompute` and
    compilation, in any order: with "full" the block's input moves; what "selective" keeps beyond it stays on the
    device. On a CPU the copies are made all the same, and cost memory instead of freeing it.
    """
    offload = ActivationOffload(smallest_bytes)
    for _, block in blocks:
        # Not in `forward`, which may be compiled: autograd's hooks have to stand around the compiled code. In a class
        # of its own, as FSDP2 does it, since Python looks `__call__` up in the class.
        cls = type(block)
        block.__class__ = type(cls.__name__, (_Offloaded, cls), {"_offload": offload})
    return offload


class _Offloaded(nn.Module):
    _offload: ActivationOffload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = _Forward(self, self._offload, (*args, *kwargs.values()))
        try:
            with saved_tensors_hooks(forward.pack, _unpack):
                return super().__call__(*args, **kwargs)
        finally:
            forward.copies.clear()  # the graph alone decides how long they live


class _Forward:
    """One forward of one block: what it has copied so far, and what it need not copy."""

    def __init__(self, block: nn.Module, offload: ActivationOffload, inputs: Any):
        self._block, self._offload = block, offload
        self._shared = {_memory(tensor) for tensor in tensors_in(inputs) if not tensor.requires_grad}
        self.copies: dict[tuple[Any, ...], _OnHost] = {}

    def pack(self, tensor: Tensor) -> Tensor | _OnHost:
        if self._stays(tensor):
            return tensor
        # Torch has no public name for the count of in-place writes, which tell apart two saves of one memory.
        key = (_memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.copies:
            self.copies[key] = self._offload.to_host(tensor)
        return self.copies[key]

    def _stays(self, tensor: Tensor) -> bool:
        return (
            tensor.nbytes < self._offload.smallest_bytes
            or _memory(tensor) in self._shared
            or self._is_weight(tensor)
            # Compiled code relies on strides, and a copy of a tensor with gaps or repetitions has others.
            or torch.empty_like(tensor, device="meta").stride() != tensor.stride()
        )

    def _is_weight(self, tensor: Tensor) -> bool:
        """True if `tensor` is a parameter of the block or made from one alone: its transpose, its cast to bf16."""
        if any(_memory(tensor) == _memory(local(parameter)) for parameter in self._parameters):
            return True
        node = tensor.grad_fn
        while node is not None and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
        return any(getattr(node, "variable", None) is parameter for parameter in self._parameters)

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """Taken when forward runs, as sharding swaps a block's parameters for whole ones just before."""
        return list(self._block.parameters())


def _unpack(saved: Tensor | _OnHost) -> Tensor:
    return saved.to_device() if isinstance(saved, _OnHost) else saved


def _memory(tensor: Tensor) -> StorageWeakRef:
    """Return the identity of a tensor's memory, which no later memory gets as long as this is held."""
    return StorageWeakRef(tensor.untyped_storage())


class HostCopies:
    """Twins in host memory of parameters on a device, for an optimizer that runs on the host.

    ZeRO-Offload (Ren et al. 2021): an optimizer built on `twins` keeps its state in host memory and computes there;
    each step sends gradients to the host and values back.

        copies = HostCopies(parameters, dtype=torch.float32)
        optimizer = AdamW(copies.twins)
        ...
        copies.grads_to_host()
        optimizer.step()
        copies.values_to_device()
    """

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype | None = None):
        """`parameters`: plain tensors. `dtype`: of twins and their gradients, such as fp32 master weights of bf16
        parameters; by default each parameter's own."""
        self._parameters = list(parameters)
        self.twins: list[Tensor] = []
        """The host's copies, in the same order; they are made with the parameters' values."""
        for parameter in self._parameters:
            twin = _empty_on_host(parameter, dtype).copy_(parameter.detach())
            self.twins.append(twin.requires_grad_(parameter.requires_grad))
        self._grads: list[Tensor | None] = [None] * len(self.twins)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the twins and their gradients take."""
        return sum(tensor.nbytes for tensor in (*self.twins, *self._grads) if tensor is not None)

    @torch.no_grad()
    def grads_to_host(self) -> None:
        """Set the twins' `grad` to copies of the parameters' (None where that is None), and wait for them.

        The parameters' gradients may be freed, and the twins changed, as soon as this returns.
        """
        for i, (parameter, twin) in enumerate(zip(self._parameters, self.twins, strict=True)):
            twin.grad = None
            if parameter.grad is not None:
                twin.grad = self._grad(i).copy_(parameter.grad, non_blocking=True)
        for device in {parameter.device for parameter in self._parameters if is_accelerator(parameter.device)}:
            current_stream(device).synchronize()

    @torch.no_grad()
    def values_to_device(self) -> None:
        """Copy the twins' values into the parameters.

        On an accelerator in the order of its current stream, without waiting: the twins may be read, but not changed,
        before the next `grads_to_host` of the same stream.
        """
        for parameter, twin in zip(self._parameters, self.twins, strict=True):
            parameter.copy_(twin, non_blocking=True)

    def _grad(self, i: int) -> Tensor:
        """Return the memory of a twin's gradient, kept from step to step: pinning memory takes long."""
        grad = self._grads[i]
        if grad is None:
            grad = self._grads[i] = _empty_on_host(self._parameters[i], self.twins[i].dtype)
        return grad


def _empty_on_host(like: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return host memory in the shape of `like`, pinned if that is on a CUDA device, so that copies need not wait."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, device="cpu", pin_memory=is_accelerator(like.device))
