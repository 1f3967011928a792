"""A rank of a world that does not exist: tensors without memory, and messages without an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch has no public names for fake tensors, the process group that pretends, and what they need to know.
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from argosy.errors import UserError
from argosy.observe.wire import tensors_in
from argosy.parallel.world import World, leave_world

SOME_NUMBER = 1.0
"""The value of any floating-point number that is read: a loss, a gradient's norm."""


class Fake(FakeTensorMode):
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
                _answer_alike(func.name(), args)
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            if not args[0].is_floating_point():
                raise UserError(
                    "the step reads a whole number off the device that follows from the data, so it cannot be "
                    "simulated. Try model.moe.capacity_factor = 0 or another plan."
                )
            return SOME_NUMBER
        if func is torch.ops.c10d.send.default:
            return _work_that_holds(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


def _work_that_holds(tensors: list[Tensor]) -> torch.ScriptObject:
    """Return the boxed result of a send: as with a real one, the sent tensors stay alive as long as it does."""
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


def _answer_alike(collective: str, args: tuple[Any, ...]) -> None:
    """Fill what a collective of real integers received, as if all ranks had the same ones.

    The only ones that one rank sends to one are the votes by which a pipeline's stages find out whether each of them
    knows what it will receive: 1, it does.
    """
    received = tensors_in(args[0])
    if "recv" in collective:
        for tensor in received:
            tensor.fill_(1)
    elif "allgather" in collective:
        mine = next(tensors_in(args[1]))
        for tensor in received:
            tensor.view(-1, *mine.shape).copy_(mine)
    elif "alltoall" in collective:
        group = dist.ProcessGroup.unbox(args[2])
        for_me = args[1].chunk(group.size())[group.rank()]
        args[0].view(-1, *for_me.shape).copy_(for_me)


@contextmanager
def fake_memory() -> Iterator[Fake]:
    """Tensors made in this block have no memory. Two of torch's parts are told so, which no public switch does."""
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
        Fake() as fake,
    ):
        yield fake


@contextmanager
def replaced(owner: type | ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`function` is the method or function `name` of `owner` while this block runs."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """Rank `rank` of `size` on the CPU, in this process alone: collectives return at once, and send nothing."""
    if size > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, size)
    finally:
        leave_world()
