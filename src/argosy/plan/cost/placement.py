"""Placement of ranks on a network of known topology: chosen for each mesh, by the time of a plain plan on it.

Of a mesh all plans are placed alike, as its axes send the same bytes whatever the schedule or the microbatch. Ranks
stay in their order unless another placement saves `WORTH` of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.fabric import Arrangement, Fabric
from argosy.plan.layouts import Layouts, column_of
from argosy.plan.plan import Plan

WORTH = 0.01
"""Share of a step that moving ranks must save."""
OF_MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "context", "precision", "weights", "reduce")
"""Keys of a plan by which it is placed."""
StepSeconds = Callable[[Layouts, Fabric], NDArray[np.float64]]


@dataclass(frozen=True)
class Placements:
    """The placement of plans."""

    ways: list[Arrangement]
    rows: NDArray[np.int64]
    """Place of each plan's arrangement in `ways`."""


def placed_in_order(fabric: Fabric, plans: Layouts) -> Placements:
    """Leave all ranks in their order."""
    return Placements(fabric.arrangements()[:1], np.zeros(len(plans), np.int64))


@dataclass(frozen=True)
class Placer:
    """Places plans, and remembers where each mesh belongs."""

    fabric: Fabric
    step_s: StepSeconds
    """Seconds of some plans' steps on the network with them placed."""
    known: dict[tuple[int, ...], int]
    """Mesh -> place of its arrangement among those of the network."""

    def best(self, plans: Layouts) -> Placements:
        """Return for each plan the arrangement with which a plain plan on its mesh has the shortest step."""
        ways, n = self.fabric.arrangements(), len(plans)
        if len(ways) < 2 or not n:
            return placed_in_order(self.fabric, plans)
        keys = np.stack([np.broadcast_to(getattr(plans, key), n) for key in OF_MESH])
        meshes, first, of_plan = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        names = [tuple(mesh) for mesh in meshes.T.tolist()]
        new = [place for place, name in enumerate(names) if name not in self.known]
        if new:
            found = self._of_meshes(_plain(plans[first[np.array(new)]]), ways)
            self.known.update(zip((names[place] for place in new), found.tolist(), strict=True))
        chosen = np.array([self.known[name] for name in names])
        return Placements(ways, chosen[of_plan.reshape(-1)])

    def _of_meshes(self, meshes: Layouts, ways: list[Arrangement]) -> NDArray[np.int64]:
        """Return the best way for each mesh; the first one unless another saves `WORTH`."""
        matters = np.flatnonzero(self.fabric.parts_of(meshes) > 1) if len(ways[0].dims) == 0 else np.arange(len(meshes))
        found = np.zeros(len(meshes), np.int64)
        if not len(matters):
            return found
        some = meshes[matters]
        times = np.stack(
            [self.step_s(some, self.fabric.placed(some, ways, np.full(len(some), way))) for way in range(len(ways))]
        )
        saves = times.min(axis=0) < (1 - WORTH) * times[0]
        found[matters] = np.where(saves, np.argmin(times, axis=0), 0)
        return found


def _plain(plans: Layouts) -> Layouts:
    """Return the plainest plans on the same meshes, with the smallest microbatch."""
    usual = Plan()
    kept = {*OF_MESH, "compile"}
    plain = {
        f.name: column_of(f.name, [getattr(usual, f.name)]).repeat(len(plans))
        for f in fields(plans)
        if f.name not in kept
    }
    return replace(plans, **plain)
