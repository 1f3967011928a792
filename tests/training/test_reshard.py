"""A checkpoint says nothing of the layout that wrote it: any plan goes on from that of any other."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.config.schema import RunConfig
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from tiny import EAGER, eager, losses, run_config, train_in
from workers import WorkerPool

MODELS: dict[str, dict[str, Any]] = {
    # Neither the vocabulary nor the widths are multiples of the ranks: some hold less than others, or nothing.
    "uneven": {"layers": 4, "vocab_size": 403, "qk_norm": True, "family": "qwen3", "attention_bias": True},
    "tied": {"layers": 4, "tie_embeddings": True},
    "experts": {  # their routers' biases are part of the state too
        "layers": 2, "family": "deepseek_v3", "kv_heads": 4,
        "mla": {"kv_rank": 16, "q_rank": 24, "rope_width": 8, "nope_width": 16, "value_width": 16},
        "moe": {
            "experts": 4, "experts_per_token": 2, "expert_ffn_width": 16, "router": "sigmoid", "balance": "bias",
            "bias_rate": 1e-2,
        },
    },
}  # fmt: skip
STEPS, SAVED_AT = 6, 3


def run_of(corpus, model: str) -> RunConfig:
    evaluate = {"every_steps": 0, "tokens": 600}
    return run_config(corpus, model=MODELS[model], train={"steps": STEPS}, evaluate=evaluate)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """For each model the records of one process that nothing stopped."""
    folders = {model: tmp_path_factory.mktemp(model) for model in MODELS}
    return {model: train_in(World(), run_of(corpus, model), EAGER, folders[model]) for model in MODELS}


def train(workers: WorkerPool, run: RunConfig, plan: Plan, run_dir, stop_after: int | None) -> list[dict[str, Any]]:
    if plan.world_size == 1:
        return train_in(World(), run, plan, run_dir, stop_after)
    return workers.run(plan.world_size, train_in, run, plan, run_dir, stop_after)[0]


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        pytest.param("uneven", "dp_shard=4", "pp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("uneven", "tp=4", "dp_shard=2,zero=1", marks=pytest.mark.slow),
        pytest.param("uneven", "dp_shard=2,zero=2", "", marks=pytest.mark.slow),
        pytest.param("uneven", "", "dp_shard=2,tp=2", marks=pytest.mark.slow),
        pytest.param("tied", "pp=2,layers=1:3", "pp=2,layers=3:1", marks=pytest.mark.slow),
        ("uneven", "dp_replicate=2,shares=3:1", "dp_replicate=2,dp_shard=2,zero=2,shares=1:3"),
        pytest.param(
            "uneven", "dp_shard=2,tp=2", "dp_shard=2,tp=2,zero=1", marks=pytest.mark.slow
        ),  # the same ranks; their parts are cut in another order
        pytest.param("uneven", "cp=2,tp=2", "pp=2,dp_shard=2,schedule=zbv", marks=pytest.mark.slow),
        pytest.param("tied", "pp=2", "cp=2", marks=pytest.mark.slow),
        pytest.param("tied", "dp_replicate=2,dp_shard=2,zero=1", "pp=2,schedule=zbv", marks=pytest.mark.slow),
        ("experts", "dp_shard=2,ep=2", "tp=2"),
        pytest.param("experts", "pp=2", "dp_shard=4,ep=2", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_plan_with_the_same_losses(
    workers, corpus, undisturbed, tmp_path, model, before, after
):
    run = run_of(corpus, model)
    assert len(losses(train(workers, run, eager(before), tmp_path, SAVED_AT))) == SAVED_AT
    found, expected = train(workers, run, eager(after), tmp_path, None), undisturbed[model]
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert column(found, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=1e-4)
    assert column(found, "validation_loss") == pytest.approx(column(expected, "validation_loss"), rel=1e-5)


def column(records: list[dict[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if key in record]
