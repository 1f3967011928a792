"""The forecast of a run: its interval narrows with what was seen, and holds what comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from argosy.observe.energy import watts_per_device
from argosy.plan.cost.economy import price_per_device_h
from argosy.watch.facts import RunFacts
from argosy.watch.forecast import forecast
from argosy.watch.rules.planner import Planner
from watched import BEGAN_S, H100, STEP_S, big_run, columns, event, healthy, small_run, start


def left_s(**facts: object) -> tuple[float, float, float]:
    found = forecast(healthy(**facts))  # type: ignore[arg-type]
    assert found is not None
    return found.left_s.low, found.left_s.mid, found.left_s.high


def test_a_steady_run_takes_for_the_rest_what_its_steps_took():
    low, mid, high = left_s(run=small_run(evaluate={"tokens": 1}))
    assert low < mid < high and mid == pytest.approx(600 * STEP_S, rel=0.05)


def test_a_worker_of_parameter_servers_makes_a_part_of_the_steps_that_are_left():
    steps = columns(400) | {"step": 2.0 * np.arange(400)}
    _, mid, _ = left_s(plan="sync=async,compile=false", steps=steps)
    assert mid == pytest.approx((1000 - 799) / 2 * STEP_S, rel=0.05)


def test_the_same_folder_gives_the_same_forecast():
    assert left_s() == left_s()


def test_more_steps_of_the_same_pace_narrow_it_and_a_changing_pace_widens_it():
    def width(steps: dict[str, np.ndarray]) -> float:
        low, mid, high = left_s(run=small_run(train={"steps": 10_000}), steps=steps)
        return (high - low) / mid

    swinging = columns(2000, forward=0.1275 * (1 + 0.5 * np.sin(np.arange(2000) / 300)))
    assert width(columns(2000)) < width(columns(100))
    assert width(columns(2000)) < width(swinging)


def test_evaluations_that_are_to_come_take_the_time_that_they_took():
    run = small_run(evaluate={"every_steps": 100})
    took = np.where(np.arange(400) % 100 == 99, 5.0, 0.0)
    without, with_them = left_s(run=run)[1], left_s(run=run, steps=columns(evaluate=took))[1]
    assert with_them - without == pytest.approx(6 * 5.0, rel=0.2)


def test_before_the_first_evaluation_one_takes_as_long_as_forward_for_as_many_tokens():
    run = small_run(evaluate={"every_steps": 500, "tokens": 100_000})
    forward_s = float(columns(400)["seconds.forward"].mean())
    without = left_s(run=small_run(evaluate={"every_steps": 500, "tokens": 1}))[1]
    assert left_s(run=run)[1] - without == pytest.approx(2 * forward_s * 100_000 / run.tokens_per_step, rel=0.2)


def test_a_run_that_ended_or_has_hardly_begun_has_none():
    facts = healthy()
    assert forecast(replace(facts, state="finished")) is None
    assert forecast(healthy(steps=columns(5))) is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_times_that_no_clock_gives_have_none():
    assert forecast(healthy(steps={**columns(400), "seconds.step": np.full(400, 1e308)})) is None


def test_failures_are_expected_at_the_runs_own_rate_if_that_is_a_surprise():
    stops = [
        each
        for at in (20.0, 50.0, 80.0, 110.0)
        for each in (
            event("worker_died", at, "launcher-a", rank=1, exit_code=-9),
            event("recovered", at + 4, step=1, steps_lost=3, source="memory"),
            event("start", at + 5, step=int(at / STEP_S), plan="dp_replicate=2", world_size=2),
        )
    ]
    calm, often = forecast(healthy()), forecast(healthy(events=stops))
    assert calm is not None and often is not None
    assert calm.failures < 0.1 and often.failures == pytest.approx(4 * 600 / 400, rel=0.3)
    assert often.left_s.high > calm.left_s.high


def resized(power_w: float | None = None) -> RunFacts:
    """A run that made 400 of 500 steps in 3200 s, the first half of that time on 64 devices, since then on 8."""
    plan, few = "dp_shard=8,zero=1,recompute=selective,microbatch=1,precision=bf16", replace(H100, processes=8)
    late = [event("break", 1600.0, "coordinator", why="nodes left"), start(200, BEGAN_S + 1600, few, plan)]
    facts = healthy(big_run(train={"steps": 500}), plan, hardware=few, steps=columns(step_s=8.0), events=late)
    events = [{**facts.events[0], "world_size": 64}, *facts.events[1:]]
    return replace(facts, events=events, power_w=power_w, power_source="nvml" if power_w else "")


@pytest.mark.parametrize("power_w", [None, 8 * 700.0])
def test_past_time_counts_for_as_many_devices_as_the_run_had(power_w: float | None):
    facts = resized(power_w)
    found = forecast(facts)
    assert found is not None and found.cost is not None and found.cost_so_far is not None and found.energy_kwh
    so_far_h, left_h = (64 + 8) * 1600 / 3600, 8 * found.left_s.mid / 3600
    assert facts.device_hours == pytest.approx(so_far_h, rel=0.01)
    machine = Planner(facts).machine
    price = machine and price_per_device_h(machine)
    assert price is not None
    assert found.cost_so_far == pytest.approx(so_far_h * float(price.mid), rel=0.01)
    assert found.cost.mid == pytest.approx((so_far_h + left_h) * float(price.mid), rel=0.05)
    watts = 700.0 if power_w else machine and watts_per_device(machine)
    assert watts and found.energy_kwh.mid == pytest.approx((so_far_h + left_h) * watts / 1000, rel=0.05)
