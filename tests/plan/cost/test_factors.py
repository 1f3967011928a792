"""Calibration factors: each multiplies its own categories, and says how sure a prediction is."""

from __future__ import annotations

from dataclasses import fields

import pytest

from argosy.plan.cost.breakdown import OF_MEMORY, OF_TIME, RUN_STD, spread
from argosy.plan.cost.memory_model import Footprint
from argosy.plan.cost.step_time import StepTime
from argosy.plan.hardware.clusters import Factor

TIME = StepTime(**{f.name: 1.0 for f in fields(StepTime)})
MEMORY = Footprint(**{f.name: 1.0 for f in fields(Footprint)})
STATE = {"weights", "gradients", "optimizer"}


def test_every_category_has_one_factor_but_the_state_which_is_exact():
    of_time = [name for names in OF_TIME.values() for name in names]
    assert sorted(of_time) == sorted(f.name for f in fields(StepTime))
    assert set(OF_MEMORY["memory"]) == {f.name for f in fields(Footprint)} - STATE


def test_a_factor_multiplies_its_own_categories():
    slower = TIME.calibrated({"network": Factor(value=3.0, std=0.1), "memory": Factor(value=9.0, std=0.1)})
    assert {name for name, value in vars(slower).items() if value == 3.0} == set(OF_TIME["network"])
    assert slower.total == TIME.total + 2 * len(OF_TIME["network"])
    larger = MEMORY.calibrated({"optimizer": Factor(value=3.0, std=0.1), "memory": Factor(value=9.0, std=0.1)})
    assert {name for name, value in vars(larger).items() if value == 9.0} == set(OF_MEMORY["memory"])
    assert larger.optimizer == 1.0


def test_without_factors_a_prediction_errs_as_on_any_cluster():
    assert spread({"ideal": 3.0, "tensor": 1.0}, OF_TIME, {}, 0.2) == pytest.approx(0.2)


def test_what_was_learnt_makes_predictions_surer_by_its_share():
    known = {"compute": Factor(value=2.0, std=0.02)}
    assert spread({"ideal": 1.0}, OF_TIME, known, 0.2) == pytest.approx((RUN_STD**2 + 0.01**2) ** 0.5)
    shares = [spread({"ideal": 1 - share, "tensor": share}, OF_TIME, known, 0.2) for share in (0.0, 0.5, 1.0)]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(0.2)


def test_where_memory_was_learnt_the_state_is_exact():
    known = {"memory": Factor(value=1.0, std=0.1)}
    assert spread({"weights": 3.0, "activations": 1.0}, OF_MEMORY, known, 0.2) == pytest.approx(
        (RUN_STD**2 + 0.025**2) ** 0.5
    )
