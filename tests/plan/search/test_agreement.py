"""`sync=auto` takes the way that loses least of those that are fast enough, for replicas and for sites."""

from __future__ import annotations

import pytest
from test_search import MBIT_S, RING, nodes, run

from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig, check_fragments
from argosy.errors import UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.sites import rounds_of
from argosy.plan.hardware.clusters import Cluster, NodeGroup, SiteLink
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.measurements import Measurements
from argosy.plan.plan import Plan
from argosy.plan.search.agreement import (
    CHOSEN_KEYS,
    MOST_WAITING_SHARE,
    ORDER,
    ROUNDS_TRIED,
    WORSE_BY,
    choose_rounds,
    choose_word,
    inner_step,
)
from argosy.plan.search.auto import Devices, choose_plan, choose_with_reasons, plan_to_go_on, processes_of
from argosy.plan.search.replan import replan

FOUR = Devices(count=4, kind="cpu", fast_bf16=False)


def with_(asked: RunConfig, plan: str, **sync: object) -> RunConfig:
    return asked.model_copy(update={"plan": plan, "sync": asked.sync.model_copy(update=sync)})


@pytest.mark.parametrize("rate", [1, 10, 100, 1000, 10_000, 100_000])
def test_the_rule_holds_at_any_bandwidth(rate: float) -> None:
    found = choose_word(CostModel.of(run(), nodes(rate)), {})
    enough = (1 + WORSE_BY) * min(found.step_s.values())
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


def cluster(rate: float) -> Cluster:
    groups = tuple(
        NodeGroup(device=find_device("cpu"), nodes=1, devices_per_node=1, site=name) for name in ("oslo", "lyon")
    )
    link = SiteLink(sites=("oslo", "lyon"), bandwidth_bytes_per_s=rate * MBIT_S, latency_s=0.01)
    return Cluster(name="oslo + lyon", groups=groups, links=(link,))


def of_two(plan: str = "auto,sync=auto", **sync: object) -> RunConfig:
    asked = run(batch=16, seq_len=512)
    places = tuple(SiteConfig(name=name) for name in ("oslo", "lyon"))
    return asked.model_copy(update={"plan": plan, "sites": places, "sync": asked.sync.model_copy(update=sync)})


@pytest.mark.parametrize("rate", [0.1, 1, 10, 100, 10_000])
def test_sites_wait_for_a_tenth_of_their_time_at_most_or_for_as_little_as_can_be(rate: float) -> None:
    asked, place = of_two(), cluster(rate)
    chosen = choose_rounds(asked, place, ())
    check_fragments(chosen.sync, asked.model.layers)
    costs, inner_s = inner_step(asked, place)
    told = rounds_of(costs.on(costs.run.model_copy(update={"sync": chosen.sync}), costs.devices), place, inner_s)
    assert told == chosen.rounds and inner_s == chosen.inner_step_s
    assert chosen.waiting <= MOST_WAITING_SHARE or chosen.sync.every_steps == 500
    assert f"every_steps = {chosen.sync.every_steps}" in chosen.in_words()


def test_a_fast_link_gets_the_most_exact_rounds_and_thinner_ones_fewer_bytes() -> None:
    chosen = [choose_rounds(of_two(), cluster(rate), ()) for rate in (100_000, 100, 10, 1)]
    assert (chosen[0].sync.every_steps, chosen[0].sync.wire) == (10, "fp32")
    sent = [each.rounds.sent_bytes / each.rounds.steps for each in chosen]
    assert sent == sorted(sent, reverse=True) and sent[-1] < sent[0]


def test_keys_that_the_user_has_set_stay() -> None:
    chosen = choose_rounds(of_two(every_steps=30, wire="bf16"), cluster(1), ("every_steps", "wire"))
    assert (chosen.sync.every_steps, chosen.sync.wire) == (30, "bf16")
    streamed = choose_rounds(of_two(fragments=2), cluster(1), ("fragments",))
    assert streamed.sync.fragments == 2 and streamed.sync.overlap_steps > 0 and streamed.sync.mixing == 0.5


def test_what_is_no_setting_of_rounds_is_never_touched() -> None:
    before = of_two(outer_lr=0.9, outer_momentum=0.5)
    chosen = choose_rounds(before, cluster(10), ())
    others = {key for key in type(before.sync).model_fields if key not in CHOSEN_KEYS}
    assert all(getattr(chosen.sync, key) == getattr(before.sync, key) for key in others)


def test_what_one_site_s_probe_found_does_not_decide() -> None:
    probed = cluster(10).model_copy(update={"measured": Measurements(host="oslo", layer_host_s=1.0)})
    assert choose_rounds(of_two(), probed, ()) == choose_rounds(of_two(), cluster(10), ())


def test_what_each_site_s_probe_found_gives_its_step_and_the_slowest_decides() -> None:
    def at(**host_s: float) -> Cluster:
        found = {name: Measurements(host=name, site=name, layer_host_s=each) for name, each in host_s.items()}
        return cluster(1).model_copy(update={"measured_at": found})

    of_sheet, slow = choose_rounds(of_two(), cluster(1), ()), choose_rounds(of_two(), at(oslo=1e-4, lyon=2.0), ())
    assert slow.inner_step_s > 2 * of_sheet.inner_step_s
    assert slow == choose_rounds(of_two(), at(oslo=2.0, lyon=1e-4), ())
    places = [ROUNDS_TRIED.index((each.sync.every_steps, each.sync.fragments)) for each in (slow, of_sheet)]
    assert places == sorted(set(places)), "longer steps leave time for what loses less"


@pytest.mark.parametrize("place", [None, Cluster.parse("2xcpu"), Cluster.parse("two-sites")])
def test_a_link_that_nobody_described_is_refused_with_what_to_do(place: Cluster | None) -> None:
    from argosy.plan.search.agreement import check_sites_of

    with pytest.raises(UserError, match=r"oslo and lyon .*argosy probe --run RUN.toml --site NAME"):
        check_sites_of(of_two(), place)
