"""What a run says when it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.plan.plan import Plan
from argosy.training.summary import headline
from tiny import run_config

LONG = (
    "dp_replicate=2,dp_shard=16,tp=8,pp=4,cp=2,sequence_parallel=true,zero=3,schedule=interleaved,recompute=full,"
    "precision=bf16,microbatch=4"
)


@pytest.mark.parametrize("plan", [str(Plan()), LONG])
def test_the_headline_fits_a_terminal_and_its_plan_is_whole(plan, monkeypatch):
    monkeypatch.setattr(Plan, "__str__", lambda self: plan)
    lines = headline(run_config(Path("no data")), Plan(), 123e9, None).splitlines()
    assert max(map(len, lines)) <= 80
    assert plan in "".join(line.removeprefix("   ") for line in lines)
