"""Records what one rank does in a step: memory that comes and goes, arithmetic, messages."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from argosy.accelerator import CPU
from argosy.models.decoder import Block, Decoder
from argosy.observe.clock import StepClock
from argosy.observe.counters import Category as Part
from argosy.observe.wire import Message, message_of, nbytes, tensors_in
from argosy.simulate.fake import LiveBytes, flops_of, is_view

Category = Literal["parameters", "gathered", "gradients", "optimizer", "activations", "host", "other"]
"""Uses of memory:

parameters    what the rank holds of the weights
gathered      weights that FSDP2 has gathered from other ranks, whole
gradients     what backward has made and left behind, on the way to other ranks too
optimizer     moments
activations   what forward has made and left behind for backward, in recomputation too
host          what `plan.offload` keeps in host memory: no part of the device's
other         what comes and goes within a pass, and buffers
"""
Phase = Literal["forward", "recompute", "backward", "communication", "optimizer", "other"]

LEFT_BY: dict[Phase, Category] = {
    "forward": "activations",
    "recompute": "activations",
    "backward": "gradients",
    "communication": "gradients",
    "optimizer": "optimizer",
    "other": "other",
}
"""Memory that outlives the phase that made it."""


aten = torch.ops.aten
NO_WORK = (aten._local_scalar_dense.default, aten._unsafe_view.default)
"""Operators that move nothing, though they are said to make no view."""
OVERWRITES = (aten.copy_, aten.fill_, aten.zero_)
"""Operators that do not read their first argument."""
LOOK_UPS = (aten.embedding, aten.gather, aten.index, aten.index_select)
"""Operators that read as much of their first argument as they return."""


class StepPlace(NamedTuple):
    phase: Phase
    layer: int | None
    """None: in no layer, but in the embedding, the head, or around the model."""

    def __str__(self) -> str:
        return f"{self.phase} outside of layers" if self.layer is None else f"{self.phase} of layer {self.layer}"


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A piece of memory; what it is for is known only when it is freed, or when its phase is over."""

    category: Category = "other"
    alive: bool = True


class Change(NamedTuple):
    """Memory comes (bytes > 0) or goes."""

    bytes: int
    memory: MemoryBlock
    where: StepPlace


class Operation(NamedTuple):
    name: str
    flops: int
    moved_bytes: int
    """Read and written."""
    dtype: torch.dtype
    where: StepPlace
    after: int | None = None
    """It runs beside the computation, as soon as the message this many messages ago has arrived."""


class SendEvent(NamedTuple):
    """A collective, or one end of a message, is handed to torch; it may be under way while work goes on."""

    kind: str
    axis: str
    ranks: int
    sent_bytes: int
    """Bytes that this rank sends."""
    message_bytes: int
    """Bytes of the whole: what each rank has after an all-gather, or before a reduce-scatter."""
    stride: int
    """Distance from one rank of the group to the next."""
    peer: int | None
    """The rank at the other end, where there is one: the receiver of a "send", the sender of a "recv"."""
    where: StepPlace
    after: int | None = None
    """It goes out beside the computation, as soon as the message this many messages before it has arrived."""


class WaitEvent(NamedTuple):
    """The next event needs a message's result."""

    messages_ago: int
    where: StepPlace


class ForwardBegins(NamedTuple):
    """Forward of a microbatch through a part of the model begins."""


Event = Change | Operation | SendEvent | WaitEvent | ForwardBegins


@dataclass
class Trace:
    """One step of one rank."""

    before: Counter[Category] = field(default_factory=Counter)
    """Bytes alive when it begins."""
    events: list[Event] = field(default_factory=list)


class Recorder(LiveBytes):
    """While it is on, sees all that the rank does; from `begin` to `end` it writes it down."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: StepClock = _Clock(self)
        """For the step: it tells what part of it runs."""
        self.phase: Phase = "other"
        """The phase of what runs outside of forward and backward."""
        self._trace: Trace | None = None
        self._axes: dict[str, str] = {}
        self._layers: dict[int, int] = {}
        self._memories: dict[int, MemoryBlock] = {}
        self._unsettled: dict[Phase, list[MemoryBlock]] = {phase: [] for phase in LEFT_BY}
        self._where = StepPlace("other", None)
        self._depth = 0  # of modules in modules
        self._in_forward = False
        self._layer: int | None = None
        self._graph = _Graph()
        self._members: dict[str, list[int]] = {}  # of groups, by name
        self._messages = 0
        self._under_way: dict[int, int] = {}  # memory -> number of the message that fills it
        self._lent: dict[int, int] = {}  # memory -> number of the message that reads it, and is to be waited for
        self._summing_since: int | None = None
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        """Begin to watch."""
        self._hooks = [
            register_module_forward_pre_hook(self._module_begins),
            register_module_forward_hook(self._module_ends, always_call=True),
        ]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Watch no more."""
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def label(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Say what the memory of `tensors` is for, if it was made while this was on."""
        for tensor in tensors:
            memory = self._memories.get(id(tensor.untyped_storage()))
            if memory is not None:
                memory.category = category

    @contextmanager
    def summing(self) -> Iterator[None]:
        """FSDP2 sums gradients in this block: after its first message, in a stream of its own."""
        self._summing_since = self._messages
        yield
        self._summing_since = None

    @property
    def _is_beside(self) -> bool:
        """True if what is seen now runs beside the computation, after the last message."""
        return self._summing_since is not None and self._messages > self._summing_since

    def begin(self, axes: dict[str, str]) -> None:
        """Begin a step. `axes`: those of the process groups (`Meshes.axis_of_groups`)."""
        self._axes = axes
        self._trace = Trace()
        for key, size in self._sizes.items():
            self._trace.before[self._memories[key].category] += size

    def end(self) -> Trace:
        assert self._trace is not None
        self._enter(StepPlace("other", None))
        trace, self._trace = self._trace, None
        return trace

    def saw(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Write down the operation, the memory that it makes, and what it waits for."""
        if operator.namespace in ("prim", "profiler"):  # a question about a tensor, a name for what follows
            return
        self._enter(self._place())
        after = 0 if self._is_beside else None
        if after is None:
            self._await(args)
        super().saw(operator, args, result)
        message = message_of(operator, args, self._axes) if self._trace is not None else None
        if message is not None:
            self._send(message, args, after)
            return
        if not _is_free(operator):
            self._write(_work(operator, args, result, self._where, after))
        if after is not None:
            self._fill([*tensors_in(args), *tensors_in(result)])

    def changed(self, memory: int, before: int, after: int) -> None:
        """Memory has come, gone, or changed its size: only gathered parameters do that."""
        known = self._memories.get(memory)
        if known is None:
            known = self._memories[memory] = MemoryBlock()
            self._unsettled[self._where.phase].append(known)
        elif after:
            known.category = "gathered"
        self._write(Change(after - before, known, self._where))

    def freed(self, memory: int) -> None:
        """Forget this memory."""
        self._memories.pop(memory).alive = False
        self._under_way.pop(memory, None)
        if (number := self._lent.pop(memory, None)) is not None:
            self._write(WaitEvent(self._messages - number, self._where))

    def _write(self, event: Event) -> None:
        if self._trace is not None:
            self._trace.events.append(event)

    def _send(self, message: Message, args: tuple[Any, ...], after: int | None) -> None:
        is_pair = message.kind == "send"
        if message.kind == "barrier" or (is_pair and not next(tensors_in(args[0])).is_floating_point()):
            return  # a pipeline's ranks greet each other in their first step
        kind = "recv" if message.operator.startswith("recv") else message.kind
        ranks = self._ranks(message.group)
        peer = ranks[args[2]] if is_pair else None
        size = nbytes(args[0]) if is_pair else max(nbytes(args[0]), nbytes(args[1]))
        self._messages += 1
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        self._write(
            SendEvent(kind, message.axis, len(ranks), message.sent_bytes, size, stride, peer, self._where, after)
        )
        if kind != "send":
            self._fill(tensors_in(args[0]))
        if self._is_beside and after is None:
            # What it reads is freed no sooner than it has ended, and FSDP2's computation waits for that.
            self._lent |= {id(tensor.untyped_storage()): self._messages for tensor in tensors_in(args[1])}

    def _fill(self, tensors: Iterable[Tensor]) -> None:
        """Note that the last message, or what is done once it has arrived, fills these."""
        for tensor in tensors:
            self._under_way[id(tensor.untyped_storage())] = self._messages

    def _ranks(self, group: dist.ProcessGroup) -> list[int]:
        if group.group_name not in self._members:
            self._members[group.group_name] = dist.get_process_group_ranks(group)
        return self._members[group.group_name]

    def _await(self, args: tuple[Any, ...]) -> None:
        """Write down which messages' results these arguments are."""
        if not self._under_way:
            return
        for tensor in tensors_in(args):
            number = self._under_way.get(id(tensor.untyped_storage()))
            if number is not None:
                self._write(WaitEvent(self._messages - number, self._where))
                self._under_way = {key: n for key, n in self._under_way.items() if n != number}

    def _place(self) -> StepPlace:
        """Torch has no public names for "is this backward" and for "of which node"."""
        if torch._C._current_graph_task_id() != -1:
            # Only recomputation records gradients, and calls modules, in backward.
            is_forward = torch.is_grad_enabled() or self._depth > 0
            return StepPlace("recompute" if is_forward else "backward", self._graph.layer_now())
        return StepPlace("forward", self._layer) if self._in_forward else StepPlace(self.phase, None)

    def _enter(self, where: StepPlace) -> None:
        """Operations are now at `where`; memory that an earlier phase left behind gets that phase's category."""
        last = self._where.phase
        self._where = where
        if where.phase == last:
            return
        in_backward = where.phase in ("backward", "recompute")
        if last not in ("forward", "backward"):
            self._settle(last)
        if last in ("backward", "recompute") and not in_backward:
            self._settle("backward")

    def _settle(self, phase: Phase) -> None:
        for memory in self._unsettled[phase]:
            if memory.alive and memory.category == "other":
                memory.category = LEFT_BY[phase]
        self._unsettled[phase].clear()

    def _module_begins(self, module: nn.Module, _: Any) -> None:
        self._depth += 1
        if torch._C._current_graph_task_id() != -1:
            return
        if isinstance(module, Decoder):
            self._in_forward = True
            self._layers |= {id(block): int(layer) for layer, block in module.blocks.items()}
            self._write(ForwardBegins())
        elif isinstance(module, Block):
            self._layer = self._layers.get(id(module))
            self._graph.layer_begins()

    def _module_ends(self, module: nn.Module, _: Any, __: Any) -> None:
        self._depth -= 1
        if torch._C._current_graph_task_id() != -1:
            return
        if isinstance(module, Decoder):
            self._in_forward = False
            self._settle("forward")
        elif isinstance(module, Block):
            self._graph.layer_ends(self._layer)
            self._layer = None


class _Graph:
    """The layer of each node of the graph: autograd numbers them in their order, under names of its own."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._layers: list[int | None] = []

    def layer_begins(self) -> None:
        self._first = torch.autograd._get_sequence_nr()

    def layer_ends(self, layer: int | None) -> None:
        self._begins += [self._first, torch.autograd._get_sequence_nr()]
        self._layers += [layer, None]

    def layer_now(self) -> int | None:
        node = torch._C._current_autograd_node()
        index = bisect_right(self._begins, -1 if node is None else node._sequence_nr())
        return self._layers[index - 1] if index else None


class _Clock(StepClock):
    """Tells a recorder what part of the step runs, instead of timing it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(CPU)
        self._recorder = recorder

    @contextmanager
    def time(self, category: Part) -> Iterator[None]:
        """Record this block as `category`."""
        self._recorder.phase = category if category in ("communication", "optimizer") else "other"
        yield
        self._recorder.phase = "other"


def _work(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any, where: StepPlace, after: int | None
) -> Operation:
    some = next(tensors_in(result), None)
    dtype = torch.float32 if some is None else some.dtype
    moved_bytes = _moved_bytes(operator, args, result)
    return Operation(str(operator.overloadpacket), flops_of(operator, args, result), moved_bytes, dtype, where, after)


def _moved_bytes(operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> int:
    """Return the bytes that an operator reads and writes; one that returns nothing writes to its arguments."""
    schema, packet = operator._schema, operator.overloadpacket
    written = [
        value for a, value in zip(schema.arguments, args, strict=False) if a.alias_info and a.alias_info.is_write
    ]
    moved = nbytes(args) + nbytes(result if schema.returns else written)
    if packet in OVERWRITES:
        return moved - nbytes(args[0])
    return moved + nbytes(result) - nbytes(args[0]) if packet in LOOK_UPS else moved


@cache
def _is_free(operator: torch._ops.OpOverload) -> bool:
    """Return True if the operator does nothing on the device: it makes a view, or memory without content."""
    return is_view(operator) or "empty" in operator.name() or operator in NO_WORK
