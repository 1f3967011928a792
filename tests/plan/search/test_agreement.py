"""`sync=auto` takes the way that loses least of those that are about as fast as the fastest, and a run keeps it."""

from __future__ import annotations

import pytest
from test_tiers import RING, nodes, run

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.plan.search.agreement import MARGIN, ORDER, choose_word
from argosy.plan.search.auto import Devices, choose_plan, choose_with_reasons, plan_to_go_on, processes_of
from argosy.plan.search.replan import replan

FOUR = Devices(count=4, kind="cpu", fast_bf16=False)


def with_(asked: RunConfig, plan: str, **sync: object) -> RunConfig:
    return asked.model_copy(update={"plan": plan, "sync": asked.sync.model_copy(update=sync)})


@pytest.mark.parametrize("rate", [1, 10, 100, 1000, 10_000, 100_000])
def test_the_rule_holds_at_any_bandwidth(rate: float) -> None:
    found = choose_word(CostModel.of(run(), nodes(rate)), {})
    enough = (1 + MARGIN) * min(found.step_s.values())
    assert found.step_s[found.word] <= enough
    better = ORDER[: ORDER.index(found.word)]
    assert all(found.step_s[word] > enough for word in better)
    assert found.word in found.in_words() and "loses least" in found.in_words()


def test_a_fast_link_gets_exact_sums_and_a_thin_one_fewer_bytes() -> None:
    words = [choose_word(CostModel.of(run(), nodes(rate)), RING).word for rate in (1e6, 100)]
    assert words[0] == "exact" and words[1] in ("int8", "int4")


def test_powersgd_counts_only_with_the_exact_steps_that_its_quality_was_measured_with() -> None:
    asked = run()
    costs = CostModel.of(asked, nodes(1))
    assert "powersgd" not in choose_word(costs, {}).step_s
    warmed = with_(asked, "auto", exact_steps=asked.train.steps or 1)
    if asked.train.steps:
        assert choose_word(costs.on(warmed, 4), {}).word == "powersgd"


def test_checked_collectives_and_single_devices_keep_exact_sums() -> None:
    asked = run()
    checked = asked.model_copy(update={"resilience": asked.resilience.model_copy(update={"check_collectives": True})})
    assert choose_word(CostModel.of(checked, nodes(1)), {}).word == "exact"
    alone = choose_word(CostModel.of(asked, Cluster.parse("1xcpu")), {})
    assert alone.word == "exact" and "no replicas" in alone.in_words()


def test_auto_alone_keeps_exact_sums() -> None:
    plan, reasons = choose_with_reasons(with_(run(), "auto"), FOUR, nodes(1))
    assert plan.sync == "exact" and not reasons


@pytest.mark.parametrize("text", ["auto,sync=auto,pp=1,tp=1,dp_shard=1", "dp_replicate=4,sync=auto"])
def test_a_plan_that_leaves_sync_open_is_resolved_with_reasons(text: str) -> None:
    plan, reasons = choose_with_reasons(with_(run(), text), FOUR, nodes(100))
    assert plan.sync in ("int8", "int4") and plan.dp_replicate == 4
    assert f"sync=auto takes {plan.sync}" in reasons
    assert processes_of(text) == (0 if "auto," in text else 4)


@pytest.mark.parametrize("count", [4, 2])
def test_a_run_that_goes_on_keeps_the_word_that_was_chosen(count: int, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where nobody probed: links are fast
    asked = with_(run(), "auto,sync=auto,compile=false")
    before = Plan.parse("dp_replicate=4,sync=int4,compile=false,microbatch=2")
    after = plan_to_go_on(asked, Devices(count, "cpu", fast_bf16=False), before)
    assert (after.sync, after.world_size) == ("int4", count)
    assert choose_plan(asked, FOUR).sync == "exact", "a new run would not take it here"


def test_a_plan_for_fewer_processes_keeps_it_too() -> None:
    asked = with_(run(), "auto,sync=auto")
    found = replan(asked, Plan.parse("dp_replicate=4,sync=int8,microbatch=2"), nodes(100), 2)
    assert found.plan.sync == "int8" and not found.notes


def test_sync_auto_is_no_word_of_a_whole_plan() -> None:
    with pytest.raises(UserError, match="sync"):
        Plan.parse("dp_replicate=2,sync=auto")
