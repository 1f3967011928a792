"""Figures by category add up, factors scale theirs, and a rank's sizes are the model's cut by the axes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.cost.breakdown import MEMORY_FACTORS, OF_TIME, RUN_STD, RankSizes, spread
from argosy.plan.cost.exact_state import state_bytes
from argosy.plan.cost.memory_model import Footprint
from argosy.plan.cost.rates import System
from argosy.plan.cost.step_time import StepTime
from argosy.plan.hardware.clusters import Factor
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload

COLUMNS = Footprint(*(np.arange(4.0) * 10**place for place, _ in enumerate(fields(Footprint))))


def test_categories_of_a_row_add_up_to_its_total():
    for row in range(4):
        parts = COLUMNS.by_category(row)
        assert list(parts) == [f.name for f in fields(Footprint)]
        assert sum(parts.values()) == pytest.approx(COLUMNS.total[row])


@pytest.mark.parametrize("chosen", [np.array([True, False, True, False]), np.array([0, 2])], ids=["mask", "numbers"])
def test_rows_are_those_that_are_chosen(chosen):
    assert COLUMNS.rows(chosen).total.tolist() == COLUMNS.total[[0, 2]].tolist()


TIME = StepTime(**{f.name: 1.0 for f in fields(StepTime)})
MEMORY = Footprint(**{f.name: 1.0 for f in fields(Footprint)})
STATE = {"weights", "gradients", "optimizer"}


def test_every_category_has_one_factor_but_the_state_which_is_exact():
    of_time = [name for names in OF_TIME.values() for name in names]
    assert sorted(of_time) == sorted(f.name for f in fields(StepTime))
    assert set(MEMORY_FACTORS["memory"]) == {f.name for f in fields(Footprint)} - STATE


def test_a_factor_multiplies_its_own_categories():
    slower = TIME.calibrated({"network": Factor(value=3.0, std=0.1), "memory": Factor(value=9.0, std=0.1)})
    assert {name for name, value in vars(slower).items() if value == 3.0} == set(OF_TIME["network"])
    assert slower.total == TIME.total + 2 * len(OF_TIME["network"])
    larger = MEMORY.calibrated({"optimizer": Factor(value=3.0, std=0.1), "memory": Factor(value=9.0, std=0.1)})
    assert {name for name, value in vars(larger).items() if value == 9.0} == set(MEMORY_FACTORS["memory"])
    assert larger.optimizer == 1.0


def test_without_factors_a_prediction_errs_as_on_any_cluster():
    assert spread({"ideal": 3.0, "tensor": 1.0}, OF_TIME, {}, 0.2) == pytest.approx(0.2)


def test_what_was_learnt_makes_predictions_surer_by_its_share():
    known = {"compute": Factor(value=2.0, std=0.02)}
    assert spread({"ideal": 1.0}, OF_TIME, known, 0.2) == pytest.approx((RUN_STD**2 + 0.01**2) ** 0.5)
    shares = [spread({"ideal": 1 - share, "tensor": share}, OF_TIME, known, 0.2) for share in (0.0, 0.5, 1.0)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(0.2)


def test_where_memory_was_learnt_the_state_is_exact():
    known = {"memory": Factor(value=1.0, std=0.1)}
    assert spread({"weights": 3.0, "activations": 1.0}, MEMORY_FACTORS, known, 0.2) == pytest.approx(
        (RUN_STD**2 + 0.025**2) ** 0.5
    )


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama3-8b", "dp_replicate=8,zero=0"),
        ("llama3-8b", "dp_replicate=2,tp=4,zero=0"),
        ("deepseek-v3", "dp_shard=8,ep=8,tp=2,zero=1"),
        ("qwen3-30b-a3b", "dp_shard=4,ep=4,zero=1"),
    ],
)
def test_parameters_of_a_rank_are_those_of_the_exact_count(model, plan):
    run = load(
        None, {"model.preset": model, "data.seq_len": 4096, "train.global_batch": 64, "model.vocab_size": 32_000}
    )
    laid_out, work = Plan.parse(plan), Workload.of(run)
    dense, experts = RankSizes(Layouts.of([laid_out]), work, System()).parameters(work.layers)
    ends = (2 - work.tied) * work.vocabulary_parameters / laid_out.tp
    exact = state_bytes(laid_out, run).parameters / 4
    assert float(np.squeeze(dense + experts + ends)) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(("plan", "padding"), [("dp_shard=8,ep=8,zero=1", 1), ("tp=8,ep=8", 1), ("dp_shard=96", 1.5)])
def test_whole_experts_are_dealt_to_the_ranks_that_share_them(plan, padding):
    """64 of them; the second is how other systems deal them, over tensor-parallel ranks."""
    work = Workload.of(load(None, {"model.preset": "deepseek-v2-lite", "data.seq_len": 4096}))
    found = RankSizes(Layouts.of([Plan.parse(plan)]), work, System(deals_experts=1)).expert_padding
    assert float(np.squeeze(found)) == padding


def test_sizes_of_many_plans_are_those_of_each():
    work = Workload.of(load(None, {"model.preset": "llama3-8b", "data.seq_len": 8192, "train.global_batch": 64}))
    plans = [Plan.parse(text) for text in ("tp=4,cp=2", "dp_shard=8,microbatch=4,precision=bf16")]
    together = RankSizes(Layouts.of(plans), work, System())
    for row, plan in enumerate(plans):
        alone = RankSizes(Layouts.of([plan]), work, System())
        for name in ("microbatches", "tokens", "activation_bytes", "sequence_ranks", "hidden_bytes"):
            assert np.broadcast_to(getattr(together, name), 2)[row] == np.squeeze(getattr(alone, name)), name
