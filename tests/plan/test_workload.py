"""Sizes as numbers give the same arithmetic as the table of parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest

from argosy.config.layers import preset_names
from argosy.config.load import load
from argosy.plan.parameters import parameter_table
from argosy.plan.workload import Workload, active_parameters, matmul_parameters, stack, train_flops_per_token


@pytest.mark.parametrize("preset", preset_names("models"))
def test_flops_and_parameters_are_those_of_the_model(preset):
    model = load("demo", {"model.preset": preset}).model
    model = model.model_copy(update={"vocab_size": model.vocab_size or 4096})
    work = Workload.of_model(model, seq_len=512, global_batch=16)
    table = parameter_table(model).values()
    assert work.matrix_parameters == sum(math.prod(p.shape) for p in table if len(p.shape) > 1)
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.width
    vectors = sum(math.prod(p.shape) for p in table if len(p.shape) == 1)
    assert work.matmul_parameters == active_parameters(model) - vectors - looked_up
    assert work.matmul_parameters == matmul_parameters(model)
    assert work.train_flops_per_token == pytest.approx(train_flops_per_token(model, 512))


def test_a_stack_has_the_figures_of_each():
    works = [
        Workload.of_model(load("demo", {"model.preset": preset}).model, seq_len=512, global_batch=16)
        for preset in ("llama3-8b", "deepseek-v3", "qwen3-30b-a3b")
    ]
    together = stack(works)
    assert np.asarray(together.matrix_parameters).tolist() == [work.matrix_parameters for work in works]
