"""The ranks of a run as meshes: one view for how samples and models are split, others for how state is.

    axes     pp, dp_replicate, dp_shard, cp, tp                   what `Plan` says
    state    pp, replicate, shard, tp                             ranks with a replica each; ranks that share one
    experts  pp, expert_replicate, expert_shard, ep, tp           the same for experts; ep is laid over dp_shard x cp

Every view counts ranks in the same order, so that all agree on each rank's place. `shard` is dp_shard x cp, since the
ranks that split a sequence share the state as those do that split the samples; with zero = 0 no rank shares, and these
ranks count as replicas.

Where replicas sum in tiers, each of them is a part of `replicate`: neighbours inside, groups of them between, the rest
across.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from argosy.accelerator import NCCL
from argosy.plan.cost.traffic import ENDS, STAGE, SUM_TIERS, WORLD, axis_sizes, spanning_axis
from argosy.plan.plan import MESH_AXES, Plan

EXPERT_AXES = {"expert_replicate", "expert_shard", "ep"}


@dataclass(frozen=True)
class SumTier:
    """Neighbours that sum before others do. Two groups of the same ranks, one for each way: then a bucket may go in
    while another comes out, and messages match all the same."""

    scatter: dist.ProcessGroup
    gather: dist.ProcessGroup

    @property
    def size(self) -> int:
        return self.scatter.size()


@dataclass(frozen=True)
class Replicas:
    """This rank's view of the replicas of what it has."""

    across: tuple[dist.ProcessGroup, ...] = ()
    """The groups that sum last, one for each message that a sum may take; none where this rank is the only one. On a
    CPU no two are one: then a bucket's first message need not wait for the second of the bucket before."""
    inside: tuple[SumTier, ...] = ()
    """The tiers that sum before, nearest first."""


class Meshes:
    """This rank's groups on each axis. By default there are no others: every axis has one rank.

    Code that is given meshes asks for groups, places and holders, and does not ask whether there are other ranks.
    `RankMeshes` are those of a world of several.
    """

    stage: dist.ProcessGroup | None = None
    """All ranks of this one's pipeline stages, which need the same update of whatever they share; None: it is alone."""
    ends: dist.ProcessGroup | None = None
    """This rank and its counterpart in the first or last pipeline stage, where both hold a tied embedding."""

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group along one dimension of any view; None where this rank is alone in it."""
        return None

    def replicas(self, name: str) -> Replicas:
        """Return how the ranks along `replicate` or `expert_replicate` sum."""
        return Replicas()

    def rank(self, name: str) -> int:
        """Return this rank's place along a dimension of `axes`."""
        return 0

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Return torch's mesh along these dimensions of one view. Raises: LookupError if this rank is alone."""
        raise LookupError(f"one process has no mesh along {', '.join(names)}: nothing is split")

    def sharing(self, outer: Sequence[str]) -> DeviceMesh | None:
        """Return the mesh of a parameter that is split over `outer` (tp, ep), then over the ranks that share the state.

        None where no ranks share it like that: they do under ZeRO 1 and 2.
        """
        return None

    def ranks_of_stage(self, is_shared_by_ends: bool) -> int:
        """Return how many ranks work on what this one has of the model's depth."""
        return 1

    def holders(self, names: Collection[str], split: Collection[str]) -> tuple[int, ...]:
        """Return the ranks of this one's pipeline stage that hold the same part as it of a tensor, ascending.

        `names`: the dimensions of the tensor's mesh; `split`: those that it is cut up over.
        """
        return (0,)

    def axis_of_groups(self) -> dict[str, str]:
        """Return the name of each of this rank's process groups -> the axis that it is along."""
        return {}


@dataclass(frozen=True)
class RankMeshes(Meshes):
    """The views of a world of several ranks, and the process groups along their dimensions."""

    axes: DeviceMesh
    state: DeviceMesh
    experts: DeviceMesh
    nested: tuple[DeviceMesh, ...]
    """`state` and `experts` with tp (and ep) before shard, for ZeRO 1 and 2, which split what tp left; else empty."""
    stage: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None
    summing: Mapping[str, Replicas] = field(default_factory=dict)
    """Axis, `replicate` or `expert_replicate` -> how its ranks sum; empty: all at once, in one message."""

    def replicas(self, name: str) -> Replicas:
        group = self.group(name)
        return self.summing.get(name) or Replicas(() if group is None else (group,))

    def group(self, name: str) -> dist.ProcessGroup | None:
        group = self._view(name).get_group(name)
        return group if group.size() > 1 else None

    def rank(self, name: str) -> int:
        return self._place[name]

    @cached_property
    def _place(self) -> dict[str, int]:
        """This rank's place along each of `axes`: torch takes a millisecond to look one up, and steps ask for them."""
        return dict(zip(self.axes.mesh_dim_names or (), self.axes.get_coordinate() or (), strict=True))

    def device_mesh(self, *names: str) -> DeviceMesh:
        return self._view(*names)[names]

    def _view(self, *names: str) -> DeviceMesh:
        return next(v for v in (self.axes, self.state, self.experts) if set(names) <= set(v.mesh_dim_names or ()))

    def sharing(self, outer: Sequence[str]) -> DeviceMesh | None:
        if not self.nested:
            return None
        names = (*outer, "expert_shard" if "ep" in outer else "shard")
        if names not in self._sharing:
            self._sharing[names] = self.nested["ep" in outer][names]
        return self._sharing[names]

    @cached_property
    def _sharing(self) -> dict[tuple[str, ...], DeviceMesh]:
        """Meshes of `sharing`, by their dimensions: torch takes milliseconds to make one, and each parameter asks."""
        return {}

    def ranks_of_stage(self, is_shared_by_ends: bool) -> int:
        ranks = self.axes.size() // self.axes.size(MESH_AXES.index("pp"))
        return 2 * ranks if is_shared_by_ends and self.ends is not None else ranks

    def holders(self, names: Collection[str], split: Collection[str]) -> tuple[int, ...]:
        axes, mine, ranks = self._ranks["experts" if EXPERT_AXES & set(names) else "state"]
        place = tuple(at if axis == "pp" or axis in split else slice(None) for axis, at in zip(axes, mine, strict=True))
        return tuple(sorted(ranks[place].flatten().tolist()))

    @cached_property
    def _ranks(self) -> dict[str, tuple[tuple[str, ...], Sequence[int], Tensor]]:
        """View -> its axes, this rank's place on them, and all ranks: torch computes them anew whenever it is asked."""
        views = {"state": self.state, "experts": self.experts}
        return {name: (v.mesh_dim_names or (), v.get_coordinate() or (), v.mesh) for name, v in views.items()}

    def axis_of_groups(self) -> dict[str, str]:
        views = (self.axes, self.state, self.experts, *self.nested)
        groups = [(axis, mesh.get_group(axis)) for mesh in views for axis in mesh.mesh_dim_names or ()]
        world = self.axes.size()
        everyone = spanning_axis({axis: group.size() for axis, group in groups}, world) or WORLD
        names: dict[str, str] = {group.group_name: axis if group.size() < world else everyone for axis, group in groups}
        for axis, replicas in self.summing.items():
            names |= {group.group_name: axis for group in replicas.across}
            for name, tier in zip(SUM_TIERS, replicas.inside, strict=False):
                names |= {group.group_name: f"{axis}_{name}" for group in (tier.scatter, tier.gather)}
        if self.ends is not None:
            names[self.ends.group_name] = ENDS
        if self.stage is not None:
            names[self.stage.group_name] = STAGE if self.stage.size() < world else everyone
        assert dist.group.WORLD is not None
        names[dist.group.WORLD.group_name] = everyone
        return names


def lay_out_meshes(device_type: str, plan: Plan, tied_ends: bool, timeout_s: float) -> Meshes:
    """Make the views and their groups, of which a single process needs none; every rank of the world calls it alike.

    `tied_ends`: the first and the last pipeline stage hold one parameter each that are to stay equal. `timeout_s`: how
    long a collective may wait for a peer.
    """
    if plan.world_size == 1:
        return Meshes()
    timeout = timedelta(seconds=timeout_s)
    sizes_of = {axis: getattr(plan, axis) for axis in MESH_AXES} | axis_sizes(plan)
    axes, state, experts = (
        init_device_mesh(device_type, tuple(sizes_of[axis] for axis in view), mesh_dim_names=view)
        for view in (
            MESH_AXES,
            ("pp", "replicate", "shard", "tp"),
            ("pp", "expert_replicate", "expert_shard", "ep", "tp"),
        )
    )
    stage = _along(axes.mesh.reshape(plan.pp, -1), 1, timeout)
    ends = None
    if tied_ends:
        for column in axes.mesh.reshape(plan.pp, -1).T.tolist():
            group = dist.new_group([column[0], column[-1]], timeout)
            if dist.get_rank() in (column[0], column[-1]):
                ends = group
    nested: tuple[DeviceMesh, ...] = ()
    if plan.zero in (1, 2):
        nested = (
            DeviceMesh(device_type, state.mesh.permute(0, 1, 3, 2), mesh_dim_names=("pp", "replicate", "tp", "shard")),
            DeviceMesh(
                device_type,
                experts.mesh.permute(0, 1, 3, 4, 2),
                mesh_dim_names=("pp", "expert_replicate", "ep", "tp", "expert_shard"),
            ),
        )
    views = (axes, state, experts, *nested)
    _limit_waits((group for view in views for group in view.get_all_groups()), timeout)
    summing = {}
    if plan.sums_in_tiers or plan.is_compressed:
        messages = 2 if plan.is_compressed else 1
        summing["replicate"] = _replicas(state.mesh, plan.inner_tiers(), messages, device_type, timeout)
        if plan.ep > 1:
            sizes = plan.inner_tiers(is_dealt=True)
            summing["expert_replicate"] = _replicas(experts.mesh, sizes, messages, device_type, timeout)
    return RankMeshes(axes, state, experts, nested, stage if stage.size() > 1 else None, ends, summing)


def _replicas(view: Tensor, sizes: tuple[int, int], messages: int, device_type: str, timeout: timedelta) -> Replicas:
    """Make the groups of tiers of these sizes along dim 1 of a view, and of what is left, for so many messages."""
    inside, between = sizes
    split = view.unflatten(1, (-1, between, inside))
    tiers = [
        SumTier(_along(split, dim, timeout), _along(split, dim, timeout)) for dim in (3, 2) if split.shape[dim] > 1
    ]
    if split.shape[1] == 1:
        return Replicas((), tuple(tiers))
    across = [_along(split, 1, timeout) for _ in range(messages if device_type == "cpu" else 1)]
    return Replicas(tuple(across[message % len(across)] for message in range(messages)), tuple(tiers))


def _along(ranks: Tensor, dim: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make all groups along a dim; returns this rank's."""
    for members in ranks.movedim(dim, -1).flatten(0, -2).tolist():
        group = dist.new_group(members, timeout)  # a collective: all ranks make all groups
        if dist.get_rank() in members:
            mine = group
    return mine


def _limit_waits(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Torch gives a mesh's groups its default timeout, whatever that of the world is, and has no public name for this.

    Groups of other backends, such as a simulator's, do not wait.
    """
    for group in groups:
        if dist.get_backend(group) in ("gloo", NCCL):
            _set_pg_timeout(timeout, group)
