"""The learning rate: a warmup that depends on nothing else, and the shapes after it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.optimizer import ScheduleConfig
from argosy.training.schedule import learning_rate_factor

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
