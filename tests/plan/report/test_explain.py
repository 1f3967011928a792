"""What is said of a plan adds up, and what would change it changes it so."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.report.explain import (
    MEANING,
    MEMORY_MEANING,
    binding,
    interval,
    memory_of,
    misfit,
    nearest,
    sensitivities,
    waterfall,
)
from argosy.plan.search.search import Problem, predict_memory, predict_time, search
from argosy.plan.search.space import parse_pins

PLAN = Plan.parse("pp=2,dp_shard=4,tp=2,zero=1,recompute=selective,precision=bf16")


def problem_of(cluster: str = "16xh100", model: str = "llama3-8b") -> Problem:
    run = load(None, {"model.preset": model, "train.global_batch": 64, "data.seq_len": 8192})
    return Problem.of(run, Cluster.parse(cluster))


def test_the_waterfall_adds_up_to_the_step_and_every_part_has_a_meaning() -> None:
    time = predict_time(problem_of(), Layouts.of([PLAN, Plan.parse("dp_shard=16,precision=bf16")]))
    for row in range(2):
        parts = waterfall(time, row)
        assert sum(parts.values()) == pytest.approx(np.asarray(time.step)[row])
        assert parts.keys() <= MEANING.keys()
        assert next(iter(parts)) == "ideal"


def test_memory_adds_up() -> None:
    memory = predict_memory(problem_of(), Layouts.of([PLAN]))
    parts = memory_of(memory, 0)
    assert sum(parts.values()) == pytest.approx(np.asarray(memory.total)[0])
    assert parts.keys() == MEMORY_MEANING.keys()


def test_a_tenth_more_of_anything_makes_no_step_longer_and_the_most_helpful_is_first() -> None:
    changes = sensitivities(problem_of(), PLAN)
    assert [change.change for change in changes] == sorted(change.change for change in changes)
    assert all(-0.1 < change.change < 1e-9 for change in changes)
    assert binding(changes) == "matmul rate"


def test_what_binds_follows_the_cluster() -> None:
    """Pipeline, tensor and data parallelism over thin links: the NIC; the same on one node: never the NIC."""
    thin = problem_of("16x1xh100")
    slow = replace(thin, rates=replace(thin.rates, nic_bytes_per_s=1e9))
    assert binding(sensitivities(slow, PLAN)) == "NIC bandwidth"
    inside = sensitivities(problem_of("8xh100"), Plan.parse("dp_shard=4,tp=2,precision=bf16"))
    assert next(change for change in inside if "NIC" in change.what).change == 0


def test_a_sensitivity_is_what_the_changed_cluster_gives() -> None:
    problem = problem_of()
    change = next(c for c in sensitivities(problem, PLAN) if c.what == "+10 % NIC bandwidth")
    better = replace(problem, rates=replace(problem.rates, nic_bytes_per_s=problem.rates.nic_bytes_per_s * 1.1))
    before, after = (float(np.asarray(predict_time(p, Layouts.of([PLAN])).step)[0]) for p in (problem, better))
    assert change.change == pytest.approx(after / before - 1)


def test_more_memory_may_allow_a_faster_plan() -> None:
    problem = problem_of("8xh100")
    found = search(problem, {})
    best = found.plans.plan(int(found.best(found.step_s, 1)[0]))
    change = next(c for c in sensitivities(problem, best, found) if c.what == "+10 % memory")
    more = replace(problem, rates=replace(problem.rates, memory_bytes=problem.rates.memory_bytes * 1.1))
    assert change.change == pytest.approx(search(more, {}).step_s.min() / found.step_s.min() - 1, abs=1e-9)


def test_a_misfit_says_by_how_much_and_in_what() -> None:
    problem, plan = problem_of("8xh100"), Plan.parse("dp_replicate=8,zero=0,precision=bf16")
    missing = misfit(problem, plan)
    assert missing is not None
    memory = predict_memory(problem, Layouts.of([plan]))
    assert missing.excess_bytes == pytest.approx(float(np.asarray(memory.total)[0]) - problem.memory_bytes)
    assert missing.largest == "optimizer"
    assert missing.largest_bytes == float(np.asarray(memory.optimizer)[0])
    assert misfit(problem, PLAN) is None


def test_the_nearest_to_a_plan_that_fits_is_itself() -> None:
    found = search(problem_of(), parse_pins("cp=1"))
    for row in (0, len(found) // 2, len(found) - 1):
        assert nearest(found.plans.plan(row), found) == row


def test_the_nearest_differs_in_as_little_as_can_be() -> None:
    found = search(problem_of("8xh100"), {})
    wanted = Plan.parse("dp_shard=8,zero=0,recompute=full,precision=bf16")
    row = nearest(wanted, found)
    assert row is not None
    near = found.plans.plan(row)
    assert near.model_dump(exclude={"zero"}) == wanted.model_dump(exclude={"zero"})


def test_nothing_is_near_where_nothing_fits() -> None:
    assert nearest(PLAN, search(problem_of("8xh100", "llama3-70b"), {})) is None


def test_nine_of_ten_log_normal_figures_are_in_the_interval() -> None:
    estimate = interval(10.0, 0.2)
    drawn = 10 * np.exp(0.2 * np.random.default_rng(0).standard_normal(100_000))
    assert np.mean((drawn > estimate.low) & (drawn < estimate.high)) == pytest.approx(0.9, abs=0.005)
    assert math.sqrt(estimate.low * estimate.high) == pytest.approx(10)
