"""The account of agreement: bytes over those of exact fp32 sums, by replicas and by sites."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.plan.cost.traffic import traffic
from argosy.plan.plan import Plan
from argosy.plan.workload import parameters
from argosy.training.sync_account import SyncAccount
from tiny import run_config

RUN = run_config(Path("no data"))


def sent(plan: Plan) -> int:
    return sum(count for (axis, _), count in traffic(plan, RUN).items() if axis == "replicate")


@pytest.mark.parametrize("word", ["bf16", "int8", "powersgd"])
def test_the_ratio_is_that_of_the_bytes_of_exact_sums(word: str) -> None:
    plan = Plan.parse(f"dp_replicate=2,sync={word}")
    exact = sent(Plan.parse("dp_replicate=2"))
    line = SyncAccount(RUN, plan).line({"replicate": {"network": [0.25, sent(plan)]}, "tp": {"node": [1.0, 9]}}, None)
    assert line == {"bytes": sent(plan), "seconds": 0.25, "ratio": pytest.approx(sent(plan) / exact, abs=1e-6)}


def test_exact_sums_have_no_account() -> None:
    assert SyncAccount(RUN, Plan.parse("dp_replicate=2")).line({"replicate": {"node": [1.0, 9]}}, None) is None


def test_a_round_of_sites_is_held_against_exact_sums_in_each_of_its_steps() -> None:
    run = RUN.model_copy(update={"sites": ("a", "b")})  # their number alone counts
    account = SyncAccount(run, Plan.parse("sync=diloco"))
    assert account.line({"replicate": {"node": [1.0, 9]}}, None) is None  # a step inside the round
    sites = {"sent_bytes": 4 * parameters(RUN.model), "seconds": 2.0, "staleness_steps": 50, "distance": 0.1}
    line = account.line({}, sites)
    assert line is not None
    assert line["ratio"] == pytest.approx(1 / 50)
    of_fragments = account.line({}, sites | {"steps": 25})
    assert of_fragments is not None and of_fragments["ratio"] == pytest.approx(2 / 50)
    assert (line["staleness"], line["distance"], line["seconds"]) == (50, 0.1, 2.0)
