from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.order import CIRCLE, STEP, Mixture, floor_sum

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 60), st.integers(1, 50), st.integers(-200, 200), st.integers(-200, 200))
def test_floor_sum_is_the_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(WEIGHTS, st.integers(0, CIRCLE - 1), st.integers(0, 2000))
def test_counts_in_closed_form_are_counted_one_by_one(weights: list[float], shift: int, n: int) -> None:
    mixture = Mixture(weights, shift)
    assert mixture.counts(n) == np.bincount(mixture.sources(0, n), minlength=len(weights)).tolist()


@given(WEIGHTS, st.integers(0, CIRCLE - 1), st.integers(0, 2**70))
def test_counts_agree_far_into_the_run(weights: list[float], shift: int, start: int) -> None:
    mixture = Mixture(weights, shift)
    drawn = np.bincount(mixture.sources(start, start + 50), minlength=len(weights))
    before, after = mixture.counts(start), mixture.counts(start + 50)
    assert [b - a for a, b in zip(before, after, strict=True)] == drawn.tolist()


@given(WEIGHTS, st.integers(0, CIRCLE - 1), st.integers(2, 10**12))
def test_proportions_are_within_log_n(weights: list[float], shift: int, n: int) -> None:
    total = sum(weights)
    for weight, count in zip(weights, Mixture(weights, shift).counts(n), strict=True):
        assert abs(count - n * weight / total) <= 3 + 2 * math.log(n)


def test_proportions_are_exact_over_the_whole_circle() -> None:
    assert Mixture([1, 1, 2], 12345).counts(CIRCLE) == [CIRCLE // 4, CIRCLE // 4, CIRCLE // 2]


def test_source_of_weight_zero_is_never_drawn() -> None:
    assert set(Mixture([0, 1, 0, 1, 0], CIRCLE - 1).sources(0, 1000).tolist()) == {1, 3}


def test_the_step_spreads_evenly_at_every_scale() -> None:
    """The claim about STEP in its docstring: continued fraction with partial quotients of at most 5."""
    quotients, a, m = [], STEP, CIRCLE
    while a:
        quotients.append(m // a)
        a, m = m % a, a
    assert STEP % 2 == 1 and max(quotients) <= 5
