"""The planner in one call."""

from __future__ import annotations

import pytest

from argosy.config.load import load
from argosy.errors import UserError
from argosy.plan.plan import Plan
from argosy.plan.report.request import best_plans


def test_a_model_and_a_run_are_planned_for():
    report = best_plans("llama3-8b", "8xh100", seq_len=4096, top=2, fix="tp=2")
    assert (report.seq_len, len(report.choices)) == (4096, 2)
    assert Plan.parse(report.choices[0].plan).tp == 2
    assert best_plans(load("demo"), "2xcpu").devices == 2


def test_a_model_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="llama3-8b"):
        best_plans("llama3-8", "8xh100")
