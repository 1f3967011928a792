"""A trained model can be used under plans that its training did not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.inference.plans import plan_of_rows, plan_to_score, run_of_rows, run_to_score
from argosy.plan.plan import Plan
from tiny import run_config


@pytest.mark.parametrize("checks", [{"replay_check_every_steps": 5}, {"check_collectives": True}], ids=str)
@pytest.mark.parametrize("text", ["", "dp_shard=2,zero=3", "tp=2"], ids=str)
def test_a_model_whose_training_was_checked_is_used_under_any_plan(checks, text):
    trained, plan = run_config(Path("/corpus"), resilience=checks), Plan.parse(text)
    assert run_of_rows(trained, plan).train.global_batch == plan_of_rows(plan).dp
    assert run_to_score(trained, plan, 16).train.global_batch == plan_to_score(plan, 16).microbatch * plan.dp
