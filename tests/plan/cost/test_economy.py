"""Failures cost what the formulas of the literature say, and a whole run its time, money and energy."""

from dataclasses import fields

import numpy as np
import pytest

from argosy.plan.cost.economy import (
    CheckpointCost,
    best_interval_s,
    checkpoint_cost,
    effective_share,
    goodput,
    memory_checkpoint_interval_s,
    mtbf_s,
    power_per_device_w,
    price_per_device_h,
    whole_run,
)
from argosy.plan.cost.estimate import Estimate
from argosy.plan.hardware.clusters import Cluster

HOUR = 3600.0
LLAMA_CLUSTER = Cluster.parse("h100-16384")
LLAMA_STATE = 405.85e9 * 14  # bf16 weights, fp32 master weights and two moments


def test_llama_3_stopped_about_every_three_hours():
    mtbf = mtbf_s(LLAMA_CLUSTER)
    assert mtbf.mid / HOUR == pytest.approx(54 * 24 / 419, rel=0.15)  # 3.1 h
    assert mtbf.low < mtbf.mid < mtbf.high


def test_llama_3_trained_for_over_90_percent_of_the_time():
    found = goodput(LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE))
    assert 0.90 < found.effective.mid < 0.97
    assert 0.6 < found.effective.low < found.effective.mid < found.effective.high < 1
    assert found.stops_per_day.mid == pytest.approx(419 / 54, rel=0.15)
    assert found.interval_s.low < found.interval_s.mid < found.interval_s.high


@pytest.mark.filterwarnings("error")
def test_a_run_that_fails_before_each_save_is_done_has_figures_all_the_same():
    found = goodput(LLAMA_CLUSTER, CheckpointCost(10.0, 60 * 24 * HOUR), mtbf=Estimate(60.0, HOUR, 24 * HOUR))
    assert found.effective.mid == pytest.approx(1e-9) and found.overhead.mid == pytest.approx(1e9)
    assert all(np.isfinite(getattr(found.overhead, f.name)) for f in fields(Estimate))


@pytest.mark.parametrize(("devices", "published_h"), [(16_384, 1.8), (131_072, 0.23)])
def test_meta_s_projection_for_a100_is_within_the_interval(devices, published_h):
    """Kokolis et al. 2024: 1.8 h at 16,384 GPUs and 14 min at 131,072."""
    mtbf = mtbf_s(Cluster.parse(f"{devices}xa100"))
    assert mtbf.low < published_h * HOUR < mtbf.high


def test_rates_of_unlike_devices_add_up():
    own = Cluster.parse("64xh100+32xa100")
    groups = [
        g.model_copy(update={"device": g.device.model_copy(update={"mtbf_h": h})})
        for g, h in zip(own.groups, (3e4, 6e4), strict=True)
    ]
    mixed = mtbf_s(own.model_copy(update={"groups": tuple(groups)})).mid / HOUR
    assert 1 / mixed == pytest.approx(64 / 3e4 + 32 / 6e4)
    assert mtbf_s(Cluster.parse("64xh100"), 16).mid == pytest.approx(4 * mtbf_s(Cluster.parse("64xh100")).mid)


@pytest.mark.parametrize(
    ("stall_s", "write_s", "restart_s", "interval_s", "mtbf"),
    [
        (10, 10, 300, 500, 3 * HOUR),
        (5, 200, 300, 400, HOUR),  # written in the background; the state is old when it is safe
        (60, 60, 900, 1200, HOUR),  # far from first order
        (0.1, 90, 0, 100, 0.25 * HOUR),
    ],
)
def test_the_closed_form_agrees_with_drawn_failures(stall_s, write_s, restart_s, interval_s, mtbf):
    share = effective_share(interval_s, CheckpointCost(stall_s, write_s), restart_s, mtbf)
    drawn, error = simulated(stall_s, write_s, restart_s, interval_s, mtbf)
    assert error < 0.0005
    assert share == pytest.approx(drawn, abs=4 * error)


def simulated(stall_s, write_s, restart_s, interval_s, mtbf, runs=100, failures=10_000):
    """Progress over time of runs that live through many failures: mean and standard error over runs."""
    up_s = np.random.default_rng(0).exponential(mtbf, (runs, failures))
    # After a restart, if it comes to an end, the process works for interval_s, then begins a save and stands still for
    # stall_s, and so on; of these saves, those that began write_s ago or more are safe when the next failure strikes.
    in_service_s = up_s - restart_s
    saves = np.maximum(0, np.floor((in_service_s - interval_s - write_s) / (interval_s + stall_s)) + 1)
    shares = (saves * interval_s).sum(axis=1) / up_s.sum(axis=1)
    return shares.mean(), shares.std(ddof=1) / np.sqrt(runs)


def test_it_is_to_first_order_the_published_approximation():
    """Kokolis et al. 2024, and 1 / (1 + delta/tau) (1 - (tau/2 + R)/M)."""
    delta, restart, mtbf = 1.0, 20.0, 1e5
    tau = best_interval_s(delta, mtbf)
    published = 1 / (1 + delta / tau) * (1 - (tau / 2 + restart) / mtbf)
    waste = 1 - effective_share(tau, CheckpointCost(delta, delta), restart, mtbf)
    assert waste == pytest.approx(1 - published, rel=0.01)


def test_without_failures_only_the_stalls_are_lost():
    assert effective_share(100.0, CheckpointCost(0.0, 0.0), 600.0, np.inf) == 1
    assert effective_share(100.0, CheckpointCost(25.0, 50.0), 600.0, np.inf) == 0.8
    assert effective_share(100.0, CheckpointCost(25.0, 50.0), 600.0, 1e15) == pytest.approx(0.8)


@pytest.mark.parametrize("stall_s", [0.1, 5.0, 60.0, 600.0])
@pytest.mark.parametrize("mtbf", [0.5 * HOUR, 3 * HOUR, 100 * HOUR])
def test_no_interval_does_noticeably_better_than_the_best(stall_s, mtbf):
    saving = CheckpointCost(stall_s, stall_s)
    best = effective_share(best_interval_s(stall_s, mtbf), saving, 300.0, mtbf)
    others = effective_share(np.geomspace(1, 10 * mtbf, 2000), saving, 300.0, mtbf)
    assert best >= 0.999 * others.max()


def test_for_rare_failures_the_best_interval_is_young_s():
    assert best_interval_s(10.0, 1e9) == pytest.approx(np.sqrt(2 * 10 * 1e9), rel=1e-3)


def test_copies_in_memory_are_as_often_as_young_has_it_or_cost_a_thousandth():
    assert memory_checkpoint_interval_s(0.5, 3 * HOUR) == pytest.approx(best_interval_s(0.5, 3 * HOUR))
    assert memory_checkpoint_interval_s(0.001, 1e6 * HOUR) == pytest.approx(1.0)
    of_run = goodput(LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE))
    assert of_run.copy_interval_s <= of_run.interval_s.mid
    waiting = goodput(LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE, background=False))
    assert waiting.copy_interval_s == of_run.copy_interval_s, "how checkpoints are written has no part in it"
    assert goodput(LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE), step_s=1e4).copy_interval_s == 1e4


def test_more_of_what_costs_time_costs_time():
    def share(interval_s=400.0, stall_s=5.0, write_s=30.0, restart_s=300.0, mtbf=2 * HOUR):
        return effective_share(interval_s, CheckpointCost(stall_s, write_s), restart_s, mtbf)

    base = share()
    assert share(stall_s=10.0) < base
    assert share(write_s=60.0) < base
    assert share(restart_s=600.0) < base
    assert share(mtbf=HOUR) < base
    sizes = [
        goodput(LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE), n).effective.mid
        for n in (1024, 4096, 16_384)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_checkpoints_are_as_far_apart_as_storage_and_steps_allow():
    slow = CheckpointCost(stall_s=1.0, write_s=5000.0)
    assert goodput(LLAMA_CLUSTER, slow).interval_s.mid == 5000
    assert goodput(LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE), step_s=1e4).interval_s.mid == 1e4


def test_saving_in_the_background_stalls_less_and_is_safe_later():
    waiting, background = (
        checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE, background=False),
        checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE),
    )
    assert background.stall_s < waiting.stall_s == waiting.write_s < background.write_s
    assert waiting.write_s == pytest.approx(LLAMA_STATE / 2e12)


def test_arrays_give_what_their_elements_give():
    devices = np.array([1024.0, 16_384.0])
    both = goodput(
        LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE, devices), devices, step_s=np.array([1.0, 10.0])
    )
    for i, step_s in enumerate((1.0, 10.0)):
        one = goodput(LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE, devices[i]), devices[i], step_s=step_s)
        for name in ("interval_s", "mtbf_s", "stops_per_day", "overhead", "effective"):
            assert getattr(both, name).low[i] == pytest.approx(getattr(one, name).low)
            assert getattr(both, name).high[i] == pytest.approx(getattr(one, name).high)


def test_the_interval_widens_with_what_is_uncertain():
    narrow = goodput(
        LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE), restart_s=Estimate.exactly(600.0)
    ).effective
    wide = goodput(
        LLAMA_CLUSTER, checkpoint_cost(LLAMA_CLUSTER, LLAMA_STATE), restart_s=Estimate(60.0, 600.0, 6000.0)
    ).effective
    assert wide.low < narrow.low < narrow.mid == wide.mid < narrow.high < wide.high


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


def test_steps_are_whole():
    cluster = Cluster.parse("16xh100")
    run = whole_run(cluster, Estimate.exactly(2.0), failures(cluster), tokens=21, tokens_per_step=10)
    assert run.steps == 3


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
