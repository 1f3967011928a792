"""Counts the bytes that a rank really puts on the wire, by mesh axis and collective, while a step runs.

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

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from argosy.observe.counters import OTHER
from argosy.observe.dispatch import Watch, nbytes
from argosy.plan.cost.traffic import WORLD

Counts = Counter[tuple[str, str]]
"""(axis, kind of collective) -> bytes sent by this rank."""
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
    """(outputs, inputs, group, root, ...)"""
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
    """What this rank sends; 0 where it only receives or waits."""
    group: dist.ProcessGroup


class WireCounter(Watch):
    """Counts the bytes that this rank sends while it is entered.

        with WireCounter(meshes.axis_of_groups()) as counts:
            ...                     # a step: forward, backward, all that their hooks send, and the update
        counts["tp", "all_gather"]

    Axes are those of all views of the meshes ("tp", "pp", "cp", "shard", "replicate", "ep", ...), "ends" for a tied
    embedding at both ends of the pipeline, "stage" for all ranks of one place in the pipeline, "world" for all ranks,
    "other" for any other group. A message counts when it is handed to torch, its padding included. Not for measuring
    time: nothing is compiled meanwhile.
    """

    def __init__(self, axes: Mapping[str, str]):
        """`axes`: name of a process group -> the axis that it is along (`Meshes.axis_of_groups`)."""
        super().__init__()
        self._axes = axes
        self.counts: Counts = Counter()
        self.messages: Counts = Counter()
        """How many messages those bytes were sent in."""

    def __enter__(self) -> Counts:
        super().__enter__()
        return self.counts

    def saw(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Add what a collective sends."""
        message = message_of(operator, args, self._axes)
        if message is not None and message.sent_bytes:
            self.counts[message.axis, message.kind] += message.sent_bytes
            self.messages[message.axis, message.kind] += 1


def message_of(operator: torch._ops.OpOverload, args: tuple[Any, ...], axes: Mapping[str, str]) -> Message | None:
    """Return what `operator(*args)` sends, None if it is no collective; `axes` as `Meshes.axis_of_groups` gives them.

    Raises: NotImplementedError for a collective that is not in `COLLECTIVES`.
    """
    if operator.namespace != "c10d":
        return None
    name = operator.name().removeprefix("c10d::").partition(".")[0]
    if name not in COLLECTIVES:
        raise NotImplementedError(f"c10d::{name} sends bytes that WireCounter cannot count: add it to COLLECTIVES")
    kind, sent = COLLECTIVES[name]
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # the group comes before the operation
    group = dist.ProcessGroup.unbox(boxed)
    unnamed = WORLD if group.size() == dist.get_world_size() else OTHER
    return Message(name, axes.get(group.group_name, unnamed), kind, round(sent(args, group)), group)
