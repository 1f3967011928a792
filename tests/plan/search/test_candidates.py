"""Candidates have the costs of one plan each, and the numbers of devices that are tried are those that plans like."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.exact_state import state_bytes
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.candidates import MOST_COUNTS, WholeRunModel, best_of_each, counts_up_to, grown, rounder
from argosy.plan.search.search import search

RUN = load(None, {"model.preset": "llama3-8b", "train.global_batch": 64, "data.seq_len": 8192})
NETWORKS = Path(__file__).parents[3] / "examples" / "networks"
PLANS = ("dp_shard=16,recompute=full,precision=bf16", "tp=2,dp_shard=8,recompute=full,precision=bf16")


def economy(cluster: str) -> WholeRunModel:
    place = Cluster.parse(cluster)
    return WholeRunModel(RUN, place, CostModel.of(RUN, place), tokens=1e9)


def test_a_candidate_is_the_same_alone_and_among_others() -> None:
    model, plans = economy("16xh100"), [Plan.parse(text) for text in PLANS]
    together = model.choices(Layouts.of(plans))
    assert [choice.plan for choice in together] == [str(plan) for plan in plans]
    for plan, among in zip(plans, together, strict=True):
        (alone,) = model.choices(Layouts.of([plan]))
        assert alone.run.time_s.mid == pytest.approx(among.run.time_s.mid)
        assert alone.effective.mid == pytest.approx(among.effective.mid)
        assert alone.run.steps == among.run.steps == np.ceil(1e9 / RUN.tokens_per_step)


@pytest.mark.parametrize(("every_steps", "full_steps"), [(100, 20 * 0.1), (0, 0.1)])
def test_evaluations_take_their_part_of_a_run(every_steps: int, full_steps: float) -> None:
    """12 rows are read as 16, one for each rank, in two fifths of the time of a step's 64, 20 times in 1908 steps."""
    model = economy("16xh100")
    model.run = RUN.with_keys(evaluate={"every_steps": every_steps})
    (found,) = model.choices(Layouts.of([Plan.parse(PLANS[0])]))
    productive_s = found.run.time_s.mid * found.effective.mid
    assert productive_s == pytest.approx((1908 + full_steps) * found.step_s.mid)


@pytest.mark.parametrize(("optimizer", "plan"), [("adamw", Plan()), ("muon", Plan()), ("adamw", Plan(weights="bf16"))])
def test_a_checkpoint_is_as_large_as_the_state(optimizer: str, plan: Plan) -> None:
    run, cluster = RUN.with_keys(optimizer={"kind": optimizer}), Cluster.parse("16xh100")
    exact = state_bytes(plan, run)
    model = WholeRunModel(run, cluster, CostModel.of(run, cluster), tokens=1e9)
    assert model.state_bytes(Layouts.of([plan])) == pytest.approx(exact.parameters + exact.optimizer, rel=1e-3)


def test_objectives_rank_by_what_they_say() -> None:
    model = economy("16xh100")
    found = search(model.costs, {}, [16, 8])
    step_s, cost = model.score(found, "time"), model.score(found, "cost")
    assert (step_s == found.step_s).all()
    dearest, cheapest = (model.choices(found.plans[np.array([pick(cost)])])[0] for pick in (np.argmax, np.argmin))
    assert cheapest.run.money is not None and dearest.run.money is not None
    assert cheapest.run.money.mid < dearest.run.money.mid


def test_the_counts_are_parts_of_a_node_and_whole_nodes() -> None:
    assert counts_up_to(CostModel.of(RUN, Cluster.parse("32xh100"))) == [1, 2, 4, 8, 16, 24, 32]


def test_of_many_nodes_some_are_tried_the_round_ones_among_them() -> None:
    counts = counts_up_to(CostModel.of(RUN, Cluster.parse("16384xh100")))
    assert len(counts) < 2 * MOST_COUNTS and counts[-1] == 16_384
    assert {8 * 1024, 8 * 768, 8 * 3, 8} <= set(counts)


@pytest.mark.parametrize(("count", "near"), [(600, [512, 384, 576]), (512, []), (75, [64, 48, 72]), (24, [])])
def test_round_numbers_below_a_count(count: int, near: list[int]) -> None:
    assert sorted(rounder(count)) == sorted(near)


def test_a_cluster_grows_by_whole_nodes_with_its_network() -> None:
    larger = grown(Cluster.parse("h100-16384"), 2)
    assert larger.devices == 32_768
    assert not larger.network or larger.network[-1].devices >= 32_768


def test_a_torus_grows_with_its_cluster() -> None:
    pod = NETWORKS / "torus-2d.toml"
    larger = grown(Cluster.load(pod), 2)
    assert larger.topology is not None and larger.topology.dims == (16, 32)
    named = pod.read_text().replace("nodes = 1\n", "nodes = 2\n").replace("dims = [16, 16]", "dims = [16, 32]")
    assert larger == Cluster.model_validate(tomllib.loads(named))


def test_the_best_of_each_number_of_devices() -> None:
    rows = best_of_each(np.array([3.0, 1.0, 2.0, 5.0]), np.array([8, 8, 4, 4]))
    assert rows.tolist() == [2, 1]
