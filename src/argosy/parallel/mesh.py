"""The ranks of a run as meshes: one view for how samples and models are split, others for how state is.

    axes     pp, dp_replicate, dp_shard, cp, tp                   what `Plan` says
    state    pp, replicate, shard, tp                             who holds, and who shares, one copy of the state
    experts  pp, expert_replicate, expert_shard, ep, tp           the same for experts; ep is laid over dp_shard x cp

Every view counts ranks in the same order, so that they agree on who is where. `shard` is dp_shard x cp, since the
ranks that split a sequence share the state as those do that split the samples; with zero = 0 nobody shares, and these
ranks count as replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from argosy.plan.plan import AXES, Plan


@dataclass(frozen=True)
class Meshes:
    """The views, and the process groups along their dimensions."""

    axes: DeviceMesh
    state: DeviceMesh
    experts: DeviceMesh
    nested: DeviceMesh | None
    """`state` with tp before shard, for ZeRO 1 and 2, which split what tp left; `nested_experts` likewise."""
    nested_experts: DeviceMesh | None
    stage: dist.ProcessGroup
    """All ranks of this one's pipeline stages: who needs the same update of whatever they share."""
    ends: dist.ProcessGroup | None
    """This rank's fellow in the first or last pipeline stage, where both hold a tied embedding."""

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The group along one dimension of any view; None where this rank is alone in it."""
        view = next(v for v in (self.axes, self.state, self.experts) if name in (v.mesh_dim_names or ()))
        group = view[name].get_group()
        return group if group.size() > 1 else None

    def sharded(self, replicate: str, shard: str) -> DeviceMesh:
        """The mesh over which FSDP2 splits: with the dimension of replicas where there are any."""
        view = self.experts if shard == "expert_shard" else self.state
        return view[replicate, shard] if view[replicate].size() > 1 else view[shard]

    def sharing(self, outer: tuple[str, ...]) -> DeviceMesh:
        """The mesh of a parameter that is split over `outer` (tp, ep) and then over the ranks that share the state."""
        assert self.nested is not None and self.nested_experts is not None
        return self.nested_experts[*outer, "expert_shard"] if "ep" in outer else self.nested[*outer, "shard"]

    def ranks_of_stage(self, is_shared_by_ends: bool) -> int:
        """How many ranks work on what this one has of the model's depth."""
        ranks = self.axes.size() // self.axes["pp"].size()
        return 2 * ranks if is_shared_by_ends and self.ends is not None else ranks

    def rank(self, name: str) -> int:
        """This rank's place along a dimension of `axes`."""
        return self.axes[name].get_local_rank()


def lay_out_meshes(device_type: str, plan: Plan, tied_ends: bool, timeout_s: float) -> Meshes:
    """Make the views and their groups; every rank of the world calls it alike.

    `tied_ends`: the first and the last pipeline stage hold one parameter each that are to stay equal. `timeout_s`: how
    long a collective may wait for a peer.
    """
    timeout = timedelta(seconds=timeout_s)
    together = plan.dp_shard * plan.cp
    copies, shard = (together, 1) if plan.zero == 0 else (1, together)
    expert_copies, expert_shard = (together // plan.ep, 1) if plan.zero == 0 else (1, together // plan.ep)
    axes, state, experts = (
        init_device_mesh(device_type, tuple(view.values()), mesh_dim_names=tuple(view))
        for view in (
            {axis: getattr(plan, axis) for axis in AXES},
            {"pp": plan.pp, "replicate": plan.dp_replicate * copies, "shard": shard, "tp": plan.tp},
            {
                "pp": plan.pp,
                "expert_replicate": plan.dp_replicate * expert_copies,
                "expert_shard": expert_shard,
                "ep": plan.ep,
                "tp": plan.tp,
            },
        )
    )
    for ranks in axes.mesh.reshape(plan.pp, -1).tolist():
        group = dist.new_group(ranks, timeout)  # a collective: all ranks make all groups
        if dist.get_rank() in ranks:
            stage = group
    ends = None
    if tied_ends:
        for column in axes.mesh.reshape(plan.pp, -1).T.tolist():
            group = dist.new_group([column[0], column[-1]], timeout)
            if dist.get_rank() in (column[0], column[-1]):
                ends = group
    nested = nested_experts = None
    if plan.zero in (1, 2):
        nested = DeviceMesh(
            device_type, state.mesh.permute(0, 1, 3, 2), mesh_dim_names=("pp", "replicate", "tp", "shard")
        )
        nested_experts = DeviceMesh(
            device_type,
            experts.mesh.permute(0, 1, 3, 4, 2),
            mesh_dim_names=("pp", "expert_replicate", "ep", "tp", "expert_shard"),
        )
    views = (axes, state, experts, nested, nested_experts)
    _limit_waits((group for view in views if view is not None for group in view.get_all_groups()), timeout)
    return Meshes(*views, stage, ends)


def _limit_waits(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Torch gives a mesh's groups its default timeout, whatever that of the world is, and has no public name for this.

    Groups of other backends, a simulator's, wait for nobody.
    """
    for group in groups:
        if dist.get_backend(group) in ("gloo", "nccl"):
            _set_pg_timeout(timeout, group)
