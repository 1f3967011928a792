"""Every matrix multiplication of a model: their FLOPs are the planner's, and the roofline says what binds."""

from __future__ import annotations

import numpy as np
import pytest
from pytest import approx
from tests.plan.design.conftest import Load

from argosy.plan.design.bottlenecks import attention_of, matmuls_of, seconds_of_matmuls
from argosy.plan.design.points import Points
from argosy.plan.report.request import Question, of_model
from argosy.plan.workload import Workload


def work_of(model: str) -> Workload:
    return Workload.of(of_model(model, "8xh100", Question(8, 4096)).run)


@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b", "qwen3.5-4b"])
def test_their_flops_are_those_of_the_active_parameters(model: str) -> None:
    work, tokens = work_of(model), 512.0
    flops = sum(one.flops for one in matmuls_of(work, tokens, tokens))
    assert flops == approx(2 * tokens * float(np.asarray(work.matmul_parameters)), rel=1e-9)


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3.5-4b"])
def test_attention_s_flops_are_the_planner_s(model: str) -> None:
    work = work_of(model)
    span = float(work.attention_span / (1 - work.delta_share))
    flops = sum(one.flops for one in attention_of(work, 4, 4096, span))
    per_token = 2 * work.layers * work.attention_span * work.heads * (work.key_width + work.value_width)
    assert flops == approx(per_token * 4 * 4096, rel=1e-9)


def test_decoding_one_request_is_bound_by_memory_and_a_long_prompt_by_arithmetic(load: Load) -> None:
    work, points = work_of("llama3-8b"), Points.of(load())
    for tokens, is_compute in ((1.0, False), (4096.0, True)):
        compute, memory = seconds_of_matmuls(matmuls_of(work, tokens, tokens), points, "bf16")
        assert ((compute >= memory) == is_compute).all()


def test_a_small_cache_makes_a_large_multiplication_read_more(load: Load) -> None:
    points = Points.of(load(cache_bytes="[2e5, 50e6]"))
    (_, memory) = seconds_of_matmuls(matmuls_of(work_of("llama3-8b"), 65536.0, 65536.0), points, "bf16")
    assert (memory[:, 0] > memory[:, 1]).all()
