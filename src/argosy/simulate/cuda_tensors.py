"""Answers about fake tensors on `cuda`, where torch without CUDA has none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from argosy.accelerator import NVIDIA
from argosy.simulate.cuda_calls import FakeDevice
from argosy.simulate.device_watch import DeviceWatch
from argosy.simulate.fake import replaced
from argosy.simulate.fake_cuda import CUDA, META, is_on_cuda, values_of

TENSOR, GENERATOR = torch.tensor, torch.Generator
HALF = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


def _address(tensor: Tensor) -> int:
    """Return an address: as long as its memory lives, no other tensor has it."""
    if not isinstance(tensor, FakeTensor):
        return tensor.data_ptr()
    return id(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()


def _pinned(device: FakeDevice, tensor: Tensor, *_: Any) -> Tensor:
    copy = tensor.clone()
    device.pin(copy)
    return copy


def _new_tensor(like: Tensor, data: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    return _tensor(data, dtype or like.dtype, device or like.device, **kwargs)


def _tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    """Make a tensor of numbers as torch does on a GPU: in host memory, then copied."""
    if device is None or torch.device(device).type != NVIDIA:
        return TENSOR(data, dtype=dtype, device=device, **kwargs)
    return TENSOR(data, dtype=dtype, **kwargs).to(device)


def _generator(device: Any = "cpu") -> torch.Generator:
    """Return a generator: the host's, since fake numbers need no others."""
    return GENERATOR()


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Choose as torch does on a GPU: FlashAttention for half precision without a mask; else its plain formula."""
    names = ("dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if not is_on_cuda(q):
        return torch._C._nn.scaled_dot_product_attention(q, k, v, attn_mask, **given)
    scale, causal, gqa = given.get("scale"), given.get("is_causal", False), given.get("enable_gqa", False)
    if q.dtype in HALF and attn_mask is None and q.shape[-1] <= 256 and q.shape[-1] == v.shape[-1]:
        width, missing = q.shape[-1], -q.shape[-1] % 8
        q, k, v = (F.pad(x, (0, missing)) if missing else x for x in (q, k, v))
        scale = width**-0.5 if scale is None else scale
        y = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
        return y[..., :width] if missing else y
    if attn_mask is None and causal:
        attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ v


def _of_local(name: str) -> property:
    return property(lambda tensor: getattr(tensor._local_tensor, name))


@contextmanager
def seen_as_cuda(watch: DeviceWatch, device: FakeDevice) -> Iterator[None]:
    """Make fake tensors of `cuda` such that autograd, which looks at their device in C++, asks for no GPU."""
    to_list, make_wrapper = FakeTensor.tolist, Tensor._make_wrapper_subclass
    make, group = Tensor._make_subclass, torch._C._group_tensors_by_device_and_dtype

    def made(cls: Any, elem: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = kwargs.get("device_for_backend_keys")
        if cls is FakeTensor and keys is not None and torch.device(keys).type == NVIDIA:
            kwargs["dispatch_device"] = False
        return make(cls, elem, *args, **kwargs)

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return {
            (CUDA if device == META else device, *key): some for (device, *key), some in group(*args, **kwargs).items()
        }

    def is_on(kind: str) -> property:
        return property(lambda tensor: tensor.fake_device.type == kind)

    def listed(tensor: FakeTensor) -> Any:
        if not is_on_cuda(tensor):
            return to_list(tensor)
        watch.host_waits("numbers are read")
        with _disable_current_modes():
            return values_of(tensor).tolist()

    def wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == NVIDIA:
            kwargs["device"] = META
        return make_wrapper(cls, *args, **kwargs)

    attributes: list[tuple[type, str, Any]] = [
        (Tensor, "_make_subclass", staticmethod(made)),
        (Tensor, "_make_wrapper_subclass", staticmethod(wrapper)),
        (DTensor, "device", _of_local("device")),
    ]
    for name, kind in {"is_cuda": NVIDIA, "is_cpu": "cpu", "is_meta": "meta"}.items():
        attributes += [(FakeTensor, name, is_on(kind)), (DTensor, name, _of_local(name))]
    # Not by `FunctionCalls`: torch turns that off in backward, whose hooks ask too.
    answers = (
        (torch._subclasses.fake_tensor, "init_gpu_context", lambda _: None),
        (torch._C, "_group_tensors_by_device_and_dtype", grouped),
        (FakeTensor, "tolist", listed),
        (FakeTensor, "data_ptr", _address),
        (Tensor, "pin_memory", lambda tensor, *_: _pinned(device, tensor)),
        (Tensor, "is_pinned", lambda tensor, *_, **__: device.is_pinned(tensor)),
        (Tensor, "record_stream", lambda tensor, stream, *_: device.keep_for(tensor, stream)),
        (Tensor, "new_tensor", _new_tensor),
        (torch, "tensor", _tensor),
        (torch, "as_tensor", _tensor),
        (torch, "Generator", _generator),
        (F, "scaled_dot_product_attention", _attention),
    )
    for owner, name, value in attributes:
        setattr(owner, name, value)  # these classes only inherit them
    try:
        with ExitStack() as stack:
            for place, name, answer in answers:
                stack.enter_context(replaced(place, name, answer))
            yield
    finally:
        for owner, name, _ in attributes:
            delattr(owner, name)
