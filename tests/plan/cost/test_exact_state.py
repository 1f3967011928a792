"""The arithmetic on the table of parameters is ZeRO's. What ranks hold: parallel/test_accounting."""

from __future__ import annotations

import math
from typing import Any

import pytest

from argosy.config.load import load
from argosy.config.model import ModelConfig
from argosy.config.optimizer import OPTIMIZERS, OptimizerConfig
from argosy.config.schema import RunConfig
from argosy.optim.optimizer import OPTIMIZER_RULES
from argosy.plan.cost.exact_state import local_shard_of, moment_bytes, place_of, stages_on, state_bytes
from argosy.plan.parameters import Parameter, parameter_table, parameters
from argosy.plan.plan import Plan

SMALL = ModelConfig(layers=4, width=64, heads=8, kv_heads=2, head_width=8, ffn_width=96, vocab_size=203)


def run(model: ModelConfig = SMALL, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": model.model_dump(), "data": {"seq_len": 32}, **sections})


def test_one_process_holds_sixteen_bytes_of_each_parameter():
    model = load("demo", {"model.preset": "llama3-8b", "model.vocab_size": 128256}).model
    state = state_bytes(Plan(), run(model))
    assert (state.parameters, state.gradients, state.optimizer) == tuple(k * parameters(model) for k in (4, 4, 8))
    assert state.total == 16 * parameters(model)


@pytest.mark.parametrize(("zero", "bytes_of_16"), [(0, 16), (1, 4 + 4 + 1 + 2), (2, 4 + 1 + 2), (3, 1 + 1 + 2)])
def test_zero_divides_what_its_stage_says(zero, bytes_of_16):
    model = SMALL.model_copy(update={"vocab_size": 200})  # four divides all rows
    for rank in range(4):
        assert state_bytes(Plan(dp_shard=2, cp=2, zero=zero), run(model), rank).total == bytes_of_16 * parameters(model)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("shards", [3, 7, 300])
def test_moments_of_uneven_shares_add_up_to_all_of_them(zero, shards):
    plan = Plan(dp_shard=shards, zero=zero)
    assert sum(state_bytes(plan, run(), rank).optimizer for rank in range(shards)) == 8 * parameters(SMALL)


def test_ranks_without_a_share_still_have_room_for_one_where_messages_are_padded():
    last = state_bytes(Plan(dp_shard=300), run(), 299)
    assert last.optimizer == 0
    assert last.parameters == last.gradients > 0


def test_tensor_parallel_ranks_hold_norms_whole_and_also_few_key_value_heads():
    held = sum(state_bytes(Plan(tp=4), run(), rank).parameters for rank in range(4))
    table = parameter_table(SMALL, tp=4)
    copies = sum(4 * math.prod(table[f"blocks.0.attention.{name}.weight"].shape) for name in "kv")
    norms = 4 * SMALL.width * (2 * SMALL.layers + 1)
    assert held == 4 * parameters(SMALL) + 3 * (SMALL.layers * copies + norms)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_pipeline_stages_hold_the_model_once_and_a_tied_embedding_twice(schedule, tied):
    model = SMALL.model_copy(update={"tie_embeddings": tied})
    held = sum(state_bytes(Plan(pp=2, schedule=schedule), run(model), rank).parameters for rank in range(2))
    assert held == 4 * (parameters(model) + (model.vocab_size * model.width if tied else 0))


def test_a_pipeline_rank_of_a_v_updates_a_tied_embedding_once():
    model = SMALL.model_copy(update={"tie_embeddings": True})
    plan = Plan(pp=2, schedule="zbv")
    assert sum(state_bytes(plan, run(model), rank).optimizer for rank in range(2)) == 8 * parameters(model)


def test_experts_are_shared_by_the_ranks_that_expert_parallelism_leaves():
    plan = Plan(dp_shard=4, cp=2, ep=4, tp=2, zero=1)
    expert = Parameter((8, 96, 64), tp_dim=1, is_expert=True)
    cut = local_shard_of(expert, plan, rank=15)
    assert (cut.local, cut.ranks, cut.replicas, cut.mine) == ((2, 48, 64), 2, 1, (1, 48, 64))


def test_ranks_count_with_tensor_parallelism_innermost():
    plan = Plan(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    assert [place_of(rank, plan)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert place_of(47, plan) == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert stages_on(plan, run(), 23)[0].first
    assert stages_on(plan, run(), 24)[1].last


@pytest.mark.parametrize(
    ("kind", "state", "name", "shape", "expected"),
    [
        ("adamw", "fp32", "head.weight", (64, 600), 8 * 64 * 600),
        ("lion", "fp32", "head.weight", (64, 600), 4 * 64 * 600),
        ("muon", "fp32", "head.weight", (64, 600), 8 * 64 * 600),
        ("muon", "fp32", "blocks.0.mlp.up.weight", (64, 600), 4 * 64 * 600),
        ("adamw", "int8", "head.weight", (64, 600), 2 * 64 * (600 + 3 * 4)),
        ("adamw", "int8", "norm.weight", (600,), 8 * 600),
    ],
)
def test_moments_take_what_the_optimizer_keeps(kind, state, name, shape, expected):
    assert moment_bytes(name, shape, shape, OptimizerConfig(kind=kind, state=state)) == expected


def test_moments_are_those_of_the_optimizer():
    assert {name: len(rule.moments) for name, rule in OPTIMIZER_RULES.items()} == OPTIMIZERS
