"""How long a run is that was given in minutes."""

from __future__ import annotations

import pytest

from argosy.config.optimizer import ScheduleConfig
from argosy.config.schema import RunConfig
from argosy.config.train import TrainConfig
from argosy.parallel.world import World
from argosy.training.pace import FORWARD, SLACK, Pace

WARMUP = 5
BUDGET_S = 6000.0


def pace(**train: float) -> Pace:
    return Pace(RunConfig(train=TrainConfig(**train), schedule=ScheduleConfig(warmup_steps=WARMUP)))


def test_a_run_given_in_steps_has_nothing_to_decide():
    given = pace(steps=7, minutes=100)
    given.took(1.0)
    assert given.steps == 7
    assert given.steps_if_due(WARMUP) is None


def test_nothing_is_decided_before_the_end_of_warmup():
    undecided = pace(minutes=BUDGET_S / 60)
    for done in range(WARMUP):
        assert undecided.steps_if_due(done) is None
        undecided.took(1.0)
    assert undecided.steps_if_due(WARMUP) is not None


def test_a_decided_length_stays():
    decided = pace(minutes=BUDGET_S / 60)
    decided.took(1.0)
    decided.steps = decided.steps_if_due(WARMUP)
    decided.took(100.0)
    assert decided.steps_if_due(WARMUP + 1) is None


def test_the_length_that_is_decided_is_that_of_the_run_from_then_on():
    deciding = pace(minutes=BUDGET_S / 60)
    deciding.took(1.0)
    assert deciding.decide_length(WARMUP - 1, World()) is None and deciding.steps is None
    assert deciding.decide_length(WARMUP, World()) == deciding.steps > WARMUP
    assert deciding.decide_length(WARMUP + 1, World()) is None


def lengths(world: World) -> int | None:
    """A run whose processes measure different speeds."""
    deciding = pace(minutes=BUDGET_S / 60)
    deciding.took(1.0 + world.rank)
    return deciding.decide_length(WARMUP, world)


def test_all_processes_decide_on_the_length_of_rank_0(workers):
    first, second = workers.run(2, lengths)
    assert first == second == pytest.approx(WARMUP + SLACK * BUDGET_S, abs=5)


def test_the_length_fills_the_budget_at_the_usual_speed_and_one_slow_step_does_not_count():
    filling = pace(minutes=BUDGET_S / 60)
    for seconds in (60.0, 2.0, 2.0, 2.0, 2.0):  # the first step compiles
        filling.took(seconds)
    assert filling.steps_if_due(WARMUP) == pytest.approx(WARMUP + SLACK * BUDGET_S / 2.0, abs=2)


def test_evaluations_are_a_part_of_the_budget():
    run = RunConfig(train=TrainConfig(minutes=100), schedule=ScheduleConfig(warmup_steps=WARMUP))
    read_in_five_steps = 5 * run.train.global_batch * run.data.seq_len
    with_evaluations = Pace(run, held_out_tokens=read_in_five_steps * run.evaluate.every_steps)
    with_evaluations.took(2.0)
    per_step_s = 2.0 * (1 + 5 * FORWARD)
    assert with_evaluations.steps_if_due(WARMUP) == pytest.approx(WARMUP + SLACK * BUDGET_S / per_step_s, abs=2)


def test_a_budget_that_warmup_used_up_leaves_one_step():
    late = pace(minutes=1e-9)
    late.took(1.0)
    assert late.steps_if_due(WARMUP) == WARMUP + 1


def test_steps_that_compile_are_no_sign_of_the_time_left():
    running = pace(steps=100)
    for seconds in (60.0, 2.0, 2.0, 2.0, 30.0):
        running.took(seconds)
    assert running.left_s(40) == pytest.approx(60 * 2.0)


def test_time_left_is_that_of_the_budget_and_then_that_of_the_steps():
    running = pace(minutes=BUDGET_S / 60)
    assert running.left_s(0) == pytest.approx(BUDGET_S, abs=5)
    for seconds in (2.0, 2.0):
        running.took(seconds)
    running.steps = 100
    assert running.left_s(40) == pytest.approx(120.0)


@pytest.mark.parametrize(("compiles", "first_s"), [(True, [90.0, 30.0]), (False, [4.0])])
def test_first_steps_say_nothing_of_the_time_left(compiles, first_s):
    running = Pace(RunConfig(train=TrainConfig(steps=100)), compiles=compiles)
    for seconds in first_s:
        running.took(seconds)
        assert running.left_s(1) is None
    running.took(2.0)
    assert running.left_s(40) == pytest.approx(120.0)
    assert running.left_s(100) == 0.0
