"""Time, money and energy of whole runs: published runs come out, and every figure has its interval."""

from dataclasses import fields

import numpy as np
import pytest

from argosy.plan.cost.economy import (
    CheckpointCost,
    checkpoint_cost,
    goodput,
    power_per_device_w,
    price_per_device_h,
    whole_run,
)
from argosy.plan.cost.estimate import Estimate
from argosy.plan.hardware.clusters import Cluster

LLAMA = Cluster.parse("h100-16384")


def test_llama_3_405b_took_the_device_hours_that_meta_published():
    """Dubey et al. 2024: 3.8e25 FLOPs at 400 TFLOP/s a GPU (41 % MFU); the model card: 30.84 million GPU-hours."""
    tokens, batch = 15.6e12, 16e6
    step_s = 3.8e25 / tokens * batch / (16_384 * 400e12)
    failures = goodput(LLAMA, checkpoint_cost(LLAMA, 405.85e9 * 14), step_s=step_s)
    run = whole_run(LLAMA, Estimate.within(step_s, 1.1), failures, tokens=tokens, tokens_per_step=batch)
    assert run.device_hours.mid / 30.84e6 == pytest.approx(1, abs=0.1)
    assert run.device_hours.low < 30.84e6 < run.device_hours.high
    assert run.tokens_per_day.mid * run.time_s.mid / 86_400 == pytest.approx(tokens, rel=1e-6)


def test_deepseek_v3_cost_what_its_report_says():
    """DeepSeek-AI 2024, table 1: 3.7 days for 1e12 tokens on 2048 H800; 2.664 million hours at 2 USD for 14.8e12."""
    cluster, batch = Cluster.parse("2048xh800"), 15_360 * 4096
    step_s = 180_000 * 3600 / 2048 / 1e12 * batch
    never = goodput(cluster, CheckpointCost(0.0, 0.0), restart_s=Estimate.exactly(0.0), step_s=1.0)
    run = whole_run(cluster, Estimate.exactly(step_s), never, tokens=14.8e12, tokens_per_step=batch)
    assert run.device_hours.mid == pytest.approx(2.664e6, rel=1e-3)
    assert run.money.mid == pytest.approx(5.328e6, rel=1e-3)


def test_energy_is_that_of_nodes_and_building():
    cluster = Cluster.parse("8xh100").model_copy(update={"pue": 1.25, "grid_kg_per_kwh": 0.1})
    power = power_per_device_w(cluster)
    assert power.mid == pytest.approx(10_200 / 8 * 0.76 * 1.25)  # DGX H100: 10.2 kW nameplate
    run = whole_run(cluster, Estimate.exactly(3600.0), failures(cluster), tokens=10, tokens_per_step=1)
    assert run.energy_kwh.mid == pytest.approx(power.mid / 1000 * run.device_hours.mid)
    assert run.co2_kg.mid == pytest.approx(0.1 * run.energy_kwh.mid)


def failures(cluster):
    return goodput(cluster, CheckpointCost(1.0, 10.0))


def test_the_catalogue_s_range_is_the_interval_and_a_price_of_one_s_own_is_exact():
    cluster = Cluster.parse("8xh100")
    assert price_per_device_h(cluster) == Estimate(1.99, 2.95, 5.00)
    assert price_per_device_h(cluster.model_copy(update={"price_per_device_h": 2.5})) == Estimate.exactly(2.5)
    mixed = price_per_device_h(Cluster.parse("8xh100+24xa100"))
    assert mixed.mid == pytest.approx((2.95 + 3 * 1.55) / 4)


@pytest.mark.parametrize(("device", "unknown"), [("tpu-v5p", {"energy_kwh", "co2_kg"}), ("mi250x", {"money"})])
def test_what_nobody_published_is_not_made_up(device, unknown):
    cluster = Cluster.parse(f"8x{device}")
    run = whole_run(cluster, Estimate.exactly(1.0), failures(cluster), tokens=10, tokens_per_step=1)
    assert {field.name for field in fields(run) if getattr(run, field.name) is None} == unknown


def test_steps_are_whole_and_spares_are_paid_for():
    cluster = Cluster.parse("16xh100")
    run = whole_run(cluster, Estimate.exactly(2.0), failures(cluster), tokens=21, tokens_per_step=10)
    held = whole_run(cluster, Estimate.exactly(2.0), failures(cluster), tokens=21, tokens_per_step=10, spares=8)
    assert run.steps == 3
    assert (held.money.mid, held.energy_kwh.mid) == pytest.approx((1.5 * run.money.mid, run.energy_kwh.mid))


def test_every_figure_has_an_interval_that_widens_with_the_step_s():
    cluster = Cluster.parse("1024xh100")
    sure, unsure = (
        whole_run(cluster, Estimate.within(2.0, factor), failures(cluster), tokens=1e12, tokens_per_step=4e6)
        for factor in (1.0, 1.2)
    )
    for name in ("time_s", "device_hours", "money", "energy_kwh", "co2_kg", "tokens_per_day"):
        narrow, wide = getattr(sure, name), getattr(unsure, name)
        assert wide.low < narrow.low < narrow.mid == wide.mid < narrow.high < wide.high, name


def test_a_hundred_thousand_plans_rank_as_they_do_one_by_one():
    cluster = Cluster.parse("1024xh100")
    step_s = np.random.default_rng(0).uniform(1, 10, 100_000)
    many = whole_run(
        cluster,
        Estimate.within(step_s, 1.1),
        goodput(cluster, checkpoint_cost(cluster, np.full(100_000, 1e12)), step_s=step_s),
        tokens=1e12,
        tokens_per_step=4e6,
    )
    for i in (0, 77_777):
        one = goodput(cluster, checkpoint_cost(cluster, 1e12), step_s=step_s[i])
        run = whole_run(cluster, Estimate.within(step_s[i], 1.1), one, tokens=1e12, tokens_per_step=4e6)
        assert many.money.mid[i] == pytest.approx(run.money.mid)
        assert many.time_s.high[i] == pytest.approx(run.time_s.high)
    assert np.argmin(many.money.mid) == np.argmin(step_s)
