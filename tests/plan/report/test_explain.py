"""What is said of a plan adds up, and what would change it changes it so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster, SiteLink
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.report.explain import (
    MEANING,
    MEMORY_MEANING,
    binding,
    reliability,
    sensitivities,
    spares_in_words,
    stops_in_words,
    sums_in_words,
    ways_to_agree,
)
from argosy.plan.search.search import search

PLAN = Plan.parse("pp=2,dp_shard=4,tp=2,zero=1,recompute=selective,precision=bf16")


def costs_of(cluster: str = "16xh100", model: str = "llama3-8b") -> CostModel:
    run = load(None, {"model.preset": model, "train.global_batch": 64, "data.seq_len": 8192})
    return CostModel.of(run, Cluster.parse(cluster))


def test_the_waterfall_adds_up_to_the_step_and_every_part_has_a_meaning() -> None:
    time = costs_of().predict_time(Layouts.of([PLAN, Plan.parse("dp_shard=16,precision=bf16")]))
    for row in range(2):
        parts = time.by_category(row)
        assert sum(parts.values()) == pytest.approx(np.asarray(time.total)[row])
        assert parts.keys() <= MEANING.keys()
        assert next(iter(parts)) == "ideal"


def test_memory_adds_up() -> None:
    memory = costs_of().predict_memory(Layouts.of([PLAN]))
    parts = memory.by_category(0)
    assert sum(parts.values()) == pytest.approx(np.asarray(memory.total)[0])
    assert parts.keys() == MEMORY_MEANING.keys()


def test_a_tenth_more_of_anything_makes_no_step_longer_and_the_most_helpful_is_first() -> None:
    changes = sensitivities(costs_of(), PLAN)
    assert [change.change for change in changes] == sorted(change.change for change in changes)
    assert all(-0.1 < change.change < 1e-9 for change in changes)
    assert binding(changes) == "matmul rate"


def test_what_binds_follows_the_cluster() -> None:
    """Pipeline, tensor and data parallelism over thin links: the NIC; the same on one node: never the NIC."""
    thin = costs_of("16x1xh100")
    slow = replace(thin, rates=replace(thin.rates, nic_bytes_per_s=1e9))
    assert binding(sensitivities(slow, PLAN)) == "NIC bandwidth"
    inside = sensitivities(costs_of("8xh100"), Plan.parse("dp_shard=4,tp=2,precision=bf16"))
    assert next(change for change in inside if "NIC" in change.what).change == 0


def test_a_sensitivity_is_what_the_changed_cluster_gives() -> None:
    costs = costs_of()
    change = next(c for c in sensitivities(costs, PLAN) if c.what == "+10 % NIC bandwidth")
    better = replace(costs, rates=replace(costs.rates, nic_bytes_per_s=costs.rates.nic_bytes_per_s * 1.1))
    before, after = (float(np.asarray(p.predict_time(Layouts.of([PLAN])).total)[0]) for p in (costs, better))
    assert change.change == pytest.approx(after / before - 1)


def test_more_memory_may_allow_a_faster_plan() -> None:
    costs = costs_of("8xh100")
    found = search(costs, {})
    best = found.plans.plan(int(found.best(found.step_s, 1)[0]))
    change = next(c for c in sensitivities(costs, best, found) if c.what == "+10 % memory")
    more = replace(costs, rates=replace(costs.rates, memory_bytes=costs.rates.memory_bytes * 1.1))
    assert change.change == pytest.approx(search(more, {}).step_s.min() / found.step_s.min() - 1, abs=1e-9)


RUN = RunConfig.model_validate(
    {
        "model": {"layers": 4, "width": 1024, "heads": 8, "kv_heads": 8, "head_width": 128, "ffn_width": 4096},
        "data": {"seq_len": 128},
        "train": {"steps": 1, "global_batch": 64},
    }
)


@pytest.mark.parametrize(
    ("plan", "messages", "how", "sent"),
    [
        ("dp_replicate=4,bucket_mb=16", "buckets of 16 MiB", "across 4 replicas", " GiB a step"),
        (
            "dp_replicate=8,dp_shard=2,zero=1,sum_inside=2,sum_between=2,sync=int8",
            "buckets of 4 MiB",
            "among 2 ranks that share the state, then among 2 neighbours, then between 2 groups of them, then across 2 "
            "groups in int8",
            " GiB between their groups, ",
        ),
        ("dp_shard=4", "layer by layer (FSDP2)", "among 4 ranks that share the state", " GiB a step"),
    ],
)
def test_each_tier_has_its_words_and_bytes(plan, messages, how, sent):
    words = sums_in_words(Plan.parse(plan), RUN)
    assert words is not None
    assert words[0] == messages
    assert words[1].startswith(f"{how}; a rank sends ") and sent in words[1]


def test_without_data_parallelism_there_is_nothing_to_say():
    assert sums_in_words(Plan.parse("tp=4"), RUN) is None


@pytest.mark.parametrize(
    ("plan", "sent_bytes"),
    [
        ({"pp": (2,), "dp_shard": (2,)}, 64 * 128 * 1024 * 2),  # hidden states of all tokens, in bf16
        ({"pp": (1,), "dp_shard": (4,)}, 4 * 67_633_152),  # gradients of all matrices, in fp32
    ],
)
def test_a_site_sends_hidden_states_where_a_pipeline_lies_over_sites_and_else_gradients(plan, sent_bytes):
    groups = Cluster.parse("2xh100+2xa100").groups
    link = SiteLink(sites=("a", "b"), bandwidth_bytes_per_s=1.25e8, latency_s=0.02)
    of_sites = [g.model_copy(update={"site": site}) for g, site in zip(groups, "ab", strict=True)]
    run = RUN.with_keys(model={"vocab_size": 256})
    summed, *_ = ways_to_agree(run, Cluster(groups=tuple(of_sites), links=(link,)), plan)
    assert (summed.inner_steps, summed.bytes_per_step) == (1, sent_bytes)


FLEET = Cluster.parse("h100-16384")


def test_a_longer_run_has_more_stops_and_spares_only_for_as_long_as_it_lasts():
    hour, day, month = (reliability(FLEET, 16_384, 16_384.0 * hours) for hours in (1, 24, 720))
    assert [hour.stops[1] * 720, day.stops[1] * 30] == pytest.approx([month.stops[1]] * 2)
    assert hour.spare_nodes < day.spare_nodes == month.spare_nodes
    low, mid, high = month.spare_nodes
    assert low < mid < high and f"hold {mid} ({low} to {high}) spare nodes" in spares_in_words(month)
    assert "silent corruptions" in stops_in_words(month) and month.corruptions.high >= 1


def test_spares_are_for_the_nodes_of_the_job_not_for_all_that_there_are():
    alone = reliability(Cluster.parse("1024xh100"), 1024, 1024.0 * 720)
    assert reliability(FLEET, 1024, 1024.0 * 720).spare_nodes == alone.spare_nodes
