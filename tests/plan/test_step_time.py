"""The time of a step: what must hold whatever the constants are."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from argosy.config.load import load
from argosy.plan.constants import Constants
from argosy.plan.hardware import find_device
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.rates import Rates, System
from argosy.plan.step_time import StepModel, StepTime
from argosy.plan.workload import Workload

H100 = Rates.of_device(find_device("h100"))
SEQ_LEN, BATCH = 8192, 256


def work(preset: str = "llama3-8b") -> Workload:
    return Workload.of_model(load("demo", {"model.preset": preset}).model, SEQ_LEN, BATCH)


def step(*plans: str, preset: str = "llama3-8b", rates: Rates = H100, system: System | None = None) -> StepTime:
    layouts = Layouts.of([Plan.parse(f"precision=bf16,{plan}") for plan in plans])
    return StepModel(layouts, work(preset), rates, system or System(), Constants()).predict()


@pytest.mark.parametrize("preset", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
@pytest.mark.parametrize("plan", ["dp_shard=64", "tp=8,dp_shard=8", "pp=8,dp_shard=8,zero=1", "tp=2,cp=4,dp_shard=8"])
def test_ideal_is_the_models_flops_at_the_data_sheets_rate(preset, plan):
    flops = work(preset).train_flops_per_token * SEQ_LEN * BATCH
    assert step(plan, preset=preset).ideal == pytest.approx(flops / 64 / 989e12, rel=1e-6)


@pytest.mark.parametrize("plan", ["dp_shard=64", "pp=4,tp=4,dp_shard=4,zero=1,recompute=full", "cp=8,dp_shard=8"])
def test_categories_are_never_negative_and_add_up(plan):
    times = step(plan)
    parts = {f.name: float(np.squeeze(getattr(times, f.name))) for f in fields(times)}
    assert all(seconds >= 0 for seconds in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(float(times.step[0]))


def test_many_plans_at_once_are_each_alone():
    plans = ["dp_shard=64", "tp=8,dp_shard=8", "pp=8,dp_shard=8,zero=1,schedule=interleaved_1f1b,stages_per_rank=2"]
    assert step(*plans).step == pytest.approx([step(plan).step[0] for plan in plans])


@pytest.mark.parametrize(
    ("category", "without", "with_it"),
    [
        ("tensor", "dp_shard=64", "dp_shard=8,tp=8"),
        ("context", "dp_shard=64", "dp_shard=8,cp=8"),
        ("recompute", "dp_shard=64", "dp_shard=64,recompute=full"),
        ("bubble", "dp_shard=64", "dp_shard=8,pp=8,zero=1"),
        ("pipeline", "dp_shard=64", "dp_shard=8,pp=8,zero=1"),
    ],
)
def test_an_axis_costs_in_its_category(category, without, with_it):
    assert getattr(step(without), category) == 0
    assert getattr(step(with_it), category) > 0


def test_experts_that_live_elsewhere_are_waited_for():
    times = step("dp_shard=64", "dp_shard=64,ep=8", preset="mixtral-8x7b")
    assert times.experts[0] == 0
    assert times.experts[1] > 0


def test_the_bubble_of_a_pipeline_is_that_of_its_schedule():
    plans = [
        "pp=8,dp_shard=8,zero=1",
        "pp=8,dp_shard=8,zero=1,schedule=interleaved_1f1b,stages_per_rank=2",
        "pp=8,dp_shard=8,zero=1,schedule=interleaved_zero_bubble,stages_per_rank=2",
    ]
    one, interleaved, zero = step(*plans, system=System(balanced_stages=0)).bubble
    assert zero < interleaved < one


def test_faster_links_and_devices_never_cost_time():
    plan = "tp=4,pp=2,dp_shard=8,cp=1,zero=1,ep=1"
    before = float(step(plan).step[0])
    for field in ("half", "memory_bytes_per_s", "link_bytes_per_s", "nic_bytes_per_s"):
        faster = replace(H100, **{field: 2 * getattr(H100, field)})
        assert float(step(plan, rates=faster).step[0]) < before, field


def test_gradient_sums_hide_under_backward():
    shown = step("dp_replicate=64,zero=0", system=System(overlaps_gradients=0)).gradients
    hidden = step("dp_replicate=64,zero=0").gradients
    assert hidden < shown
