"""The answers of a GPU that is not there to what torch is asked: streams, events, memory, properties."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork

from argosy.accelerator import NVIDIA
from argosy.observe.collectives import METHODS
from argosy.observe.wire import tensors_in
from argosy.plan.plan import HOPPER
from argosy.simulate.device_watch import DEFAULT, HOST_STREAM, Clock, DeviceWatch
from argosy.simulate.fake import is_in_place, is_view, replaced

FAKE_MEMORY_BYTES = 80 * 2**30
BLACKWELL = (10, 0)
"""Compute capability: what the step asks for is what is fast there."""
FAKE_NAME = "NVIDIA H100 (not there)"


class FakeDevice:
    """The device's streams and memory, as far as a step can tell."""

    def __init__(self, watch: DeviceWatch) -> None:
        self._watch, self.clocks = watch, watch.streams
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self._pinned: dict[int, int] = {}  # memory -> bytes
        self._pool: Counter[int] = Counter()  # bytes -> blocks that are free
        self._last_sent: Clock = {}
        self._works: dict[int, tuple[dist.Work, Clock]] = {}
        self._under_way: dict[int, Clock] = {}  # memory -> what the message that fills it carries
        self.default = FakeStream(self, DEFAULT)

    # ---- streams

    @property
    def stacked(self) -> list[FakeStream]:
        """The streams that this thread has entered, the innermost last."""
        if not hasattr(self._local, "streams"):
            self._local.streams = [self.default]
        streams: list[FakeStream] = self._local.streams
        return streams

    @property
    def stream(self) -> FakeStream:
        return self.stacked[-1]

    def new_stream(self) -> FakeStream:
        return FakeStream(self, f"stream {next(self._numbers)}")

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator ran on the current stream."""
        if is_view(func):
            return
        if "empty" in func.name():
            for tensor in tensors_in(result):
                self.clocks.made(tensor, self.stream.name)
            return
        written = [*tensors_in(result)]
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += tensors_in([value])
        read = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        self.clocks.ran(self.stream.name, read, written)

    def host_ran(self, func: Any, args: Any) -> None:
        """An operator ran on the host: what it touches may be under way."""
        tensors = [tensor for tensor in tensors_in(args) if id(tensor.untyped_storage()) in self._pinned]
        if not tensors or is_view(func):
            return
        written = tensors[:1] if is_in_place(func) and args[0] is tensors[0] else []
        self.clocks.ran(HOST_STREAM, tensors[len(written) :], written)

    def copied(self, source: Tensor, to: Tensor) -> None:
        """A copy between host and device is put on the current stream."""
        self.clocks.ran(self.stream.name, [source], [to])

    # ---- pinned memory: torch keeps what was freed, by powers of two

    def pin(self, tensor: Tensor) -> None:
        """Note that a tensor is in pinned memory."""
        storage = tensor.untyped_storage()
        key, size = id(storage), 1 << max(0, tensor.nbytes - 1).bit_length()
        if key in self._pinned:
            return
        if self._pool[size]:
            self._pool[size] -= 1
        else:
            self._watch.host_waits("host memory is pinned")
        self._pinned[key] = size
        weakref.finalize(storage, self._unpin, key).atexit = False

    def is_pinned(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._pinned

    def _unpin(self, key: int) -> None:
        self._pool[self._pinned.pop(key)] += 1

    # ---- messages: each group's go on a stream of their own, after all that is on the current one

    def sent(self, group: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        clocks, name = self.clocks, f"stream of group {group[-12:]}"
        clocks.wait(name, clocks.record(self.stream.name))
        clocks.ran(name, read, written)
        self._last_sent = clocks.record(name)
        for tensor in written:
            self._under_way[id(tensor.untyped_storage())] = self._last_sent

    def wait_for(self, tensor: Tensor) -> None:
        """Functional collectives: the current stream waits for what fills this tensor."""
        if (carried := self._under_way.pop(id(tensor.untyped_storage()), None)) is not None:
            self.clocks.wait(self.stream.name, carried)

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of a process group, and remember what its work carries."""
        work = method(*args, **kwargs)
        if work is not None:
            self._works[id(work)] = work, self._last_sent
        return work

    def wait_work(self, wait: Callable[..., Any], work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        """The current stream waits for a message; the host does not."""
        _, carried = self._works.pop(id(work), (None, {}))
        self.clocks.wait(self.stream.name, carried)
        return wait(work, *args, **kwargs)

    def host_waits_for(self, carried: Clock, what: str) -> None:
        self._watch.host_waits(what)
        self.clocks.host_waits(carried)


class FakeStream:
    """A stream, as `torch.Stream` and `torch.cuda.Stream` are."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device, self.name = device, name
        self.device = torch.device(NVIDIA, 0)
        self.device_index, self.device_type, self.stream_id = 0, 1, abs(hash(name)) % 2**31
        self.cuda_stream = self.stream_id

    def __enter__(self) -> FakeStream:
        self._device.stacked.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._device.stacked.pop()

    def wait_stream(self, other: FakeStream) -> None:
        self._device.clocks.wait(self.name, self._device.clocks.record(other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self._device.clocks.wait(self.name, event.carried)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._device.host_waits_for(self._device.clocks.record(self.name), "a stream is waited for")

    def query(self) -> bool:
        return True


class FakeEvent:
    """An event, as `torch.Event` and `torch.cuda.Event` are."""

    def __init__(self, device: FakeDevice) -> None:
        self._device, self.carried = device, Clock()
        self.device = torch.device(NVIDIA, 0)

    def record(self, stream: FakeStream | None = None) -> None:
        self.carried = self._device.clocks.record((stream or self._device.stream).name)

    def wait(self, stream: FakeStream | None = None) -> None:
        self._device.clocks.wait((stream or self._device.stream).name, self.carried)

    def synchronize(self) -> None:
        self._device.host_waits_for(self.carried, "an event is waited for")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


@contextmanager
def answered(device: FakeDevice, watch: DeviceWatch, capability: tuple[int, int] = HOPPER) -> Iterator[None]:
    """Answer `torch.cuda`, `torch.accelerator`, streams and events by `device` while this block runs."""
    cuda, accelerator = torch.device(NVIDIA, 0), torch.accelerator
    everything = SimpleNamespace(
        name=FAKE_NAME,
        total_memory=FAKE_MEMORY_BYTES,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
    )
    state = torch.zeros(16, dtype=torch.uint8)

    def new_stream(*_: Any, **__: Any) -> FakeStream:
        return device.new_stream()

    def new_event(*_: Any, **__: Any) -> FakeEvent:
        return FakeEvent(device)

    shared: dict[str, Any] = {
        "synchronize": lambda *_: watch.host_waits("the device is waited for"),
        "current_stream": lambda *_: device.stream,
        "is_available": lambda *_: True,
        "device_count": lambda: 8,
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_stats": lambda *_: {},
    }
    of_cuda: dict[str, Any] = shared | {
        "Stream": new_stream,
        "Event": new_event,
        "stream": lambda stream: stream,
        "default_stream": lambda *_: device.default,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: FAKE_NAME,
        "get_device_properties": lambda *_: everything,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (FAKE_MEMORY_BYTES, FAKE_MEMORY_BYTES),
        "get_rng_state": lambda *_: state.clone(),
        "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda _: None,
    }
    of_accelerator: dict[str, Any] = shared | {
        "current_accelerator": lambda *_, **__: cuda,
        "set_device_index": lambda _: None,
        "current_device_index": lambda: 0,
        "get_memory_info": lambda *_: (FAKE_MEMORY_BYTES, FAKE_MEMORY_BYTES),
    }
    with ExitStack() as stack:
        for owner, answers in ((torch.cuda, of_cuda), (accelerator, of_accelerator)):
            for name, answer in answers.items():
                if hasattr(owner, name):
                    stack.enter_context(replaced(owner, name, answer))
        stack.enter_context(replaced(torch, "Stream", new_stream))
        stack.enter_context(replaced(torch, "Event", new_event))
        for name in METHODS:
            if hasattr(dist.ProcessGroup, name):
                stack.enter_context(
                    replaced(dist.ProcessGroup, name, _calling(device, getattr(dist.ProcessGroup, name)))
                )
        for kind in (dist.Work, FakeWork):
            stack.enter_context(replaced(kind, "wait", _waiting(device, kind.wait)))
        yield


def _calling(device: FakeDevice, method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: device.call(method, *args, **kwargs)


def _waiting(device: FakeDevice, wait: Callable[..., Any]) -> Callable[..., Any]:
    return lambda work, *args, **kwargs: device.wait_work(wait, work, *args, **kwargs)
