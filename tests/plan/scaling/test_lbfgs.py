"""L-BFGS of many problems at once finds the minimum of each."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_allclose

from argosy.plan.scaling.law import Array, minimize

RANDOM = np.random.default_rng(0)


def test_each_of_many_quadratics_ends_at_its_own_minimum() -> None:
    targets, curvature = RANDOM.normal(size=(20, 4)), np.array([1e-2, 1.0, 1e2, 1e4])

    def quadratic(points: Array) -> tuple[Array, Array]:
        apart = points - targets
        return (curvature * apart**2).sum(1) / 2, curvature * apart

    points, values = minimize(quadratic, np.zeros((20, 4)))
    assert_allclose(points, targets, atol=1e-4)
    assert values.max() < 1e-8


def test_a_curved_valley() -> None:
    def rosenbrock(points: Array) -> tuple[Array, Array]:
        x, y = points.T
        gradient = [-2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)]
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2, np.stack(gradient, 1)

    points, _ = minimize(rosenbrock, RANDOM.uniform(-2, 2, size=(30, 2)))
    assert_allclose(points, 1, atol=1e-4)


def test_a_kink_at_the_minimum_does_not_stop_it_before() -> None:
    def absolute(points: Array) -> tuple[Array, Array]:
        scale = np.array([1.0, 30.0])
        return (scale * np.abs(points - 3)).sum(1), scale * np.sign(points - 3)

    _, values = minimize(absolute, RANDOM.normal(size=(10, 2)))
    assert values.max() < 0.05


def test_a_step_out_of_the_domain_is_taken_back() -> None:
    def logarithm(points: Array) -> tuple[Array, Array]:
        with np.errstate(invalid="ignore"):
            return (points - 2 * np.log(points)).sum(1), 1 - 2 / points

    points, _ = minimize(logarithm, np.array([[1e-3], [50.0]]))
    assert_allclose(points, 2, atol=1e-4)
