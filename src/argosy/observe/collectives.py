"""Time and bytes of this rank's collectives by axis and tier, counted while it trains.

All collectives of a process (our own layers', FSDP2's, those of torch's pipelines) go through three doors: the methods
of `ProcessGroup`, in compiled code the operators of torch's namespace `_c10d_functional`, and with async_tp some of
`symm_mem`. Torch has no public hook there, so `CommunicationMeter` replaces them while it is on, and passes every call
on. What is waited for is the `Work` that a call returned. Bytes are counted by the formulas of `observe.wire`.

On a CPU seconds are those that the caller spent in the call and in the wait; on a GPU those that its compute stream
stood still, between two events that are read when the step's clock waits for the device anyway.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # the operators of `_c10d_functional`
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.profiler import record_function

from argosy.accelerator import Mark, current_stream, is_accelerator, mark
from argosy.observe.counters import NETWORK_TIER, NODE_TIER, OTHER
from argosy.observe.trace_summary import COLLECTIVE_MARK
from argosy.observe.wire import COLLECTIVES, Sent, tensors_in
from argosy.plan.cost.traffic import WORLD

NAME_END = 12
"""Characters kept of a group's name, which may be a long hash."""


def sequence_numbers() -> dict[str, int]:
    """Return process group -> number of collectives that this process has begun in it; groups of one are left out.

    A group's name is its purpose and the end of torch's name for it, the same on all its ranks. Any thread may call
    this, also while another waits in a collective.

    Torch has no public list of groups (`pg_map`), and its flight recorder, which has such numbers in public, only knows
    NCCL's; `_get_sequence_number_for_group` is what torch itself names in the message of a collective that timed out.
    """
    world = distributed_c10d._world
    return {
        f"{group.group_desc}#{name[-NAME_END:]}": group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        for group, name in list(world.pg_names.items())
        if group.size() > 1
    }


Arguments = Callable[..., tuple[Any, ...]]
"""The arguments of a method or functional operator -> those of c10d's operator, as `wire.COLLECTIVES` reads them."""


def _plain(*args: Any) -> tuple[Any, ...]:
    return args


METHODS: dict[str, tuple[str, Arguments]] = {
    "allreduce": ("allreduce_", _plain),
    "allreduce_coalesced": ("allreduce_coalesced_", _plain),
    "allgather": ("allgather_", _plain),
    "_allgather_base": ("_allgather_base_", _plain),
    "all_gather_single": ("_allgather_base_", _plain),
    "allgather_coalesced": ("allgather_coalesced_", _plain),
    "allgather_into_tensor_coalesced": ("allgather_into_tensor_coalesced_", _plain),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced_", _plain),
    "reduce_scatter": ("reduce_scatter_", _plain),
    "_reduce_scatter_base": ("_reduce_scatter_base_", _plain),
    "reduce_scatter_single": ("_reduce_scatter_base_", _plain),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced_", _plain),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced_", _plain),
    "alltoall_base": ("alltoall_base_", lambda out, x, outs, ins, *_: (out, x, None, outs, ins)),
    "all_to_all_single": ("alltoall_base_", lambda out, x, outs, ins, *_: (out, x, None, outs, ins)),
    "alltoall": ("alltoall_", _plain),
    "send": ("send", _plain),
    "recv": ("recv_", _plain),
    "recv_anysource": ("recv_any_source_", _plain),
    "broadcast": ("broadcast_", _plain),
    "reduce": ("reduce_", _plain),
    "gather": ("gather_", lambda out, x, options: (out, x, None, options.rootRank)),
    "scatter": ("scatter_", _plain),
    "barrier": ("barrier", _plain),
    "monitored_barrier": ("monitored_barrier_", _plain),
    "_end_coalescing": ("barrier", _plain),
}
"""Method of `ProcessGroup` -> the operator of c10d that it calls, and its arguments as that operator's."""

FUNCTIONAL: dict[str, tuple[str, int, Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]]] = {
    "all_gather_into_tensor": ("_allgather_base_", 2, lambda y, args: (y, args[0])),
    "all_gather_into_tensor_out": ("_allgather_base_", 2, lambda y, args: (y, args[0])),
    "all_gather_into_tensor_coalesced": ("allgather_into_tensor_coalesced_", 2, lambda y, args: (y, args[0])),
    "reduce_scatter_tensor": ("_reduce_scatter_base_", 3, lambda y, args: (y, args[0])),
    "reduce_scatter_tensor_out": ("_reduce_scatter_base_", 3, lambda y, args: (y, args[0])),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced_", 3, lambda y, args: (y, args[0])),
    "all_reduce": ("allreduce_", 2, lambda y, args: (y,)),
    "all_reduce_": ("allreduce_", 2, lambda y, args: (y,)),
    "all_reduce_coalesced": ("allreduce_coalesced_", 2, lambda y, args: (y,)),
    "all_to_all_single": ("alltoall_base_", 3, lambda y, args: (y, args[0], None, args[1], args[2])),
    "broadcast": ("broadcast_", 2, lambda y, args: (y,)),
    "broadcast_": ("broadcast_", 2, lambda y, args: (y,)),
}
"""Operator of `_c10d_functional` -> that of c10d, where its group stands, and result and arguments as c10d's."""
FUSED_COLLECTIVES: dict[str, tuple[str, int, Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]]] = {
    "fused_all_gather_matmul": ("_allgather_base_", 3, lambda y, args: (y[0],)),
    "fused_matmul_reduce_scatter": (
        "_reduce_scatter_base_", 4, lambda y, args: (y, [y] * (args[0].shape[args[3]] // y.shape[args[3]]))
    ),
}  # fmt: skip
"""The same of operators of `symm_mem`, in which a product hides its messages: they take no time of their own."""


@dataclass(slots=True)
class _Channel:
    """The counts of the groups along one axis, on one tier."""

    axis: str
    tier: str
    is_on_stream: bool
    """True if its collectives are work of the GPU, for which the host does not wait."""
    seconds: float = 0.0
    sent: float = 0
    is_used: bool = False

    @property
    def is_apart(self) -> bool:
        """True if its waits are told apart from own work: how long experts wait for tokens is what the router did."""
        return self.axis != "ep"


class CommunicationMeter:
    """Counts the seconds that this rank waits in collectives and the bytes that it sends, by axis and tier.

        with CommunicationMeter(meshes.axis_of_groups(), node_of_rank, device) as meter:
            ...         # a step
            meter.lap()["tp"]["node"]    # [seconds, bytes]

    Collectives of any thread count, those of evaluations and checkpoints too. One meter is on at a time: another that
    is turned on takes its place. It neither waits for a device nor changes what a call does or returns.
    """

    def __init__(self, axes: Mapping[str, str], node_of_rank: Callable[[int], object], device: torch.device):
        """axes: name of a process group -> the axis that it is along (`Meshes.axis_of_groups`). node_of_rank: the
        machine of a global rank, in any form that can be compared."""
        self._axes, self._node_of_rank, self._device = axes, node_of_rank, device
        # By id, as they are looked up in each collective. A group lives as long as its world, and so does the meter;
        # a work that was dropped and one that has its id now are told apart by the call that made the new one.
        self._channels: dict[int, _Channel] = {}
        self._works: dict[int, _Channel] = {}
        self._tensors: dict[int, _Channel] = {}
        self._spans: list[tuple[_Channel, torch.Event, torch.Event]] = []
        self._is_inside = False
        self._thread, self._apart_s = threading.get_ident(), 0.0
        self._stream = current_stream(device) if is_accelerator(device) else None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        _Doors.open_for(self)

    def close(self) -> None:
        _Doors.close_for(self)

    def marks(self) -> tuple[float, int]:
        """Return how far the count of waits is that are no work: seconds on the host, and spans of the device."""
        return self._apart_s, len(self._spans)

    def waited_s(self, start: tuple[float, int], end: tuple[float, int]) -> float:
        """Return the seconds that the thread of this meter, or its stream, waited between two `marks` of one lap.

        On a GPU, call it after a wait for the device, and before `lap`.
        """
        spans = self._spans[start[1] : end[1]]
        on_device_s = sum(began.elapsed_time(ended) for channel, began, ended in spans if channel.is_apart) / 1e3
        return end[0] - start[0] + float(on_device_s)

    def lap(self) -> dict[str, dict[str, list[float]]]:
        """Return axis -> tier -> [seconds, bytes] since the last lap. On a GPU, call it after a wait for the device."""
        for channel, start, end in self._spans:
            channel.seconds += start.elapsed_time(end) / 1e3
        self._spans.clear()
        self._works.clear()
        self._tensors.clear()
        found: dict[str, dict[str, list[float]]] = {}
        for channel in self._channels.values():
            if channel.is_used:
                both = found.setdefault(channel.axis, {}).setdefault(channel.tier, [0.0, 0])
                both[0] += channel.seconds
                both[1] += channel.sent
                channel.seconds, channel.sent, channel.is_used = 0.0, 0, False
        return found

    def call(self, call: Any, args: Any, kw: Any, sent: Sent, arguments: Arguments) -> Any:
        """Carry out a method of `ProcessGroup`, and count it."""
        group, *others = args
        channel = self._channels.get(id(group)) or self._meet(group)
        start = self._mark(channel)
        work = call(*args, **kw)
        self._took(channel, start)
        try:  # noqa: SIM105  a context manager takes longer, in every collective
            channel.sent += round(sent(arguments(*others), group))
        except Exception:  # torch has changed its arguments: the step goes on, without these bytes
            pass
        if work is not None:
            self._works[id(work)] = channel
        return work

    def wait(self, call: Any, args: Any, kw: Any) -> Any:
        """Carry out `Work.wait`, and count it."""
        channel = self._works.pop(id(args[0]), None)
        return call(*args, **kw) if channel is None else self._waited(channel, call, args, kw)

    def call_functional(self, call: Any, args: Any, kw: Any, name: str) -> Any:
        """Carry out an operator of `FUNCTIONAL` or `FUSED_COLLECTIVES`, and count it: once, if it calls more."""
        if self._is_inside:
            return call(*args, **kw)
        began_s = time.perf_counter()
        self._is_inside = True
        try:
            result = call(*args, **kw)
        finally:
            self._is_inside = False
        results = list(tensors_in(result))
        if all(type(tensor) is Tensor for tensor in results):  # not while the compiler tries it out on fake ones
            with suppress(Exception):
                operator, place, arguments = (FUNCTIONAL | FUSED_COLLECTIVES)[name]
                group = _group(args[place])
                channel = self._channels.get(id(group)) or self._meet(group)
                channel.is_used = True
                if not channel.is_on_stream:
                    self._add(channel, time.perf_counter() - began_s)
                channel.sent += round(COLLECTIVES[operator][1](arguments(result, args), group))
                for tensor in results:
                    self._tensors[tensor.data_ptr()] = channel
        return result

    def wait_functional(self, call: Any, args: Any, kw: Any) -> Any:
        """Carry out `_c10d_functional.wait_tensor`, and count it."""
        channel = self._tensors.pop(args[0].data_ptr(), None) if type(args[0]) is Tensor else None
        return call(*args, **kw) if channel is None else self._waited(channel, call, args, kw)

    def _waited(self, channel: _Channel, wait: Any, args: Any, kw: Any) -> Any:
        start = self._mark(channel)
        try:
            return wait(*args, **kw)
        finally:
            self._took(channel, start)

    def _meet(self, group: dist.ProcessGroup) -> _Channel:
        """Return a group's channel, the first time that it is used."""
        ranks = dist.get_process_group_ranks(group)
        unnamed = WORLD if len(ranks) == dist.get_world_size() else OTHER
        tier = NODE_TIER if len({self._node_of_rank(rank) for rank in ranks}) == 1 else NETWORK_TIER
        is_on_stream = self._stream is not None and dist.get_backend(group) != "gloo"
        channel = self._channels[id(group)] = _Channel(self._axes.get(group.group_name, unnamed), tier, is_on_stream)
        return channel

    def _mark(self, channel: _Channel) -> Mark | None:
        """Return the present; on a GPU None in another stream than that of the arithmetic, which does not wait here."""
        if not channel.is_on_stream:
            return time.perf_counter()
        return mark(self._device) if current_stream(self._device) == self._stream else None

    def _took(self, channel: _Channel, start: Mark | None) -> None:
        channel.is_used = True
        if isinstance(start, float):
            self._add(channel, time.perf_counter() - start)
        elif start is not None and isinstance(end := self._mark(channel), torch.Event):
            self._spans.append((channel, start, end))

    def _add(self, channel: _Channel, seconds: float) -> None:
        channel.seconds += seconds
        if channel.is_apart and threading.get_ident() == self._thread:
            self._apart_s += seconds


class _Replaced:
    """Attributes of torch's classes that are replaced for a while."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Put what `around` makes of the original in its place, if `owner` has it: another version may lack it."""
        if (original := getattr(owner, name, None)) is not None:
            # As the class has it: what getattr gives of a class is no longer bound to an instance.
            self._originals.append((owner, name, vars(owner).get(name, original)))
            setattr(owner, name, around(original))

    def restore(self) -> None:
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()


class _Doors:
    """The calls of torch that collectives go through, replaced while a meter is on."""

    meter: CommunicationMeter | None = None
    _replaced = _Replaced()

    @classmethod
    def open_for(cls, meter: CommunicationMeter) -> None:
        if cls.meter is None:
            cls._replace_all()
        cls.meter = meter

    @classmethod
    def close_for(cls, meter: CommunicationMeter) -> None:
        if cls.meter is not meter:
            return
        cls.meter = None
        cls._replaced.restore()

    @classmethod
    def _replace_all(cls) -> None:
        for name, (operator, arguments) in METHODS.items():
            count = partial(CommunicationMeter.call, sent=COLLECTIVES[operator][1], arguments=arguments)
            cls._replaced.replace(dist.ProcessGroup, name, partial(_counted, count))
        cls._replaced.replace(dist.Work, "wait", partial(_counted, CommunicationMeter.wait))
        operators = torch.ops._c10d_functional
        for owner, names in ((operators, FUNCTIONAL), (torch.ops.symm_mem, FUSED_COLLECTIVES)):
            for name in names:
                count = partial(CommunicationMeter.call_functional, name=name)
                if (packet := getattr(owner, name, None)) is not None:
                    for callee in (packet, packet.default):  # Python code calls the one, compiled code the other
                        cls._replaced.replace(callee, "_op", partial(_counted, count))
        for callee in (operators.wait_tensor, operators.wait_tensor.default):
            cls._replaced.replace(callee, "_op", partial(_counted, CommunicationMeter.wait_functional))


def _counted(count: Callable[..., Any], call: Any) -> Any:
    """Return what does `call`, by way of the meter that is on. count: the meter's method that carries it out."""

    def counted(*args: Any, **kw: Any) -> Any:
        meter = _Doors.meter
        return call(*args, **kw) if meter is None else count(meter, call, args, kw)

    return counted


def _group(group: Any) -> dist.ProcessGroup:
    """Return the group, which compiled code names by its name."""
    return group if isinstance(group, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(group)


class CollectiveMarks:
    """A block in which collectives are marked."""

    def __init__(self, axes: Mapping[str, str]):
        """axes: name of a process group -> the axis that it is along (`Meshes.axis_of_groups`)."""
        self._axes = axes
        self._numbers = itertools.count()
        self._works: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._replaced = _Replaced()

    def __enter__(self) -> Self:
        for name in METHODS:
            self._replaced.replace(dist.ProcessGroup, name, partial(self._marked, name))
        self._replaced.replace(dist.Work, "wait", self._waiting)
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.restore()

    def _marked(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(group: dist.ProcessGroup, *args: Any, **kw: Any) -> Any:
            unnamed = WORLD if group.size() == dist.get_world_size() else OTHER
            mark = f"{COLLECTIVE_MARK}{self._axes.get(group.group_name, unnamed)}/{name}#{next(self._numbers)}"
            with record_function(mark):
                work = call(group, *args, **kw)
            if isinstance(work, dist.Work):
                self._works[work] = mark
            return work

        return marked

    def _waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(work: dist.Work, *args: Any, **kw: Any) -> Any:
            mark = self._works.get(work)
            if mark is None:
                return wait(work, *args, **kw)
            with record_function(f"{mark}/wait"):
                return wait(work, *args, **kw)

        return waiting
