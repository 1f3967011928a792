"""The fit finds the constants that made the data, and stays near what is assumed where data say nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from argosy.plan.cost.constants import Constants

PLANNER = Path(__file__).parents[2] / "benchmarks/planner"


@pytest.fixture
def fit_constants(monkeypatch):
    monkeypatch.syspath_prepend(PLANNER)
    import constants_fit

    yield constants_fit.fit_constants
    sys.modules.pop("constants_fit", None)


rng = np.random.default_rng(0)
SIZES, MOVED = rng.uniform(1, 100, 200), rng.uniform(1, 100, 200)


def predict(constants: Constants) -> np.ndarray:
    """A step of matmuls and sends, as far as these constants matter."""
    return SIZES / constants.matmul + MOVED / constants.nic + constants.step


GUESS = Constants(matmul=0.9, nic=0.8, step=0.01)
TRUTH = Constants(matmul=0.7, nic=1.1, step=0.01)
FREE = ("matmul", "nic", "link")


def test_the_constants_that_made_the_data_are_found_under_noise_and_outliers(fit_constants):
    measured = predict(TRUTH) * np.exp(0.03 * rng.standard_normal(200))
    measured[::40] *= 4
    found = fit_constants(predict, measured, [("one",)] * 200, start=GUESS, free=FREE, spread=2.0)
    offset = np.exp(-found.offsets["one"])
    assert found.constants.matmul * offset == pytest.approx(0.7, rel=0.04)
    assert found.constants.nic * offset == pytest.approx(1.1, rel=0.06)
    assert found.constants.link == pytest.approx(GUESS.link)


def test_an_offset_of_a_source_does_not_move_the_constants(fit_constants):
    sources = [("a",)] * 100 + [("b",)] * 100
    measured = predict(TRUTH) * np.where(np.arange(200) < 100, 1.1, 1 / 1.1)
    found = fit_constants(predict, measured, sources, start=TRUTH, free=FREE)
    assert found.constants.matmul == pytest.approx(0.7, rel=0.02)
    assert found.offsets["a"] == pytest.approx(np.log(1.1), abs=0.02)
    assert found.offsets["b"] == pytest.approx(-np.log(1.1), abs=0.02)


def test_few_rows_barely_move_what_was_assumed(fit_constants):
    few = slice(0, 1)
    found = fit_constants(
        lambda c: predict(c)[few], predict(TRUTH)[few], [("one",)], start=GUESS, free=FREE, spread=1.1
    )
    assert GUESS.matmul * 0.8 < found.constants.matmul < GUESS.matmul


def test_what_is_not_free_stays(fit_constants):
    found = fit_constants(predict, predict(TRUTH), [("one",)] * 200, start=GUESS, free=("matmul",))
    assert (found.constants.nic, found.constants.step) == (GUESS.nic, GUESS.step)


def test_what_rows_of_a_model_share_is_told_from_what_rows_of_a_source_share(fit_constants):
    shared = [(source, model) for source in "ab" for model in "xy" for _ in range(50)]
    offset = {"a": 0.1, "b": -0.1, "x": 0.1, "y": -0.1}
    measured = predict(TRUTH) * np.exp([sum(offset[key] for key in keys) for keys in shared])
    found = fit_constants(predict, measured, shared, start=TRUTH, free=FREE)
    assert found.offsets == pytest.approx(offset, abs=0.02)
