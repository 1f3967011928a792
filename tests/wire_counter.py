"""Count what a rank sends in anything that it does, as the planner predicts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from argosy.observe.wire import Counts, OperatorWatch, message_of


class WireCounter(OperatorWatch):
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
        message = message_of(operator, args, self._axes)
        if message is not None and message.sent_bytes:
            self.counts[message.axis, message.kind] += message.sent_bytes
            self.messages[message.axis, message.kind] += 1
