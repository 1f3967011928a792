"""Scaling laws: the published coefficients give the published optimum; fits find the law that made the data."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from pytest import approx

from argosy.errors import UserError
from argosy.plan.scaling_law import RunResult, ScalingFit, ScalingLaw, fit_scaling_law

PRINTED = ScalingLaw(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
"""Hoffmann et al. 2022, equation 10."""
UNROUNDED = ScalingLaw(E=1.6934, A=406.4, B=410.7, alpha=0.3392, beta=0.2849)
"""The same with the digits of the paper's TeX source (Besiroglu et al. 2024)."""
REPLICATED = ScalingLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
"""Besiroglu et al. 2024, table 1."""
GOPHER_FLOPS = 5.76e23


def results(law: ScalingLaw = PRINTED, scatter: float = 0.003, seed: int = 0) -> list[RunResult]:
    """Runs of five sizes and five lengths, whose losses scatter around the law."""
    random = np.random.default_rng(seed)
    return [
        RunResult(n, d, law.loss(n, d) * np.exp(random.normal(0, scatter)))
        for n in (3e7, 1e8, 3e8, 1e9, 3e9)
        for d in (1e9, 3e9, 1e10, 3e10, 1e11)
    ]


@pytest.fixture(scope="module")
def noisy() -> ScalingFit:
    return fit_scaling_law(results())


def test_the_published_law_gives_gophers_budget_to_40_billion_parameters() -> None:
    best = UNROUNDED.compute_optimal(GOPHER_FLOPS)
    assert best.parameters == approx(40e9, rel=0.02)  # Hoffmann et al. 2022, figure 4 and section 3.3
    assert best.parameters * best.tokens * 6 == approx(GOPHER_FLOPS)


def test_the_printed_coefficients_give_the_optimum_of_the_papers_formula() -> None:
    best = PRINTED.compute_optimal(GOPHER_FLOPS)
    G = (0.34 * 406.4 / (0.28 * 410.7)) ** (1 / 0.62)
    assert best.parameters == approx(G * (GOPHER_FLOPS / 6) ** (0.28 / 0.62))
    assert best.tokens == approx((GOPHER_FLOPS / 6) ** (0.34 / 0.62) / G)
    assert best.loss == PRINTED.loss(best.parameters, best.tokens)


def test_the_replicated_law_gives_about_20_tokens_to_a_parameter() -> None:
    best = REPLICATED.compute_optimal(GOPHER_FLOPS)
    assert best.tokens / best.parameters == approx(20, rel=0.1)


@pytest.mark.parametrize("law", [PRINTED, REPLICATED])
@pytest.mark.parametrize("flops", [1e18, 1e21, 1e25])
def test_no_other_size_for_the_same_compute_has_less_loss(law: ScalingLaw, flops: float) -> None:
    best = law.compute_optimal(flops)
    sizes = best.parameters * np.geomspace(0.1, 10, 201)
    losses = [law.loss(n, flops / 6 / n) for n in sizes]
    assert min(losses) == approx(best.loss) and sizes[np.argmin(losses)] == approx(best.parameters)


@pytest.mark.parametrize("law", [PRINTED, REPLICATED])
def test_data_without_scatter_give_the_law_back(law: ScalingLaw) -> None:
    found = fit_scaling_law(results(law, scatter=0.0), draws=5).law
    assert dataclasses.astuple(found) == approx(dataclasses.astuple(law), rel=1e-3)


def test_the_intervals_of_noisy_data_hold_the_coefficients(noisy: ScalingFit) -> None:
    for name, estimate in noisy.coefficients.items():
        assert estimate.low <= getattr(PRINTED, name) <= estimate.high, name
        assert estimate.low <= estimate.value <= estimate.high
    assert noisy.rms_residual == approx(0.003, rel=0.3)


def test_the_interval_of_a_prediction_holds_the_loss(noisy: ScalingFit) -> None:
    predicted = noisy.predict(7e9, 140e9)
    assert predicted.low < PRINTED.loss(7e9, 140e9) < predicted.high
    assert predicted.high - predicted.low < 0.03 * predicted.value


def test_the_optimum_has_an_interval_too(noisy: ScalingFit) -> None:
    best, true = noisy.compute_optimal(1e21), PRINTED.compute_optimal(1e21)
    assert best["parameters"].low < true.parameters < best["parameters"].high
    assert best["tokens"].low < true.tokens < best["tokens"].high
    assert best["tokens_per_parameter"].value == approx(best["tokens"].value / best["parameters"].value)


def test_an_outlier_moves_little() -> None:
    broken = results()
    broken[7] = dataclasses.replace(broken[7], loss=2 * broken[7].loss)
    assert fit_scaling_law(broken, draws=2).law.loss(7e9, 140e9) == approx(PRINTED.loss(7e9, 140e9), rel=0.01)


def test_the_same_seed_gives_the_same_intervals() -> None:
    few = results()[::2]
    first, again, other = (fit_scaling_law(few, draws=3, seed=seed).coefficients for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    "few",
    [results()[:5], [r for r in results() if r.parameters < 3e8], [r for r in results() if r.tokens < 1e10]],
    ids=["five results", "two sizes", "two lengths"],
)
def test_too_few_results_are_refused(few: list[RunResult]) -> None:
    with pytest.raises(UserError, match="too few for a scaling law"):
        fit_scaling_law(few)


def test_a_law_of_which_one_term_is_nothing_is_infinite_and_no_error() -> None:
    """Draws of the bootstrap may be such laws, where results hardly tell sizes apart."""
    found = ScalingLaw(E=1.0, A=1e-300, B=1e300, alpha=0.01, beta=0.01).compute_optimal(1e13)
    assert found.parameters == 0 and found.tokens == math.inf
