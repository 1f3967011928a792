"""The plainest of plans that are about as fast is taken; state goes to the host only if nothing else fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from argosy.config.load import load
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.search import AS_FAST, features, plainest, search, search_to_run, why_nothing_fits


def costs(preset: str, cluster: str = "8xh100") -> CostModel:
    sizes = {"train.global_batch": 64, "data.seq_len": 4096, "model.vocab_size": 32_000}
    return CostModel.of(load(None, {"model.preset": preset, **sizes}), Cluster.parse(cluster))


def test_features_are_what_a_plan_says_beside_plain_data_parallelism():
    plans = [
        "dp_replicate=8,microbatch=4,precision=bf16",
        "dp_shard=8,zero=1",
        "dp_shard=8",
        "dp_shard=8,recompute=full,recompute_every=2",
        "dp_replicate=2,pp=2,tp=2,schedule=zbv,compile=false",
    ]
    assert features(Layouts.of([Plan.parse(plan) for plan in plans])).tolist() == [0, 1, 2, 4, 3]


def test_the_plainest_is_about_as_fast_as_the_fastest_and_no_plan_as_fast_is_plainer():
    found = search(costs("llama3-8b"), {})
    row = plainest(found)
    near = found.step_s <= (1 + AS_FAST) * found.step_s.min()
    assert near[row]
    counts = features(found.plans)
    assert counts[row] == counts[near].min()
    assert found.step_s[row] == found.step_s[near & (counts == counts[row])].min()


def test_state_goes_to_the_host_only_where_nothing_fits_without():
    roomy = costs("llama3-8b", "1xh200")
    assert not np.any(~search_to_run(roomy, {}).plans.is_("offload", "none"))
    tight = replace(roomy, rates=replace(roomy.rates, memory_bytes=80e9))
    assert not np.any(search_to_run(tight, {}).plans.is_("offload", "none"))
    assert len(search_to_run(tight, {"offload": ("none",)})) == 0


def test_what_does_not_fit_is_said_in_figures():
    large = costs("llama3-70b")
    said = why_nothing_fits(large, search(large, {}))
    assert "GiB" in said and "leanest" in said
