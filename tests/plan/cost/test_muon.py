"""What Muon makes orthogonal: counted by torch's own counter of FLOPs, and as ranks deal it out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.optim.optimizer import newton_schulz
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.muon import hidden_matrices
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan

EXPERTS = {"model.moe.experts": 4, "model.moe.expert_ffn_width": 64, "model.moe.shared_experts": 1}


def run_of(**keys: Any) -> RunConfig:
    sizes = {"model.preset": "llama-60m", "model.vocab_size": 1000, "model.layers": 2, "optimizer.kind": "muon"}
    return load("demo", {**sizes, "train.global_batch": 16, **keys})


def orthogonal_s(plan: str, run: RunConfig) -> float:
    """Return the seconds on H100s whose links take no time."""
    costs, plans = CostModel.of(run, Cluster.parse("8xh100")), Layouts.of([Plan.parse(plan)])
    rates = replace(costs.rates, link_bytes_per_s=1e30, nic_bytes_per_s=1e30)
    costs = replace(costs, rates=rates, constants=replace(costs.constants, latency=1e-30, hop=1e-30))
    return float(np.squeeze(costs.step_model(plans).orthogonal_s()))


def test_flops_are_those_that_torch_counts():
    run = run_of(**EXPERTS)
    model, moe = run.model, run.model.moe
    heads, keys = model.heads * model.head_width, model.kv_heads * model.head_width
    shared = (moe.expert_ffn_width, model.width)
    single = [(heads, model.width), (model.width, heads), *[(keys, model.width)] * 2, *[shared] * 3]
    stacks = [(moe.experts, *shared)] * 3
    for found, shapes in zip(hidden_matrices(run), (single, stacks), strict=True):
        with FlopCounterMode(display=False) as counter:
            for shape in shapes:
                newton_schulz(torch.empty(shape, device="meta"))
        assert found.flops == model.layers * counter.get_total_flops()
        assert found.many == model.layers * len(shapes)
        assert found.are_stacks == (shapes is stacks)


def test_other_optimizers_and_what_is_frozen_make_nothing_orthogonal():
    assert not hidden_matrices(run_of(**{"optimizer.kind": "lion"}))
    (trained,) = hidden_matrices(run_of(**{"train.frozen": ["blocks.0"]}))
    (every,) = hidden_matrices(run_of())
    assert trained.flops * 2 == every.flops


@pytest.mark.parametrize(
    ("plan", "keys", "share"),
    [
        ("dp_replicate=2", {}, 1 / 2),
        ("dp_replicate=64", {}, 0.122),  # more ranks than matrices: as long as the largest takes
        ("dp_shard=2,zero=1", {}, 1 / 2),
        ("tp=2", {}, 1 / 2),
        ("pp=2", {}, 1 / 2),
        ("dp_shard=2,ep=2", EXPERTS, 1 / 2),
        ("dp_replicate=2,dp_shard=2,ep=2", EXPERTS, 0.2584),  # stacks, 1/30 of all, are not dealt to replicas
    ],
)
def test_ranks_share_the_work(plan, keys, share):
    alone, found = orthogonal_s("", run_of(**keys)), orthogonal_s(plan, run_of(**keys))
    assert found == pytest.approx(alone * share, rel=0.01)
