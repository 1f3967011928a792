"""A run whose batch grows: the same samples once each, on any mesh, after any stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.chaos.run import read_ledger
from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.errors import UserError
from argosy.observe.events import Metrics
from argosy.parallel.world import World
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report.report import PlanRequest, plan_report
from argosy.plan.rules import first_problem
from argosy.plan.search.search import search
from argosy.plan.search.space import check_plan
from argosy.training.schedule import Pace
from tiny import EAGER, eager, losses, run_config, train_in

SIZES = [2, 2, 4, 4, 4, 8, 8, 8]
RAMP = {"batch_ramp": [{"until_step": 2, "global_batch": 2}, {"until_step": 5, "global_batch": 4}]}


def ramped(corpus: Path, **sections: Any) -> RunConfig:
    return run_config(corpus, **{**sections, "train": {**RAMP, **sections.get("train", {})}})


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory) -> list[dict[str, Any]]:
    """The records of one process that nothing stopped."""
    return train_in(World(), ramped(corpus), eager("microbatch=2"), tmp_path_factory.mktemp("reference"))


def test_every_sample_is_trained_on_once_and_counted(reference):
    steps = [record for record in reference if "loss" in record]
    assert [record["samples"] for record in steps] == SIZES
    assert [record["first_sample"] for record in steps] == [sum(SIZES[:n]) for n in range(8)]
    assert steps[-1]["tokens"] == 32 * sum(SIZES)
    ledger = read_ledger(reference)
    assert (ledger.committed, ledger.problems) == (sum(SIZES), ())


def test_the_samples_of_a_ramp_are_those_of_a_run_without_in_the_same_order(corpus):
    run = ramped(corpus)
    plain, grown = open_data(run.data, run.seed, 1), open_data(run.data, run.seed, run.train.batches)
    rows = [row for step in range(8) for row in grown.loader(slice(0, 8)).read(step).tolist()]
    assert rows == [plain.loader(slice(0, 1)).read(step)[0].tolist() for step in range(len(rows))]
    halves = [grown.loader(slice(first, first + 4)) for first in (0, 4)]
    assert rows == [row for step in range(8) for half in halves for row in half.read(step).tolist()]


@pytest.mark.parametrize("plan", [pytest.param("dp_replicate=2", marks=pytest.mark.slow), "dp_shard=2,zero=3", "pp=2"])
def test_every_plan_gives_the_losses_of_one_process(workers, corpus, reference, tmp_path, plan):
    laid_out = eager(f"{plan},microbatch=1")
    check_plan(laid_out, ramped(corpus), 2)
    records = workers.run(2, train_in, ramped(corpus), laid_out, tmp_path)[0]
    assert losses(records) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(corpus, reference, tmp_path, stop_after):
    plan = eager("microbatch=2")
    train_in(World(), ramped(corpus), plan, tmp_path, stop_after)
    assert losses(train_in(World(), ramped(corpus), plan, tmp_path)) == losses(reference)
    assert not read_ledger(Metrics(tmp_path).read()).problems


def test_stages_of_the_data_begin_at_their_step(corpus):
    run = ramped(corpus, data={"stages": [{"from_step": 5, "sources": {str(corpus): 2.0}}]})
    assert open_data(run.data, run.seed, run.train.batches).order.starts == [0, sum(SIZES[:5])]


def test_a_plan_that_cannot_deal_out_a_stage_is_refused_with_its_batch(corpus):
    run = ramped(corpus)
    assert first_problem(eager("dp_shard=2,microbatch=1"), run) is None
    with pytest.raises(UserError, match=r"train.batch_ramp: global_batch = 2 is not a multiple of 4"):
        check_plan(eager("dp_shard=2,microbatch=2"), run, 2)
    problem = first_problem(eager("pp=2,microbatch=2"), run)
    assert problem is not None and "cannot run 1 microbatches a step" in problem
    assert first_problem(EAGER, run_config(corpus)) is None


def test_the_planner_takes_only_plans_for_all_stages_and_counts_the_time_of_each(corpus):
    train = {"steps": 1000, "global_batch": 64}
    stages = [{"until_step": 400, "global_batch": 4}, {"until_step": 600, "global_batch": 16}]
    grows = run_config(corpus, train={**train, "batch_ramp": stages})
    plain = run_config(corpus, train=train)
    cluster = Cluster.parse("4xh100")
    found = search(CostModel.of(grows, cluster), {})
    assert len(found) and not any((4 % (found.plans.dp * found.plans.microbatch)).tolist())
    tokens = float(grows.tokens_before(1000))
    report = plan_report(PlanRequest(grows, cluster, tokens))
    best = report.choices[0].run
    assert best.steps == 1000
    step_s = float(report.choices[0].step_s.mid)
    assert 400 * step_s < float(best.time_s.mid) < 1000 * step_s
    assert plan_report(PlanRequest(plain, cluster, tokens)).choices[0].run.steps == tokens / plain.tokens_per_step


def test_the_time_left_counts_samples(corpus):
    run = ramped(corpus, train={"steps": 105}, evaluate={"every_steps": 0})
    pace = Pace(run)
    for step in range(5):
        pace.took(0.25 * run.train.batches.at(step), step)
    assert pace.left_s(5) == pytest.approx(100 * 0.25 * 8)
