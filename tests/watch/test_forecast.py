"""The forecast of a run: its interval narrows with what was seen, and holds what comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from argosy.watch.forecast import forecast
from watched import STEP_S, columns, event, healthy, small_run


def left_s(**facts: object) -> tuple[float, float, float]:
    found = forecast(healthy(**facts))  # type: ignore[arg-type]
    assert found is not None
    return found.left_s.low, found.left_s.mid, found.left_s.high


def test_a_steady_run_takes_for_the_rest_what_its_steps_took():
    low, mid, high = left_s()
    assert low < mid < high and mid == pytest.approx(600 * STEP_S, rel=0.05)


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
