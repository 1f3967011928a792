"""What does not fit is said, and what is near it and does."""

from __future__ import annotations

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.search import misfit, nearest_that_fits, search
from argosy.plan.search.space import parse_pins

PLAN = Plan.parse("pp=2,dp_shard=4,tp=2,zero=1,recompute=selective,precision=bf16")


def costs_of(cluster: str = "16xh100", model: str = "llama3-8b") -> CostModel:
    run = load(None, {"model.preset": model, "train.global_batch": 64, "data.seq_len": 8192})
    return CostModel.of(run, Cluster.parse(cluster))


def test_a_misfit_says_by_how_much_and_in_what() -> None:
    costs, plan = costs_of("8xh100"), Plan.parse("dp_replicate=8,zero=0,precision=bf16")
    missing = misfit(costs, plan)
    assert missing is not None
    memory = costs.predict_memory(Layouts.of([plan]))
    assert missing.excess_bytes == pytest.approx(float(np.asarray(memory.total)[0]) - costs.memory_bytes)
    assert missing.largest == "optimizer"
    assert missing.largest_bytes == float(np.asarray(memory.optimizer)[0])
    assert misfit(costs, PLAN) is None


def test_the_nearest_to_a_plan_that_fits_is_itself() -> None:
    found = search(costs_of(), parse_pins("cp=1"))
    for row in (0, len(found) // 2, len(found) - 1):
        assert nearest_that_fits(found.plans.plan(row), found) == row


def test_the_nearest_differs_in_as_little_as_can_be() -> None:
    found = search(costs_of("8xh100"), {})
    wanted = Plan.parse("dp_shard=8,zero=0,recompute=full,precision=bf16")
    row = nearest_that_fits(wanted, found)
    assert row is not None
    near = found.plans.plan(row)
    assert near.model_dump(exclude={"zero"}) == wanted.model_dump(exclude={"zero"})


def test_nothing_is_near_where_nothing_fits() -> None:
    assert nearest_that_fits(PLAN, search(costs_of("8xh100", "llama3-70b"), {})) is None
