"""Sizes as numbers give the same arithmetic as the table of parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest

from argosy.config.layers import preset_names
from argosy.config.load import load
from argosy.plan.layer_spec import layer_spec
from argosy.plan.parameters import active_parameters, parameter_table, trained_shapes
from argosy.plan.quantities import stack
from argosy.plan.workload import Workload, train_flops_per_token

EXPERTS = {"moe.experts": 4, "moe.every": 2, "moe.expert_ffn_width": 64, "moe.shared_experts": 1}
UNGATED = {"family": "nemotron", "ffn_gate": False, "norms.kind": "layer"}


@pytest.mark.parametrize("keys", [*({"preset": name} for name in preset_names("models")), UNGATED | EXPERTS], ids=str)
def test_flops_and_parameters_are_those_of_the_model(keys):
    model = load("demo", {f"model.{key}": value for key, value in keys.items()}).model
    model = model.model_copy(update={"vocab_size": model.vocab_size or 4096})
    work = Workload.of_model(model, seq_len=512, global_batch=16)
    table = parameter_table(model)
    matrices = {name: p for name, p in table.items() if len(p.shape) > 1 and not name.endswith(("bias", "_conv"))}
    assert work.matrix_parameters == sum(math.prod(p.shape) for p in matrices.values())
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.width
    vectors = sum(
        math.prod(p.shape[1:]) * model.moe.experts_per_token if p.is_expert else math.prod(p.shape)
        for name, p in table.items()
        if name not in matrices
    )
    assert work.matmul_parameters == active_parameters(model) - vectors - looked_up
    assert work.train_flops_per_token == pytest.approx(train_flops_per_token(model, 512))


def test_a_stack_has_the_figures_of_each():
    works = [
        Workload.of_model(load("demo", {"model.preset": preset}).model, seq_len=512, global_batch=16)
        for preset in ("llama3-8b", "deepseek-v3", "qwen3-30b-a3b")
    ]
    together = stack(works)
    assert np.asarray(together.matrix_parameters).tolist() == [work.matrix_parameters for work in works]


MIXED = {
    "model.preset": "llama3-8b", "model.layers": 6, "model.attention.kv_heads": [2, 8, 1],
    "model.attention.layers": ["full", "sliding", "sliding"], "model.attention.window": 128,
}  # fmt: skip


def test_heads_that_several_ranks_have_are_counted_layer_by_layer():
    model = load("demo", MIXED).model
    work, alike = (
        Workload.of_model(each, 512, 16) for each in (model, load("demo", {"model.preset": "llama3-8b"}).model)
    )
    tp = np.array([1, 2, 4, 8, 16])
    layers = [layer_spec(model, layer) for layer in range(model.layers)]
    of_layers = np.array([np.maximum(1, spec.kv_heads / tp) * 2 * spec.head_width for spec in layers])
    cached = np.array([[spec.seen(512) / 512] for spec in layers])
    for found in (work, stack([alike, work])):
        on_rank, in_cache = (np.asarray([found.kv_heads_on(n, cached=c) for n in tp]) for c in (False, True))
        if found is not work:
            assert on_rank[:, 0].tolist() == np.maximum(1, 8 / tp).tolist()
            on_rank, in_cache = on_rank[:, 1], in_cache[:, 1]
        assert on_rank * work.kv_width == pytest.approx(of_layers.mean(0))
        assert in_cache * work.kv_width * work.cached_share == pytest.approx((of_layers * cached).mean(0))


@pytest.mark.parametrize(
    ("frozen", "passes"),
    [
        ([], 6),
        (["embedding", "blocks.0", "blocks.1"], 4),  # forward of all layers, all of two's
        (["embedding", "*.q", "*.k", "*.v", "*.o", "*.mlp"], 4),  # the norms are trained, so backward passes through
        (["embedding", "blocks.*", "norm"], 2),
    ],
)
def test_what_is_frozen_costs_less(frozen: list[str], passes: int) -> None:
    keys = {"model.preset": "llama3-8b", "model.layers": 4, "model.vocab_size": 512, "train.frozen": frozen}
    run = load("demo", keys)
    work = Workload.of(run)
    in_layers = work.matmul_parameters - work.vocabulary_parameters
    assert work.matmul_flops_per_token == pytest.approx((passes * in_layers, 6 * work.vocabulary_parameters))
    trained = {name: shape for name, shape in trained_shapes(run).items() if len(shape) > 1}
    assert work.trained_parameters == sum(map(math.prod, trained.values()))
