"""The bytes that a rank puts on the wire in each collective, and what watches every operation that torch runs.

What a rank *sends* is counted, as ring algorithms do it (Thakur et al. 2005; Patarasuk & Yuan 2009). For a whole
message of `size` bytes in a group of n ranks that is

    all_reduce       2 (n-1)/n size
    all_gather         (n-1)/n size      size: of what each rank has afterwards
    reduce_scatter     (n-1)/n size      size: of what each rank has before
    all_to_all         size less the part that stays; (n-1)/n size where parts are equal
    send               size              receiving is the other side's sending
    broadcast, reduce  (n-1)/n size      the mean over ranks: the last one in the ring sends nothing on
    gather             size              of this rank's part
    scatter            (n-1)/n size      at the root, which alone sends

`plan.cost.traffic` predicts the same numbers from the plan.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented (torch.library), and without a public name

from argosy.observe.counters import OTHER
from argosy.plan.cost.traffic import WORLD

TRANSPARENT = ("argosy", "_c10d_functional")
"""Namespaces of operators that are also watched inside: our own, and DTensor's collectives."""


class OperatorWatch(TorchDispatchMode):
    """Sees every operation, also in backward, in hooks (FSDP2's), under DTensors and inside our own operators.

    While it is on, torch.compile runs eagerly.
    """

    @abstractmethod
    def saw(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """`operator(*args)` has just run and returned `result`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor: torch asks again about what it does with local tensors
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) in TRANSPARENT:
            return self._look_inside(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):  # the others are higher-order: they have no effect of their own
            self.saw(func, args, result)
        return result

    def _look_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator with this mode on: torch turns a mode off while it handles one.

        No public name says which kernel comes below the modes, so the dispatch key of the first tensor's device does.
        """
        device = next(tensors_in(args)).device.type
        below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
        super().__enter__()  # not `with self`: it is watching already
        try:
            return func.redispatch(below, *args, **kwargs)
        finally:
            super().__exit__(None, None, None)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, also those in lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)


def nbytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(tree))


Counts = Counter[tuple[str, str]]
"""(axis, kind of collective) -> bytes sent by a rank."""
Sent = Callable[[tuple[Any, ...], dist.ProcessGroup], float]
"""The arguments of a collective's operator and its group -> bytes that this rank sends."""


def _circling(message: int, times: int = 1) -> Sent:
    """For a collective whose argument `message` is the whole: all but one part of it passes through this rank."""
    return lambda args, group: times * (group.size() - 1) / group.size() * nbytes(args[message])


def _all_to_all(args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """(output, input, group, sizes out, sizes in, ...); without sizes all parts are equal."""
    whole, rows, sizes = args[1], args[1].shape[0], args[4]
    stays = sizes[group.rank()] / max(1, rows) if sizes else 1 / group.size()
    return (1 - stays) * nbytes(whole)


def _all_to_all_lists(args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """(outputs, inputs, group, ...)"""
    return nbytes(args[1]) - nbytes(args[1][group.rank()])


def _own(args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """(tensors, group, peer, ...)"""
    return nbytes(args[0])


def _scatter(args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """(outputs, inputs, group, root, ...); only the root has inputs."""
    return (group.size() - 1) / group.size() * nbytes(args[1])


def _gather(args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """(outputs, input, group, root, ...)"""
    return 0.0 if args[3] == group.rank() else nbytes(args[1])


def _nothing(args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    return 0.0


COLLECTIVES: dict[str, tuple[str, Sent]] = {
    "allreduce_": ("all_reduce", _circling(0, times=2)),
    "allreduce_coalesced_": ("all_reduce", _circling(0, times=2)),
    "allgather_": ("all_gather", _circling(0)),
    "_allgather_base_": ("all_gather", _circling(0)),
    "allgather_coalesced_": ("all_gather", _circling(0)),
    "allgather_into_tensor_coalesced_": ("all_gather", _circling(0)),
    "reduce_scatter_": ("reduce_scatter", _circling(1)),
    "_reduce_scatter_base_": ("reduce_scatter", _circling(1)),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _circling(1)),
    "alltoall_base_": ("all_to_all", _all_to_all),
    "alltoall_": ("all_to_all", _all_to_all_lists),
    "send": ("send", _own),
    "recv_": ("send", _nothing),
    "recv_any_source_": ("send", _nothing),
    "broadcast_": ("broadcast", _circling(0)),
    "reduce_": ("reduce", _circling(0)),
    "gather_": ("gather", _gather),
    "gather_into_tensor_": ("gather", _gather),  # from torch 2.14 on
    "scatter_": ("scatter", _scatter),
    "barrier": ("barrier", _nothing),
    "monitored_barrier_": ("barrier", _nothing),
    "check_for_nan": ("barrier", _nothing),
}
"""The operators of torch's namespace `c10d`, which every public collective calls."""


@dataclass(frozen=True)
class Message:
    """One collective, as this rank takes part in it."""

    operator: str
    """Its name in torch's namespace `c10d`."""
    axis: str
    kind: str
    sent_bytes: int
    """Bytes that this rank sends; 0 where it only receives or waits."""
    group: dist.ProcessGroup


def message_of(operator: torch._ops.OpOverload, args: tuple[Any, ...], axes: Mapping[str, str]) -> Message | None:
    """Return what `operator(*args)` sends, None if it is no collective; `axes` as `Meshes.axis_of_groups` gives them.

    Raises: NotImplementedError for a collective that is not in `COLLECTIVES`.
    """
    if operator.namespace != "c10d":
        return None
    name = operator.name().removeprefix("c10d::").partition(".")[0]
    if name not in COLLECTIVES:
        raise NotImplementedError(f"c10d::{name} sends bytes that nobody counts: add it to COLLECTIVES")
    kind, sent = COLLECTIVES[name]
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # the group comes before the operation
    group = dist.ProcessGroup.unbox(boxed)
    unnamed = WORLD if group.size() == dist.get_world_size() else OTHER
    return Message(name, axes.get(group.group_name, unnamed), kind, round(sent(args, group)), group)
