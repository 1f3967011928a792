"""Sums in tiers are chosen where a thin link makes them worth it, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster, NetworkTier, NodeGroup, SiteLink
from argosy.plan.hardware.devices import find_device
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.rules import first_problem
from argosy.plan.search.search import plainest, search

MBIT_S = 1e6 / 8
RING = {"pp": (1,), "tp": (1,), "dp_shard": (1,)}
"""Replicas only."""


def run(preset: str = "llama-5m", batch: int = 8, seq_len: int = 64) -> RunConfig:
    sizes = {"train.global_batch": batch, "data.seq_len": seq_len, "model.vocab_size": 4096}
    return load(None, {"model.preset": preset, **sizes})


def nodes(rate: float, many: int = 2, each: int = 2) -> Cluster:
    """CPU nodes of `each` processes behind a link of `rate` Mbit/s each."""
    network = NetworkTier(
        name="network", devices=many * each, bandwidth_bytes_per_s=rate * MBIT_S / each, latency_s=1e-4
    )
    group = NodeGroup(device=find_device("cpu"), nodes=many, devices_per_node=each)
    return Cluster(name="thin", groups=(group,), network=(network,))


def sites(rate: float) -> Cluster:
    """Two sites of two nodes of two processes."""
    group = NodeGroup(device=find_device("cpu"), nodes=2, devices_per_node=2, nic_bytes_per_s=1e9, site="a")
    link = SiteLink(sites=("a", "b"), bandwidth_bytes_per_s=rate * MBIT_S, latency_s=0.01)
    return Cluster(name="sites", groups=(group, group.model_copy(update={"site": "b"})), links=(link,))


def best(cluster: Cluster, asked: RunConfig, pins: dict[str, tuple[object, ...]] | None = None) -> Plan:
    found = search(CostModel.of(asked, cluster), pins or {})
    return found.plans.plan(plainest(found))


def test_replicas_of_a_node_behind_a_thin_link_sum_among_themselves_first() -> None:
    plan = best(nodes(100), run(), RING)
    assert (plan.dp_replicate, plan.sum_inside, plan.sum_between, plan.sync) == (4, 2, 1, "exact")


def test_tiers_take_the_share_of_a_ring_s_time_that_was_measured() -> None:
    """`benchmarks/results/tiers.md`: 0.69 at 100 Mbit/s, two sites of two processes."""
    costs = CostModel.of(run("llama-20m"), nodes(100))
    plans = [Plan.parse("dp_replicate=4"), Plan.parse("dp_replicate=4,sum_inside=2")]
    ring, tiers = costs.predict_time(Layouts.of(plans)).total
    assert tiers / ring == pytest.approx(0.69, abs=0.05)


def test_sites_of_one_world_sum_in_a_node_then_in_the_site_then_across() -> None:
    plan = best(sites(100), run(), RING)
    assert plan.world_size == 8
    assert plan.sum_inside * plan.sum_between == plan.replicas // 2


@pytest.mark.parametrize("cluster", ["8xh100", "256xh100", "8x8xa100"])
def test_plans_stay_plain_where_the_network_is_fast(cluster: str) -> None:
    asked = load(None, {"model.preset": "llama3-8b", "train.global_batch": 512, "data.seq_len": 4096})
    assert best(Cluster.parse(cluster), asked).sum_inside == 1


def test_a_pin_stays() -> None:
    assert best(nodes(100), run(), {"sum_inside": (1,)}).sum_inside == 1


def test_every_plan_with_tiers_can_run_and_is_as_fast_as_it_is_said_to_be() -> None:
    for asked in (run(), run("mixtral-10m")):
        costs = CostModel.of(asked, sites(100))
        found = search(costs, {})
        rows = np.flatnonzero(found.plans.sum_inside > 1)
        assert len(rows)
        assert all(first_problem(found.plans.plan(int(row)), asked) is None for row in rows)
        assert np.asarray(costs.predict_time(found.plans[rows]).total) == pytest.approx(found.step_s[rows])
