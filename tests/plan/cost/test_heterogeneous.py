"""Uneven shares: the best whole ones there are, never worse than even ones, equal where devices are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.config.load import load
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.heterogeneous import uneven_splits
from argosy.plan.dealing import deal
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.quantities import numbers_of
from argosy.plan.rules import first_problem

BATCH = 512
DATA = Plan.parse("dp_shard=64,zero=2,recompute=selective,precision=bf16")
STAGES = Plan.parse("pp=4,dp_shard=16,zero=1,recompute=selective,precision=bf16")


def costs_of(cluster: Cluster) -> CostModel:
    return CostModel.of(
        load(None, {"model.preset": "llama3-8b", "train.global_batch": BATCH, "data.seq_len": 8192}), cluster
    )


def step_s(costs: CostModel, plan: Plan) -> float:
    return float(np.asarray(costs.predict_time(Layouts.of([plan])).total)[0])


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.lists(st.integers(1, 2), min_size=2, max_size=2),
    st.lists(st.floats(0.5, 5), min_size=2, max_size=2),
    st.lists(st.integers(1, 9), min_size=2, max_size=2),
)
def test_no_other_deal_is_done_earlier(total: int, holders: list[int], of_piece: list[float], room: list[int]) -> None:
    counts, each = np.array(holders), np.arange(1, 10)
    seconds = np.where(each <= np.array(room)[:, None], np.array(of_piece)[:, None] * each, np.inf)
    dealt = deal(total, counts, seconds)
    kinds = [kind for kind, n in enumerate(holders) for _ in range(n)]
    others = [
        max(seconds[kind, n - 1] for kind, n in zip(kinds, pieces, strict=True))
        for pieces in product(range(1, 10), repeat=len(kinds))
        if sum(pieces) == total
    ]
    best = min(others, default=np.inf)
    if dealt is None:
        assert best == np.inf
        return
    pieces, slowest = dealt
    assert slowest == pytest.approx(best)
    assert pieces.sum() == total and ((pieces > 0).sum(axis=1) == counts).all()


@pytest.mark.parametrize(("plan", "what", "total"), [(DATA, "microbatches", BATCH), (STAGES, "layers", 32)])
def test_uneven_shares_follow_the_speed_and_beat_even_ones(plan: Plan, what: str, total: int) -> None:
    cluster = Cluster.parse("32xh100+32xa100")
    costs = costs_of(cluster)
    split = next(s for s in uneven_splits(costs, [plan]) if s.what == what)
    fast, slow = split.shares
    assert (fast.device, slow.device) == ("H100-SXM", "A100-80")
    assert fast.least > slow.most
    assert fast.holders * fast.least + slow.holders * slow.least <= total
    assert fast.holders * fast.most + slow.holders * slow.most >= total
    fastest_of_all = step_s(costs_of(Cluster.parse("64xh100")), plan)
    assert fastest_of_all < split.step_s < step_s(costs, plan)
    uneven = Plan.parse(split.plan)
    assert step_s(costs, uneven) == pytest.approx(split.step_s), "what is chosen is predicted alike when it is given"
    assert len(numbers_of(uneven.shares)) in (0, 2) and sum(numbers_of(uneven.layers)) in (0, total)
    assert first_problem(uneven, costs.run) is None


def test_layers_are_dealt_where_nobody_knows_the_memory() -> None:
    costs = costs_of(Cluster.parse("32xh100+32xa100"))
    anything = replace(costs, rates=replace(costs.rates, memory_bytes=np.inf))
    assert "layers" in [split.what for split in uneven_splits(anything, [STAGES])]


def test_alike_devices_need_no_such_thing() -> None:
    cluster = Cluster.parse("32xh100+32xh100")
    assert uneven_splits(costs_of(cluster), [DATA, STAGES]) == []


def test_axes_that_mix_kinds_in_one_replica_cannot_be_split() -> None:
    cluster = Cluster.parse("8xh100+56xa100")
    plan = Plan.parse("pp=4,dp_shard=2,tp=8,zero=1,precision=bf16")  # replicas of 32, stages of 16
    assert uneven_splits(costs_of(cluster), [plan]) == []
