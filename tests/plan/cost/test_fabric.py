"""Groups get the links that a topology has for them, and ranks are placed where their axes meet the widest ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.cost.collectives import Group, all_reduce_s, all_reduces, all_to_all_s, gather_s, send_s, shared
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.fabric import ORDERS, Arrangement
from argosy.plan.cost.network import group_of
from argosy.plan.cost.rates import Rates
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.topology import Topology
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan

EXAMPLES = Path(__file__).parents[3] / "examples" / "networks"
FREE = Constants(link=1.0, nic=1.0, latency=1e-30, hop=1e-30)
GB = 1e9


def joined(text: str, **keys: object) -> Cluster:
    return Cluster.parse(text).changed(topology=Topology(**{"switch_latency_s": 0.0, **keys}))


def group(cluster: Cluster, ranks: int, stride: int, constants: Constants = FREE) -> Group:
    return group_of(ranks, stride, Rates.of(cluster), constants)


def one(value: object) -> float:
    return float(np.ravel(value)[0])


def tree(oversubscription: float = 4.0, **keys: object) -> Cluster:
    return joined("256xh100", kind="fat-tree", nodes_per_leaf=4, oversubscription=oversubscription, **keys)


def test_a_tree_without_oversubscription_is_the_flat_network():
    flat, full = Cluster.parse("256xh100"), tree(1.0)
    for ranks, stride in (8, 1), (16, 1), (32, 8), (256, 1), (4, 64):
        a, b = group(flat, ranks, stride), group(full, ranks, stride)
        for cost in (lambda g: gather_s(GB, g), lambda g: all_to_all_s(GB, g), lambda g: send_s(GB, g)):
            assert one(cost(b)) == pytest.approx(one(cost(a)))


@pytest.mark.parametrize(("sync", "gains"), [("exact", True), ("bf16", True), ("int8", False), ("topk", False)])
def test_switches_add_up_only_what_is_sent_as_a_sum(sync, gains):
    plan = Layouts.of([Plan.parse(f"dp_replicate=256,zero=0,precision=bf16,sync={sync}")])
    run = load("demo", {"model.preset": "llama3-8b", "train.global_batch": 256})
    ring, sharp = (
        one(CostModel.of(run, tree(1.0, algorithms=names)).step_model(plan).predict().gradients)
        for names in (("ring",), ("ring", "sharp"))
    )
    assert sharp < ring if gains else sharp == ring > 0


def test_the_network_over_nodes_changes_no_sum_inside_of_them():
    plan = Layouts.of([Plan.parse("pp=32,dp_replicate=8,zero=0,precision=bf16")])
    run = load("demo", {"model.preset": "llama3-8b"})
    each = [CostModel.of(run, place).step_model(plan) for place in (Cluster.parse("256xh100"), tree(1.0))]
    known, flat = (one(model.predict().gradients) for model in each)
    assert known == pytest.approx(flat)


@pytest.mark.parametrize(
    ("ranks", "stride", "ring", "exchange"),
    [
        (4, 8, 50e9, 50e9),  # one rank in each node of a leaf
        (32, 8, 50e9, 50e9 / 4 * (31 / 32) / (28 / 32)),  # four of each leaf carry their ring's one link out of it
        (8, 32, 50e9 / 4, 50e9 / 4),  # one of each leaf
        (2, 128, 50e9 / 4, 50e9 / 4),
    ],
)
def test_a_ring_leaves_a_leaf_by_the_shares_of_its_ranks_there(ranks, stride, ring, exchange):
    found = group(tree(), ranks, stride)
    assert one(found.ring) == pytest.approx(ring)
    assert one(found.exchange) == pytest.approx(exchange)


def test_torus_reaches_what_google_prints_for_its_pods():
    """docs.cloud.google.com/tpu/docs/v4 and v5e: all-reduce and bisection bandwidth of a pod."""
    for name, all_reduce, bisection in ("torus-3d", 1.1e15, 24e12), ("torus-2d", 51.2e12, 1.6e12):
        cluster = Cluster.load(EXAMPLES / f"{name}.toml")
        pod = group(cluster, cluster.devices, 1)
        assert one(pod.ring) * cluster.devices == pytest.approx(all_reduce, rel=0.01)
        half = cluster.devices / 2  # of what each device sends in an all-to-all, half goes through the middle
        assert half * GB / 2 / one(all_to_all_s(GB, pod)) == pytest.approx(bisection, rel=0.05)


def test_rails_without_a_spine_cost_an_all_to_all_what_their_authors_found():
    """Wang et al. 2023, abstract: 8.2 to 11.2 % of an all-to-all's time, for forwarding inside nodes."""
    flat, rails = Cluster.parse("256xh100"), joined("256xh100", kind="rail-only")
    rates = Rates.of(flat)
    assert (rates.link_bytes_per_s, rates.nic_bytes_per_s) == (366e9, 50e9)
    both = [
        one(all_to_all_s(GB, group_of(256, 1, replace(Rates.of(c), link_bytes_per_s=450e9), FREE)))
        for c in (flat, rails)
    ]
    assert 1.082 <= both[1] / both[0] <= 1.112


def test_a_ring_along_a_part_of_a_dimension_does_not_close():
    ring = joined("16xtpu-v4", kind="torus", dims=(16,), link_bytes_per_s=45e9)
    mesh = joined("16xtpu-v4", kind="torus", dims=(16,), link_bytes_per_s=45e9, wrap=False)
    assert one(group(ring, 16, 1).ring) == pytest.approx(90e9)
    assert one(group(ring, 4, 1).ring) == one(group(mesh, 16, 1).ring) == pytest.approx(45e9)
    assert one(group(ring, 4, 4).ring) == pytest.approx(90e9 / 4), "four rings share each link"
    assert one(all_to_all_s(GB, group(mesh, 16, 1))) == pytest.approx(2 * one(all_to_all_s(GB, group(ring, 16, 1))))


def test_a_dragonfly_s_groups_have_all_links_for_all_and_few_for_one():
    cluster = joined("1024xh100", kind="dragonfly", nodes_per_router=2, routers_per_group=8, global_links=4)
    found = group(cluster, 8, 128)  # one rank of each of 8 groups; 32 links leave the 128 devices of a group
    assert one(found.ring) == pytest.approx(50e9 * 16 / 128), "by way of other groups: half of the links"
    assert one(found.exchange) == pytest.approx(50e9 * 32 / 128)


def test_circuits_are_shared_out_and_forwarded():
    cluster = joined("512xh100", kind="optical", circuits=8)
    fabric = Rates.of(cluster).fabric
    assert fabric is not None
    plans = Layouts.of([Plan.parse("dp_replicate=16,tp=8,pp=4")])
    ways = [Arrangement(circuits=(6, 6, 2)), Arrangement(circuits=(2, 2, 6))]
    rates = [replace(Rates.of(cluster), fabric=fabric.placed(plans, ways, np.array([way]))) for way in (0, 1)]
    data, stages = ([group_of(n, s, r, FREE) for r in rates] for n, s in ((16, 8), (4, 128)))
    assert [one(each.ring) for each in data] == pytest.approx([50e9 * 6 / 8, 50e9 * 2 / 8])
    assert [one(each.nic) for each in stages] == pytest.approx([50e9 * 2 / 8, 50e9 * 6 / 8])
    assert one(data[1].exchange) == pytest.approx(50e9 * 2 / 8 / (2 * (16 ** (1 / 2) - 1) / 2))
    assert not np.any(shared(data[0], stages[0]))


def test_each_algorithm_takes_what_is_published():
    names = ("ring", "tree", "hierarchical", "sharp")
    found = group(tree(1.0, algorithms=names), 256, 1, replace(FREE, latency=1e-5, hop=1e-6))
    link, nic = 366e9, 50e9
    large = {name: one(s) for name, s in all_reduces(100 * GB, found).items()}
    assert large["ring"] == pytest.approx(2 * 255 / 256 * 100 * GB / link, rel=0.01)
    assert large["tree"] == pytest.approx(2 * 100 * GB / link, rel=0.01)
    assert large["hierarchical"] == pytest.approx(2 * 7 / 8 * 100 * GB / link + 2 * 31 / 32 * 100 * GB / link, rel=0.01)
    assert large["sharp"] == pytest.approx(max(2 * 7 / 8 * 100 * GB / link, 100 * GB / 8 / nic), rel=0.01)
    small = {name: one(s) for name, s in all_reduces(1.0, found).items()}
    assert small["sharp"] < small["hierarchical"] < small["tree"] < small["ring"]
    assert one(all_reduce_s(1.0, found)) == pytest.approx(small["sharp"])
    plain = group(tree(1.0), 256, 1)
    assert one(all_reduce_s(GB, plain)) == pytest.approx(
        one(all_reduce_s(GB, group(Cluster.parse("256xh100"), 256, 1)))
    )


def test_sums_in_switches_send_once_where_uplinks_are_narrow():
    ring, sharp = (
        group(tree(8.0, algorithms=names), 8, 32) for names in (("ring",), ("ring", "sharp"))
    )  # one rank of each leaf
    assert one(all_reduce_s(GB, ring)) == pytest.approx(2 * 7 / 8 * GB / (50e9 / 8))
    assert one(all_reduce_s(GB, sharp)) == pytest.approx(GB / 50e9)


@pytest.mark.parametrize("words", ["dp_replicate=4,dp_shard=8,tp=8,pp=4", "dp_shard=16,tp=4,pp=16", "dp_shard=2,tp=8"])
def test_each_placement_gives_each_machine_its_ranks(words):
    cluster, plan = joined("1024xh100", kind="fat-tree", nodes_per_leaf=4), Plan.parse(words)
    fabric, rows = Rates.of(cluster).fabric, Layouts.of([plan])
    assert fabric is not None
    maps = [
        fabric.placed(rows, fabric.arrangements(), np.array([way])).machine_of(plan, 1) for way in range(len(ORDERS))
    ]
    assert maps[0] == list(range(plan.world_size // 8))
    assert all(sorted(each) == maps[0] for each in maps)


def costs(cluster: Cluster, preset: str = "llama3-70b", batch: int = 512) -> CostModel:
    run = load(None, {"model.preset": preset, "data.seq_len": 4096, "train.global_batch": batch})
    return CostModel.of(run, cluster)


def test_whoever_sends_more_shares_a_leaf():
    """Gradients of a large model outweigh what stages send; with a small model and a large batch it is the reverse."""
    plan = Layouts.of([Plan.parse("dp_shard=8,tp=8,pp=4,zero=1,microbatch=1,precision=bf16")])
    large, small = costs(tree(32.0)), costs(tree(32.0), "llama3-8b", batch=32768)
    moved = []
    for model in large, small:
        placed = model.placements(plan)
        assert placed is not None
        moved.append(ORDERS[placed.ways[int(placed.rows[0])].order][0] != 0)
        assert one(model.predict_time(plan).total) <= one(replace(model, is_in_order=True).predict_time(plan).total)
    assert moved == [False, True]


def test_placing_is_the_same_for_one_plan_and_for_many():
    model = costs(Cluster.load(EXAMPLES / "fat-tree.toml"))
    words = [
        "dp_shard=128,tp=8",
        "pp=8,dp_shard=16,tp=8",
        "pp=16,dp_replicate=8,dp_shard=2,tp=4",
        "pp=4,dp_shard=32,tp=8",
    ]
    plans = [Plan.parse(f"{text},zero=1,microbatch=1,precision=bf16") for text in words]
    together = np.asarray(model.predict_time(Layouts.of(plans)).total)
    alone = [one(model.predict_time(Layouts.of([plan])).total) for plan in plans]
    assert together == pytest.approx(alone)


def test_a_job_gets_the_torus_that_its_axes_want():
    model = costs(Cluster.load(EXAMPLES / "optical-blocks.toml"))
    plan = Layouts.of([Plan.parse("pp=16,dp_shard=2,cp=2,tp=8,zero=1,microbatch=1,precision=bf16")])
    asked, even = (one(each.predict_time(plan).total) for each in (model, replace(model, is_in_order=True)))
    assert asked < 0.95 * even


def test_axes_on_one_wire_leave_each_other_less_to_hide_behind():
    words = "pp=4,dp_shard=8,cp=8,zero=1,microbatch=1,precision=bf16"
    model = costs(tree(16.0)).step_model(Layouts.of([Plan.parse(words)]))
    taken = one(model.taken_s(model.data_group))
    assert taken > 0
    on_own = costs(Cluster.parse("256xh100")).step_model(Layouts.of([Plan.parse(words)]))
    assert on_own.taken_s(on_own.data_group) == 0.0
    alone = replace_taken(model)
    assert one(model.predict().gradients) > one(alone.predict().gradients)


def replace_taken(model):
    """The same step if each axis had wires of its own."""

    class Apart(type(model)):
        def taken_s(self, group):
            return 0.0

    return Apart(model.plans, model.work, model.rates, model.system, model.constants, model.compression)
