"""Learning rates, and the length of a run that was given in minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.optimizer import ScheduleConfig
from argosy.config.schema import RunConfig
from argosy.config.train import TrainConfig
from argosy.parallel.world import World
from argosy.training.schedule import FORWARD, SLACK, Pace, learning_rate_factor

KINDS = st.sampled_from(["constant", "cosine", "wsd"])
WARMUP = 10
STEPS = 110


def factors(kind: str, **keys: float) -> list[float]:
    config = ScheduleConfig(kind=kind, warmup_steps=WARMUP, **keys)
    return [learning_rate_factor(step, STEPS, config) for step in range(STEPS)]


@given(kind=KINDS, warmup=st.integers(1, 50), steps=st.none() | st.integers(1, 500))
def test_warmup_is_a_straight_line_whatever_the_length_of_the_run(kind, warmup, steps):
    config = ScheduleConfig(kind=kind, warmup_steps=warmup)
    rates = [learning_rate_factor(step, steps, config) for step in range(warmup)]
    assert rates == pytest.approx([(step + 1) / warmup for step in range(warmup)])


@given(kind=KINDS, step=st.integers(WARMUP, 10**6))
def test_until_the_length_is_known_the_rate_stays_at_its_peak(kind, step):
    assert learning_rate_factor(step, None, ScheduleConfig(kind=kind, warmup_steps=WARMUP)) == 1.0


@given(
    kind=KINDS,
    warmup=st.integers(0, 60),
    steps=st.integers(1, 60),
    decay_fraction=st.floats(0, 1),
    final_ratio=st.floats(0, 1),
)
def test_after_warmup_the_rate_never_rises_and_never_leaves_its_bounds(kind, warmup, steps, **keys):
    config = ScheduleConfig(kind=kind, warmup_steps=warmup, **keys)
    rates = [learning_rate_factor(step, steps, config) for step in range(warmup, steps)]
    assert rates == sorted(rates, reverse=True)
    assert all(config.final_ratio - 1e-12 <= rate <= 1 for rate in rates)


def test_constant_stays_at_the_peak():
    assert set(factors("constant")[WARMUP:]) == {1.0}


def test_wsd_is_flat_and_then_falls_in_a_straight_line_to_its_end():
    rates = factors("wsd", decay_fraction=0.2, final_ratio=0.1)
    decay = round(0.2 * STEPS)
    assert set(rates[WARMUP : STEPS - decay + 1]) == {1.0}
    falls = [before - after for before, after in zip(rates[-decay:], [*rates[1 - decay :], 0.1], strict=True)]
    assert falls == pytest.approx([0.9 / decay] * decay)


def test_cosine_falls_in_half_a_wave_from_the_peak_to_its_end():
    rates = factors("cosine", final_ratio=0.2)
    assert rates[WARMUP] == 1.0
    assert rates[WARMUP + (STEPS - WARMUP) // 2] == pytest.approx(0.6)
    assert rates[-1] == pytest.approx(0.2, abs=1e-3)
    mirrored = [1.2 - rate for rate in reversed(rates[WARMUP + 1 :])]
    assert rates[WARMUP + 1 :] == pytest.approx(mirrored)


FIVE_STEPS = 5
BUDGET_S = 6000.0


def pace(**train: float) -> Pace:
    return Pace(RunConfig(train=TrainConfig(**train), schedule=ScheduleConfig(warmup_steps=FIVE_STEPS)))


def test_a_run_given_in_steps_has_nothing_to_decide():
    given = pace(steps=7, minutes=100)
    given.took(1.0)
    assert given.steps == 7
    assert given.steps_if_due(FIVE_STEPS) is None


def test_nothing_is_decided_before_the_end_of_warmup():
    undecided = pace(minutes=BUDGET_S / 60)
    for done in range(FIVE_STEPS):
        assert undecided.steps_if_due(done) is None
        undecided.took(1.0)
    assert undecided.steps_if_due(FIVE_STEPS) is not None


def test_nothing_is_decided_before_a_step_has_counted():
    """The first step may have to be done again: after a restart, or without warmup."""
    undecided = pace(minutes=BUDGET_S / 60)
    assert undecided.decide_length(FIVE_STEPS, World()) is None
    undecided.took(1.0)
    assert undecided.decide_length(FIVE_STEPS, World()) is not None


def test_a_decided_length_stays():
    decided = pace(minutes=BUDGET_S / 60)
    decided.took(1.0)
    decided.steps = decided.steps_if_due(FIVE_STEPS)
    decided.took(100.0)
    assert decided.steps_if_due(FIVE_STEPS + 1) is None


def test_the_length_that_is_decided_is_that_of_the_run_from_then_on():
    deciding = pace(minutes=BUDGET_S / 60)
    deciding.took(1.0)
    assert deciding.decide_length(FIVE_STEPS - 1, World()) is None and deciding.steps is None
    assert deciding.decide_length(FIVE_STEPS, World()) == deciding.steps > FIVE_STEPS
    assert deciding.decide_length(FIVE_STEPS + 1, World()) is None


def lengths(world: World) -> int | None:
    """A run whose processes measure different speeds."""
    deciding = pace(minutes=BUDGET_S / 60)
    deciding.took(1.0 + world.rank)
    return deciding.decide_length(FIVE_STEPS, world)


def test_all_processes_decide_on_the_length_of_rank_0(workers):
    first, second = workers.run(2, lengths)
    assert first == second == pytest.approx(FIVE_STEPS + SLACK * BUDGET_S, abs=5)


def test_the_length_fills_the_budget_at_the_usual_speed_and_one_slow_step_does_not_count():
    filling = pace(minutes=BUDGET_S / 60)
    for seconds in (60.0, 2.0, 2.0, 2.0, 2.0):  # the first step compiles
        filling.took(seconds)
    assert filling.steps_if_due(FIVE_STEPS) == pytest.approx(FIVE_STEPS + SLACK * BUDGET_S / 2.0, abs=2)


def test_evaluations_are_a_part_of_the_budget():
    run = RunConfig(train=TrainConfig(minutes=100), schedule=ScheduleConfig(warmup_steps=FIVE_STEPS))
    read_in_five_steps = 5 * run.train.global_batch * run.data.seq_len
    with_evaluations = Pace(run, held_out_tokens=read_in_five_steps * run.evaluate.every_steps)
    with_evaluations.took(2.0)
    per_step_s = 2.0 * (1 + 5 * FORWARD)
    assert with_evaluations.steps_if_due(FIVE_STEPS) == pytest.approx(FIVE_STEPS + SLACK * BUDGET_S / per_step_s, abs=2)


def test_a_budget_that_warmup_used_up_leaves_one_step():
    late = pace(minutes=1e-9)
    late.took(1.0)
    assert late.steps_if_due(FIVE_STEPS) == FIVE_STEPS + 1


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
