"""A GPU that is not there: tensors on `cuda` without memory, whose operators a `DeviceWatch` looks at.

The code that trains runs as it is. To autograd's C++ the tensors are on the meta device, since torch without CUDA has
no streams that it could ask; Python, and so all device checks of `FakeTensorMode`, sees `cuda`. What C++ makes "on the
device of that tensor" comes here as a wish for a meta tensor, and becomes one on `cuda`, unless Python wished for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from argosy.accelerator import CPU, NVIDIA
from argosy.errors import RunFailed
from argosy.observe.wire import tensors_in
from argosy.simulate.cuda_calls import FakeDevice
from argosy.simulate.device_watch import DeviceWatch, place_in_code
from argosy.simulate.fake import SOME_NUMBER, answer_alike, is_in_place, work_that_holds

CUDA, META = torch.device(NVIDIA, 0), torch.device("meta")
MOST_KNOWN_VALUES = 2**16
"""Tensors of at most so many whole numbers, truth values or fp64 numbers have values: what steps decide by is such."""
WITH_VALUES = (torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
aten = torch.ops.aten
WAITS = {
    aten.nonzero.default: "nonzero: how many there are must be known",
    aten.masked_select.default: "masked_select: how many there are must be known",
    aten._unique2.default: "unique: how many there are must be known",
    aten.unique_consecutive.default: "unique: how many there are must be known",
    aten.unique_dim.default: "unique: how many there are must be known",
    aten.bincount.default: "bincount: the largest must be known",
    aten.equal.default: "a comparison is read",
    aten.is_nonzero.default: "a truth value is read",
}
"""Operators whose CUDA kernels make the host wait (torch.cuda.set_sync_debug_mode warns of these)."""


class MisplacedTensor(RunFailed):
    """Tensors of two devices have met."""


class FakeCudaMode(FakeTensorMode):
    """While it is on, tensors on `cuda` have shape, dtype and device, and no memory; the host's are real, if small.

    Whole numbers, truth values and fp64 numbers on the device have values besides, as far as they follow from the
    host's. Any other number is 1 when it is read.
    """

    def __init__(self, watch: DeviceWatch, device: FakeDevice) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._watch, self._device = watch, device
        self.python_wants_meta = False
        self.calls = FunctionCalls(self)
        self.host_groups: set[str] = set()
        """Names of the process groups for tensors in host memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        result = self._result(func, types, args, kwargs)
        if is_pinned:
            self._device.pin(result)
        return result

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.prim.device.default and not self.in_kernel_invocation:
            return args[0].fake_device
        namespace = getattr(func, "namespace", "")
        if namespace == "argosy":  # our own operators: what they do inside is the question
            with self.calls, self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)
        if namespace in ("c10d", "_c10d_functional"):
            return self._send(func, types, args, kwargs)
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        for tensor in given:
            if type(tensor).__module__.startswith("torchao."):  # of fake tensors, on which its operators compute
                with self.calls, self:
                    return type(tensor).__torch_dispatch__(func, types, args, kwargs)
        wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if wanted == META and not self.python_wants_meta and not any(map(_is_meta, given)):
            wanted = kwargs["device"] = CUDA
        meets_cuda = any(map(is_on_cuda, given))
        if not meets_cuda and (wanted is None or wanted.type != NVIDIA):
            return self._on_host(func, types, args, kwargs, given)
        return self._near_cuda(func, types, args, kwargs, wanted)

    def _near_cuda(self, func: Any, types: Any, args: Any, kwargs: Any, wanted: torch.device | None) -> Any:
        if func is aten._local_scalar_dense.default:
            self._watch.host_waits("a number is read")
            return values_of(args[0]).item()
        if func is aten._to_copy.default and wanted is not None and _is_host(args[0]) != (wanted.type == "cpu"):
            return self._moved(func, types, args, kwargs)
        if func is aten.copy_.default and _is_host(args[0]) != _is_host(args[1]):
            return self._copied(func, types, args, kwargs)
        return self._on_cuda(func, types, args, kwargs)

    # ---- where operators run

    def _on_host(self, func: Any, types: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            if func is aten._local_scalar_dense.default:
                return SOME_NUMBER
            return super().__torch_dispatch__(func, types, args, kwargs)
        if not given and _elements(args) > MOST_KNOWN_VALUES and kwargs.get("device") != META:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if given:
            self._device.host_ran(func, args)
        return func(*args, **kwargs)

    def _on_cuda(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._note_waits(func, args, kwargs)
        try:
            result = self._faked(func, types, args, kwargs)
        except (TypeError, RuntimeError) as error:  # FakeTensorMode's are either
            if "devices" not in str(error):
                raise
            self._watch.wrong_device(f"{func}: {str(error).splitlines()[0]}")
            raise MisplacedTensor(f"{place_in_code()}: {func}: {error}") from error
        if func.namespace != "prim":
            self._device.ran(func, args, kwargs, result)
        return result

    def _faked(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator on what has no memory, and on the values that there are."""
        known = _known_result(func, args, kwargs)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if known is None:
                raise
            if not isinstance(known, (Tensor, tuple, list)):
                return known  # a truth value: of `equal`
            result = tree_map(lambda x: self._empty(x.shape, x.dtype) if isinstance(x, Tensor) else x, known)
        _keep_values(result, known)
        return result

    # ---- between host and device

    def _moved(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        source, is_free = args[0], kwargs.get("non_blocking", False)
        dtype = kwargs.get("dtype") or source.dtype
        if _is_host(source):
            result = self._empty(source.shape, dtype)
            if dtype in WITH_VALUES and not isinstance(source, FakeTensor) and source.numel() <= MOST_KNOWN_VALUES:
                with _disable_current_modes():
                    result.values_on_host = source.detach().to(dtype, copy=True)
            is_free = is_free and self._device.is_pinned(source)
        elif source.numel() > MOST_KNOWN_VALUES:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            with _disable_current_modes():
                result = values_of(source).to(dtype, copy=True)
        if is_free and not _is_host(source):
            self._device.pin(result)  # as torch makes it then
        self._device.copied(source, result)
        if not is_free:
            self._watch.host_waits(_copy_of(source))
        return result

    def _copied(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        to, source, is_free = args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False)
        if not _is_host(to) or isinstance(to, FakeTensor):
            result = self._faked(func, types, args, kwargs)
        else:
            with _disable_current_modes():
                if to.numel() <= MOST_KNOWN_VALUES:
                    to.copy_(values_of(source))
            result = to
        self._device.copied(source, to)
        if not (is_free and self._device.is_pinned(to if _is_host(to) else source)):
            self._watch.host_waits(_copy_of(source))
        return result

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> Any:
        return super().__torch_dispatch__(
            aten.empty.memory_format, (), (list(shape),), {"dtype": dtype, "device": CUDA}
        )

    def _note_waits(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in WAITS:
            self._watch.host_waits(WAITS[func])
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._watch.host_waits("repeat_interleave: how many there are must be known (output_size)")
        elif func in (
            aten.index.Tensor,
            aten.index_put.default,
            aten.index_put_.default,
            aten._index_put_impl_.default,
        ):
            indices = [index for index in args[1] if index is not None]
            has_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
            if has_mask and func is not aten.index.Tensor:  # which comes here again as nonzero
                self._watch.host_waits("a mask as an index: how many there are must be known")
            elif not has_mask and any(_is_host(index) for index in indices):
                self._watch.host_waits("an index in host memory is copied")

    # ---- messages

    def _send(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        tensors = [*tensors_in(args)] if "barrier" not in func.name() else []
        if func.namespace == "_c10d_functional":
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if "wait_tensor" in func.name():
                self._device.wait_for(args[0])
            else:
                self._device.sent(_functional_group(args), [*tensors], [*tensors_in(result)])
            return result
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        is_for_host = group.group_name in self.host_groups
        if any(_is_host(tensor) != is_for_host for tensor in tensors):
            where = "in host memory" if not is_for_host else "on the device"
            self._watch.wrong_device(f"{func}: a tensor {where} in a group for the other")
            raise MisplacedTensor(f"{place_in_code()}: {func}: a tensor {where} in a group for the other")
        if is_for_host:
            result = func(*args, **kwargs)
            answer_alike(func.name(), args)
            return result
        values = [value for tensor in tensors if (value := _known(tensor)) is not None]
        if func is torch.ops.c10d.send.default:
            result = work_that_holds(args[0])
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        if tensors and len(values) == len(tensors):
            with _disable_current_modes():
                answer_alike(func.name(), tree_map(lambda x: _known(x) if isinstance(x, Tensor) else x, args))
                if func is torch.ops.c10d.allreduce_.default:
                    for value in values:
                        value.mul_(group.size())
        if "barrier" in func.name():
            self._watch.host_waits("a barrier")
        written = [] if "send" in func.name() else [*tensors_in(args[:1])]  # what a collective fills comes first
        self._device.sent(group.group_name, tensors, written)
        return result


def is_on_cuda(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == NVIDIA


def _is_meta(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.is_meta


def _is_host(tensor: Tensor) -> bool:
    return not is_on_cuda(tensor)


def _copy_of(source: Tensor) -> str:
    return "a copy out of memory that is not pinned" if _is_host(source) else "a copy to the host"


def _elements(args: Any) -> int:
    shape = args[0] if args else ()
    return math.prod(shape) if isinstance(shape, (list, tuple)) and all(isinstance(n, int) for n in shape) else 0


def _functional_group(args: Any) -> str:
    return next((str(arg) for arg in reversed(args) if isinstance(arg, str)), "")


# Values


def _known(tensor: Tensor) -> Tensor | None:
    return getattr(tensor, "values_on_host", None) if isinstance(tensor, FakeTensor) else tensor


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of a tensor on the device; ones where they do not follow from the host's."""
    known = _known(tensor)
    return torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known


def _known_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return `func` of the values, on the host; None if the result can have none."""
    given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    may_have = kwargs.get("dtype") in WITH_VALUES or any(tensor.dtype in WITH_VALUES for tensor in given)
    if not may_have and (given or kwargs.get("dtype") is not None):
        return None
    if any(tensor.numel() > MOST_KNOWN_VALUES for tensor in given) or (
        not given and _elements(args) > MOST_KNOWN_VALUES
    ):
        return None
    is_written = is_in_place(func)
    if is_written and args and isinstance(args[0], Tensor) and args[0].dtype not in WITH_VALUES:
        return None
    with _disable_current_modes():
        real = tree_map(lambda x: _persisted(x, is_written) if isinstance(x, Tensor) else x, (args, kwargs))
        try:
            return func(*real[0], **real[1] | ({"device": CPU} if real[1].get("device") is not None else {}))
        except Exception:  # the host lacks the kernel, or has no such numbers: then there are no values
            return None


def _persisted(tensor: Tensor, is_written: bool) -> Tensor:
    values = values_of(tensor)
    if is_written and isinstance(tensor, FakeTensor):
        tensor.values_on_host = values  # type: ignore[attr-defined]
    return values


def _keep_values(result: Any, known: Any) -> None:
    for fake, value in zip(tensors_in(result), tensors_in(known), strict=False):
        if isinstance(fake, FakeTensor) and fake.dtype in WITH_VALUES and fake.shape == value.shape:
            fake.values_on_host = value  # type: ignore[attr-defined]
    if known is None:  # what is written over has no known values any more
        for tensor in tensors_in(result):
            if isinstance(tensor, FakeTensor) and hasattr(tensor, "values_on_host"):
                del tensor.values_on_host


# Calls that do not come to the dispatcher as they would on a GPU


class FunctionCalls(TorchFunctionMode):
    """Tells apart what Python itself wants on the meta device from what C++ asks for."""

    def __init__(self, fake: FakeCudaMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wish, before = kwargs.get("device"), self._fake.python_wants_meta
        self._fake.python_wants_meta = before or (wish is not None and str(wish) == "meta")
        try:
            return func(*args, **kwargs)
        finally:
            self._fake.python_wants_meta = before
