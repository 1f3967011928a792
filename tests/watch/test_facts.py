"""Figures that follow from a run's columns and events."""

from __future__ import annotations

import math

import numpy as np
import pytest

from argosy.watch.facts import RECENT, WARMING_STEPS, RunFacts, median
from argosy.watch.rules.planner import Planner
from watched import STEP_S, STEPS, columns, continued, healthy, small_run, start


def test_the_present_is_the_last_steps_without_the_first_of_the_newest_world():
    facts = healthy(events=[start(step=STEPS - 50, at_s=1_700_000_100.0, plan="other")])
    assert facts.over == (STEPS - 50 + WARMING_STEPS, STEPS - 1) and facts.recent_count == 50 - WARMING_STEPS
    assert healthy().recent_count == RECENT
    assert facts.plan_since == STEPS - 50


def test_the_present_of_a_batch_ramp_is_of_one_batch_and_predictions_are_of_the_largest():
    for end, is_whole in ((STEPS - 10, True), (STEPS + 10, False)):
        facts = healthy(small_run(train={"batch_ramp": [{"until_step": end, "global_batch": 4}]}))
        assert facts.recent_count == (10 if is_whole else RECENT) and facts.has_whole_batch is is_whole
        machine = Planner(facts).machine
        assert machine is not None and bool(machine.factors) is is_whole


def test_first_steps_of_each_world_are_not_warm():
    facts = healthy(events=[start(step=100, at_s=1_700_000_050.0)])
    cold = np.flatnonzero(~facts.warm)
    assert cold.tolist() == [*range(WARMING_STEPS), *range(100, 100 + WARMING_STEPS)]


def test_time_in_which_nobody_ran_it_does_not_count():
    running = healthy()
    paused = continued(running, 10_000.0, 200)
    assert paused.wall_s == pytest.approx(running.wall_s, abs=2)
    assert paused.last_line_s - float(paused.starts[0]["time_s"]) > 10_000
    assert paused.continued_s == float(paused.starts[-1]["time_s"])


def test_shares_are_of_the_step_without_what_comes_beside_it():
    facts = healthy(steps=columns(data=STEP_S, checkpoint=10 * STEP_S))
    assert facts.share("data") == pytest.approx(STEP_S / (2 * STEP_S), rel=0.01)
    assert "checkpoint" not in facts.typical and facts.typical["data"] == pytest.approx(STEP_S, rel=0.05)


def test_what_is_left_is_counted_from_the_run_file_or_the_event_that_tells_the_length():
    assert healthy().steps_left == 1000 - STEPS
    timed = small_run().model_copy(update={"train": small_run().train.model_copy(update={"steps": 0})})
    facts = healthy(timed)
    assert facts.steps_in_all is None and facts.steps_left is None
    told = {"time_s": 1_700_000_001.0, "event": "length", "steps": 450}
    assert RunFacts(facts.now_s, run=timed, steps=facts.steps, events=[told]).steps_left == 450 - STEPS


def test_a_run_that_has_written_nothing_has_no_figures():
    facts = RunFacts(now_s=0.0)
    assert len(facts) == 0 and facts.over == (0, 0) and facts.mean_s("data") == 0.0 and facts.share("data") == 0.0
    assert math.isnan(facts.step_s) and math.isnan(facts.wall_s) and math.isnan(median([math.nan]))
