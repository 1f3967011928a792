"""A rank of a world that does not exist: tensors without memory, and messages without an answer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from argosy.errors import UserError
from argosy.observe.wire import OperatorWatch, tensors_in
from argosy.parallel.world import World, leave_world

WITHOUT_META = (torch.ops.c10d.send.default, torch.ops.c10d.allgather_into_tensor_coalesced_.default)
"""Messages that torch cannot send on fake tensors; the second is DTensor's gathering."""
SOME_NUMBER = 1.0
"""The value of any floating-point number that is read: a loss, a gradient's norm."""


class FakeMemoryMode(FakeTensorMode):
    """While it is on, tensors have shape, dtype and device and no memory; but host knowledge stays real.

    What code decides by numbers it decides by small integers: where documents start, the ranks of a mesh, the tokens of
    each expert. Tensors of integers that are made from nothing or from other such are real; whatever meets a fake
    tensor is fake. Other ranks are taken to have the same integers as this one.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and not self.in_kernel_invocation:
            return args[0].fake_device  # every second call: no need for the long way round
        if _is_known(func, args, kwargs):
            result = func(*args, **kwargs)
            if func.namespace == "c10d":
                answer_alike(func.name(), args)
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            if not args[0].is_floating_point():
                raise UserError(
                    "the step reads a whole number off the device that follows from the data, so it cannot be "
                    "simulated. Try model.moe.capacity_factor = 0 or another plan."
                )
            return SOME_NUMBER
        if func in WITHOUT_META:
            return work_that_holds(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


def work_that_holds(tensors: list[Tensor]) -> torch.ScriptObject:
    """Return the boxed result of a message: as with a real one, its tensors stay alive as long as it does."""
    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result(tensors)
    return _create_work_from_future(done).boxed()


def _is_known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    if any(tensor.is_meta for tensor in tensors):
        return device is None or device.type == "meta"
    if device is not None and device.type == "meta":
        return True
    if not tensors and dtype is None:
        return func.overloadpacket is torch.ops.aten.arange and all(isinstance(arg, int) for arg in args)
    return dtype is None or not dtype.is_floating_point


def answer_alike(collective: str, args: tuple[Any, ...]) -> None:
    """Fill what a collective of real integers received, as if all ranks had the same ones.

    The only ones that one rank sends to one are the votes by which a pipeline's stages find out whether each of them
    knows what it will receive: 1, it does.
    """
    received = tensors_in(args[0])
    if "recv" in collective:
        for tensor in received:
            tensor.fill_(1)
    elif "allgather" in collective:
        mine = next(tensors_in(args[1])).clone()  # FSDP2 sends a part of what it receives into
        for tensor in received:
            tensor.view(-1, *mine.shape).copy_(mine)
    elif "alltoall" in collective:
        group = dist.ProcessGroup.unbox(args[2])
        for_me = args[1].chunk(group.size())[group.rank()]
        args[0].view(-1, *for_me.shape).copy_(for_me)


ModeT = TypeVar("ModeT", bound=FakeTensorMode)


@contextmanager
def fake_memory(mode: ModeT) -> Iterator[ModeT]:
    """Turn `mode` on in this block. Two of torch's parts are told that tensors have no memory, a third that messages
    last until they are waited for, as gloo's reduce-scatters do: no public switch does."""
    reset, propagate = FSDPParam.reset_sharded_param, ShardingPropagator._propagate_tensor_meta_non_cached

    def reset_if_new(self: FSDPParam) -> None:
        """FSDP2 pads what has a new address. Fake memory has none, so whether it is new is asked here."""
        parameter = getattr(self._module_info.module, self._module_info.param_name)
        if parameter.to_local().untyped_storage() is not self._sharded_param_data.untyped_storage():
            reset(self)

    def propagate_unseen(self: ShardingPropagator, operation: Any) -> Any:
        """DTensor tries out new operations on fake tensors of global size: these are no one's memory."""
        with _disable_current_modes():
            return propagate(self, operation)

    with (
        replaced(FSDPParam, "reset_sharded_param", reset_if_new),
        replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unseen),
        replaced(FakeWork, "is_completed", lambda _: False),
        mode,
    ):
        yield mode


@contextmanager
def replaced(owner: type | ModuleType, name: str, function: Any) -> Iterator[None]:
    """Put `function` in the place of `owner`'s method, property or function `name` while this block runs."""
    # As the owner itself has it: what getattr gives of a class would be bound to no instance any more.
    original = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if original is not None:
            setattr(owner, name, original)
        else:
            delattr(owner, name)  # it only inherits that


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """Be rank `rank` of `size` on the CPU, in this process alone: collectives return at once, and send nothing."""
    if size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, size)
    finally:
        leave_world()


def is_view(operator: torch._ops.OpOverload) -> bool:
    """Return True if the operator's result is the memory of an argument, which it leaves as it is."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns)


def is_in_place(operator: torch._ops.OpOverload) -> bool:
    """Return True if the operator's result is an argument that it writes to."""
    return any(r.alias_info is not None and r.alias_info.is_write for r in operator._schema.returns)


Formula = Callable[..., int]
"""(operator's arguments..., out_val=its result) -> FLOPs."""


def flops_of(operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> int:
    """Return the FLOPs of `operator(*args)`, a multiplication and an addition being two; 0 unless it is a contraction.

    Causal attention counts the half that is not masked, and its backward as two forwards, as `plan.workload` does: that
    a fused kernel computes the scores once more does not count.
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


class LiveBytes(OperatorWatch):
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
        """Note that the memory with this number had `before` bytes and now has `after`. For subclasses."""

    def freed(self, memory: int) -> None:
        """Note that the memory with this number is gone; other memory may get the number. For subclasses."""

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
