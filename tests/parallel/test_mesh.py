"""Every view of the ranks counts them in the same order, and groups have the members that they should."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from argosy.parallel.mesh import lay_out_meshes
from argosy.parallel.world import World
from argosy.plan.plan import MESH_AXES, Plan
from tiny import eager

VIEWS = ("axes", "state", "experts")


def members(world: World, plan: Plan, name: str) -> list[int]:
    """The ranks of this one's group along `name`, in order."""
    group = lay_out_meshes("cpu", plan, tied_ends=False, timeout_s=60).group(name)
    return [world.rank] if group is None else dist.get_process_group_ranks(group)


@pytest.mark.parametrize(
    ("plan", "name", "groups"),
    [
        ("pp=2,tp=2", "pp", [[0, 2], [1, 3]]),
        ("pp=2,tp=2", "tp", [[0, 1], [2, 3]]),
        ("dp_replicate=2,dp_shard=2", "dp_replicate", [[0, 2], [1, 3]]),
        ("dp_replicate=2,dp_shard=2", "dp_shard", [[0, 1], [2, 3]]),
        ("dp_shard=2,cp=2", "cp", [[0, 1], [2, 3]]),
        ("cp=2,tp=2", "cp", [[0, 2], [1, 3]]),
        # Ranks that split sequences share the state too.
        ("dp_shard=2,cp=2", "shard", [[0, 1, 2, 3]]),
        ("dp_shard=2,cp=2", "replicate", [[0], [1], [2], [3]]),
        ("dp_replicate=2,cp=2,zero=1", "shard", [[0, 1], [2, 3]]),
        ("dp_replicate=2,cp=2,zero=1", "replicate", [[0, 2], [1, 3]]),
        # With zero = 0 nobody shares: all are replicas.
        ("dp_shard=2,cp=2,zero=0", "shard", [[0], [1], [2], [3]]),
        ("dp_replicate=2,dp_shard=2,zero=0", "replicate", [[0, 1, 2, 3]]),
        # Experts are dealt over neighbours, and those of one place hold the same ones.
        ("dp_shard=4,ep=2", "ep", [[0, 1], [2, 3]]),
        ("dp_shard=4,ep=2", "expert_shard", [[0, 2], [1, 3]]),
        ("dp_shard=4,ep=2", "expert_replicate", [[0], [1], [2], [3]]),
        ("dp_shard=4,ep=2,zero=0", "expert_replicate", [[0, 2], [1, 3]]),
        ("dp_shard=2,tp=2,ep=2", "ep", [[0, 2], [1, 3]]),
        ("dp_shard=2,cp=2,ep=4", "ep", [[0, 1, 2, 3]]),
    ],
)
def test_a_group_has_the_members_that_it_should(workers, plan, name, groups):
    found = workers.run(4, members, Plan.parse(plan), name)
    assert found == [next(group for group in groups if rank in group) for rank in range(4)]


def tiers(world: World, plan: Plan, name: str) -> list[list[int]]:
    """The ranks that this one sums with: tier by tier, then across."""
    replicas = lay_out_meshes("cpu", plan, tied_ends=False, timeout_s=60).replicas(name)
    groups = [group for tier in replicas.inside for group in (tier.scatter, tier.gather)]
    assert len({group.group_name for group in (*groups, *replicas.across)}) == len(groups) + len(replicas.across)
    return [dist.get_process_group_ranks(group) for group in (*groups, *replicas.across)]


@pytest.mark.parametrize(
    ("plan", "name", "of_rank_0"),
    [
        ("dp_replicate=4,sum_inside=2", "replicate", [[0, 1], [0, 1], [0, 2]]),
        ("dp_replicate=2,dp_shard=2,zero=0,sum_inside=2", "replicate", [[0, 1], [0, 1], [0, 2]]),
        # Neighbours have other experts: what is inside for the rest is no sum for them.
        ("dp_shard=4,ep=2,zero=0,sum_inside=2", "expert_replicate", [[0, 2]]),
        # What is compressed may take two messages, whose order over buckets is not fixed: each has a group.
        ("dp_replicate=4,sum_inside=2,sync=int8", "replicate", [[0, 1], [0, 1], [0, 2], [0, 2]]),
        ("dp_shard=4,ep=2,zero=0,sync=int8", "expert_replicate", [[0, 2], [0, 2]]),
        ("dp_replicate=4,sync=int8", "replicate", [[0, 1, 2, 3], [0, 1, 2, 3]]),
        ("dp_replicate=4", "replicate", [[0, 1, 2, 3]]),
        ("dp_shard=4", "replicate", []),
    ],
)
def test_neighbours_sum_inside_and_one_of_each_place_across(workers, plan, name, of_rank_0):
    assert workers.run(4, tiers, Plan.parse(plan), name)[0] == of_rank_0


@pytest.mark.slow
def test_three_tiers_lie_one_in_the_other(workers):
    plan = Plan.parse("dp_replicate=8,sum_inside=2,sum_between=2")
    assert workers.run(8, tiers, plan, "replicate")[3] == [[2, 3], [2, 3], [1, 3], [1, 3], [3, 7]]


def facts(world: World, plan: Plan, tied: bool) -> dict[str, object]:
    meshes = lay_out_meshes("cpu", plan, tied, timeout_s=60)
    return {
        "views": [getattr(meshes, view).mesh.flatten().tolist() for view in VIEWS],
        "place": [meshes.rank(axis) for axis in MESH_AXES],
        "stage": [world.rank] if meshes.stage is None else dist.get_process_group_ranks(meshes.stage),
        "ends": None if meshes.ends is None else dist.get_process_group_ranks(meshes.ends),
        "ranks_of_stage": [meshes.ranks_of_stage(is_shared_by_ends=shared) for shared in (False, True)],
        "nested": None if (sharing := meshes.sharing(("tp",))) is None else sharing.mesh.flatten().tolist(),
        "nested_experts": {
            outer: sharing.mesh.tolist()
            for outer in (("ep",), ("ep", "tp"))
            if (sharing := meshes.sharing(outer)) is not None
        },
    }


@pytest.mark.parametrize("plan", ["pp=2,dp_shard=2,zero=1", "dp_replicate=2,tp=2", "dp_shard=2,cp=2,ep=2", "pp=4"])
def test_every_view_counts_the_ranks_alike(workers, plan):
    plan = Plan.parse(plan)
    for rank, found in enumerate(workers.run(4, facts, plan, False)):
        assert found["views"] == [[0, 1, 2, 3]] * 3
        place = 0
        for axis, index in zip(MESH_AXES, found["place"], strict=True):
            place = place * getattr(plan, axis) + index
        assert place == rank


def test_a_stage_is_all_ranks_of_one_place_in_the_pipeline(workers):
    found = workers.run(4, facts, Plan.parse("pp=2,tp=2"), False)
    assert [one["stage"] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one["ends"] for one in found] == [None] * 4
    assert [one["ranks_of_stage"] for one in found] == [[2, 2]] * 4


def test_the_two_ends_of_a_pipeline_that_hold_one_parameter_know_each_other(workers):
    found = workers.run(4, facts, Plan.parse("pp=4"), True)
    assert [one["ends"] for one in found] == [[0, 3], None, None, [0, 3]]
    assert [one["ranks_of_stage"] for one in found] == [[1, 2], [1, 1], [1, 1], [1, 2]]
    found = workers.run(4, facts, Plan.parse("pp=2,tp=2"), True)
    assert [one["ends"] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_zero_1_and_2_split_what_the_tensor_axis_left(workers):
    """In the nested mesh tp comes first: its ranks (0, 1) and (2, 3) are rows now."""
    for found in workers.run(4, facts, Plan.parse("dp_shard=2,tp=2,zero=1"), False):
        assert found["nested"] == [0, 2, 1, 3]
    for found in workers.run(4, facts, Plan.parse("dp_shard=2,tp=2,zero=3"), False):
        assert found["nested"] is None


def test_zero_1_and_2_split_what_expert_and_tensor_axes_left_of_an_expert(workers):
    """Each list in the lists has the ranks that share some experts, or some columns of these."""
    for rank, found in enumerate(workers.run(4, facts, Plan.parse("dp_shard=4,ep=2,zero=2"), False)):
        assert found["nested_experts"] == {("ep",): [[0, 2], [1, 3]], ("ep", "tp"): [[[0, 2]], [[1, 3]]]}, rank
    plan = Plan.parse("dp_shard=4,ep=2,tp=2,zero=1")
    for rank, found in enumerate(workers.run(8, facts, plan, False)):
        by_tp = [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]
        assert found["nested_experts"][("ep", "tp")] == by_tp
        assert found["nested_experts"][("ep",)] == [
            [ranks[rank % 2] for ranks in [*zip(*x, strict=True)]] for x in by_tp
        ]
    for found in workers.run(4, facts, Plan.parse("dp_shard=4,ep=2,zero=3"), False):
        assert found["nested_experts"] == {}


def shared(world: World, plan: Plan) -> list[int | None]:
    """Return how many ranks share a dense parameter, and one of experts that are dealt out, beyond tp and ep."""
    meshes = lay_out_meshes("cpu", plan, tied_ends=False, timeout_s=60)
    found = [meshes.sharing(outer) for outer in ((), ("ep",))]
    return [None if mesh is None else mesh.size(-1) for mesh in found]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [("tp=2,zero=1", [1, 1]), ("dp_shard=2,ep=2,zero=1", [2, 1]), ("dp_shard=2,ep=2,zero=3", [None, None])],
)
def test_state_is_shared_over_a_mesh_under_zero_1_and_2_if_only_with_oneself(workers, plan, expected):
    """The mesh says in which order splits are undone, and so what is sent, also where the last one is of one rank."""
    assert workers.run(2, shared, Plan.parse(plan)) == [expected] * 2


def test_a_single_process_is_a_mesh_of_ones_without_a_group():
    meshes = lay_out_meshes("cpu", Plan(zero=1), tied_ends=False, timeout_s=60)
    assert not dist.is_initialized()
    assert [meshes.rank(axis) for axis in MESH_AXES] == [0] * len(MESH_AXES)
    assert [meshes.group(axis) for axis in (*MESH_AXES, "replicate", "shard", "ep")] == [None] * (len(MESH_AXES) + 3)
    assert (meshes.stage, meshes.ends, meshes.sharing(()), meshes.axis_of_groups()) == (None, None, None, {})
    assert (meshes.ranks_of_stage(is_shared_by_ends=True), meshes.holders((), ())) == (1, (0,))
    with pytest.raises(LookupError, match="nothing is split"):
        meshes.device_mesh("tp")


def holders(world: World, plan: Plan, names: tuple[str, ...], split: tuple[str, ...]) -> tuple[int, ...]:
    return lay_out_meshes("cpu", plan, tied_ends=False, timeout_s=60).holders(names, split)


@pytest.mark.parametrize(
    ("plan", "names", "split", "expected"),
    [
        ("dp_replicate=2,tp=2", ("tp",), ("tp",), [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ("dp_replicate=2,tp=2", ("tp",), (), [(0, 1, 2, 3)] * 4),
        ("pp=2,dp_replicate=2", (), (), [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ("dp_shard=4,ep=2,zero=0", ("ep",), ("ep",), [(0, 2), (1, 3), (0, 2), (1, 3)]),
    ],
)
def test_holders_of_a_part_are_the_ranks_of_a_stage_at_its_place_along_the_split(workers, plan, names, split, expected):
    assert workers.run(4, holders, Plan.parse(plan), names, split) == expected


def timeouts(world: World, plan: Plan) -> set[timedelta]:
    """How long the groups of this rank wait."""
    meshes = lay_out_meshes("cpu", plan, tied_ends=plan.pp > 1, timeout_s=77)
    views = (meshes.axes, meshes.state, meshes.experts, *meshes.nested)
    groups = [group for view in views for group in view.get_all_groups()] + [meshes.stage, meshes.ends]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None}


@pytest.mark.parametrize("plan", ["dp_shard=2,tp=2,zero=1", "pp=2,dp_shard=2"])
def test_no_group_waits_longer_than_it_was_told(workers, plan):
    assert workers.run(4, timeouts, Plan.parse(plan)) == [{timedelta(seconds=77)}] * 4


def look_up_without_new_meshes(world: World) -> tuple[int, int]:
    """The place and the size of the group along dp_shard, where torch may not make another mesh for the answer."""
    meshes = lay_out_meshes("cpu", eager("dp_shard=2"), False, 60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(DeviceMesh, "__getitem__")
        group = meshes.group("shard")
        assert group is not None
        return meshes.rank("dp_shard"), group.size()


def test_a_place_or_a_group_is_looked_up_without_making_a_mesh(workers):
    """Each microbatch asks for places, and torch takes a millisecond for a mesh."""
    assert workers.run(2, look_up_without_new_meshes) == [(0, 2), (1, 2)]
