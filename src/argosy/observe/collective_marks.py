"""Marks in a profile that say along which mesh axis a collective is: profilers know groups by number, if at all.

While a profile is recorded, the methods of `ProcessGroup` and the wait for what they return are called within a
`record_function` of this form; torch has no public hook there:

    argosy:collective/AXIS/METHOD#NUMBER          the call
    argosy:collective/AXIS/METHOD#NUMBER/wait     the wait for its result, if the caller waits by itself

On a GPU the profiler carries such a mark over to the kernels that were launched within it. Operators in compiled code
do not pass here; the traffic of one is counted under the axis "other".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.profiler import record_function

from argosy.observe.collectives import METHODS
from argosy.observe.counters import OTHER
from argosy.plan.cost.traffic import WORLD

COLLECTIVE = "argosy:collective/"


class CollectiveMarks:
    """A block in which collectives are marked."""

    def __init__(self, axes: Mapping[str, str]):
        """axes: name of a process group -> the axis that it is along (`Meshes.axis_of_groups`)."""
        self._axes = axes
        self._numbers = itertools.count()
        self._works: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._originals: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Self:
        for name in METHODS:
            if hasattr(dist.ProcessGroup, name):
                self._replace(dist.ProcessGroup, name, self._marked(name, getattr(dist.ProcessGroup, name)))
        self._replace(dist.Work, "wait", self._waiting(dist.Work.wait))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()

    def _replace(self, owner: type, name: str, by: Any) -> None:
        self._originals.append((owner, name, vars(owner).get(name, getattr(owner, name))))
        setattr(owner, name, by)

    def _marked(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def marked(group: dist.ProcessGroup, *args: Any, **kw: Any) -> Any:
            unnamed = WORLD if group.size() == dist.get_world_size() else OTHER
            mark = f"{COLLECTIVE}{self._axes.get(group.group_name, unnamed)}/{name}#{next(self._numbers)}"
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
