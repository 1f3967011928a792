"""Intervals go through formulas as the distributions that they stand for would."""

import numpy as np
import pytest

from argosy.plan.cost.estimate import Estimate, propagate

Z90 = 1.6448536  # standard deviations to either side that hold 90 % of a normal distribution


def quantiles(samples):
    return [float(q) for q in np.quantile(samples, [0.05, 0.5, 0.95])]


def ends(estimate):
    return [estimate.low, estimate.mid, estimate.high]


def test_what_is_certain_stays_certain():
    assert propagate(lambda x, y: x / y, Estimate.exactly(6.0), Estimate.exactly(2.0)) == Estimate.exactly(3.0)


@pytest.mark.parametrize("function", [lambda x, y: x * y, lambda x, y: x / y, lambda x, y: x * y**2], ids="*/2")
def test_products_and_quotients_are_those_of_log_normal_samples(function):
    draws = np.random.default_rng(0).normal(size=(2, 400_000)) / Z90
    x, y = 5 * 2 ** draws[0], 3 * 1.3 ** draws[1]
    found = propagate(function, Estimate.within(5.0, 2.0), Estimate.within(3.0, 1.3))
    assert ends(found) == pytest.approx(quantiles(function(x, y)), rel=0.01)


def test_a_decreasing_function_swaps_the_ends():
    assert ends(propagate(lambda x: 1 / x, Estimate(1.0, 2.0, 8.0))) == pytest.approx([1 / 8, 1 / 2, 1.0])


def test_arrays_give_what_their_elements_give():
    x, y = Estimate(np.array([1.0, 2.0]), np.array([2.0, 3.0]), np.array([4.0, 3.5])), Estimate(1.0, 1.5, 3.0)
    both = propagate(lambda a, b: a * b, x, y)
    for i in range(2):
        one = propagate(lambda a, b: a * b, Estimate(x.low[i], x.mid[i], x.high[i]), y)
        assert [end[i] for end in ends(both)] == pytest.approx(ends(one))


def test_nothing_times_anything_is_nothing():
    assert propagate(lambda x: 0.0 * x, Estimate(1.0, 2.0, 3.0)) == Estimate.exactly(0.0)


def test_nine_of_ten_log_normal_figures_are_in_the_interval():
    estimate = Estimate.log_normal(10.0, 0.2)
    drawn = 10 * np.exp(0.2 * np.random.default_rng(0).standard_normal(100_000))
    assert np.mean((drawn > estimate.low) & (drawn < estimate.high)) == pytest.approx(0.9, abs=0.005)
    assert np.sqrt(estimate.low * estimate.high) == pytest.approx(10)
