"""The time of a layer by hand: FLOPs over the rate, bytes over the bandwidth, and what slows small products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argosy.plan.cost.constants import BACKWARD_ATTENTION, Constants
from argosy.plan.cost.layer_time import BACKWARD_POINTWISE, LayerModel, LayerTime
from argosy.plan.cost.rates import Rates, System
from argosy.plan.hardware.devices import find_device
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.workload import Workload

RATES = replace(
    Rates.of_device(find_device("h100")), half=1e15, achieved_half=0.5, fp32=1e14, achieved_fp32=0.5,
    memory_bytes_per_s=1e12,
)  # fmt: skip
LITTLE = 1e-12
PLAIN = Constants(
    matmul=1, half_size=LITTLE, attention=1, pointwise=LITTLE, pointwise_ffn=LITTLE, permute=LITTLE, host=LITTLE,
    expert_matmul=1,
)  # fmt: skip
"""Products at the rate that large ones reach, and nothing beside them."""
DENSE = Workload(
    layers=4, width=1024, heads=8, kv_heads=2, key_width=128, value_width=128, kv_width=256, core_width=128,
    ffn_width=4096, widest_ffn=4096, ffn_matrices=3, vocab_size=32000, tied=0, seq_len=512, global_batch=64,
    attention_span=256,
)  # fmt: skip
TOKENS = 2 * 512
RATE = 0.5e15
MATRICES = 1024 * (8 * 128 + 2 * 256 + 8 * 128) + 3 * 1024 * 4096
"""Of q, k and v, o; gate, up and down."""


def layer(plan: str = "", work: Workload = DENSE, constants: Constants = PLAIN, **system: Any) -> LayerModel:
    layouts = Layouts.of([Plan.parse(f"microbatch=2,precision=bf16{plan and ','}{plan}")])
    return LayerModel(layouts, work, RATES, System(**system), constants)


def seconds(value: Any) -> float:
    return float(np.squeeze(value))


@pytest.mark.parametrize(("plan", "share"), [("", 1), ("tp=2", 1 / 2), ("cp=2", 1 / 2), ("dp_shard=2,zero=3", 1)])
def test_products_take_two_flops_for_each_number_of_a_matrix_and_token(plan, share):
    found = layer(plan).mean_layer
    assert seconds(found.matmul) == pytest.approx(share * 2 * TOKENS * MATRICES / RATE)
    scores = 2 * TOKENS * 256 * 8 * (128 + 128)  # each token with half of its row: scores, and the values they weight
    assert seconds(found.attention) == pytest.approx(share * scores / RATE)
    assert seconds(found.pointwise) == pytest.approx(0, abs=1e-12)


def test_a_dimension_as_small_as_half_size_halves_the_speed():
    """`half_size` is stated for 156 FLOPs a byte; this device computes 500 of each."""
    slow = replace(PLAIN, half_size=10.0)
    half = 10 * (RATE / 1e12) / 156
    up, down = 2 * 1024 * 2 * 4096, 2 * 4096 * 1024

    def slower(m: float, k: float, n: float) -> float:
        return 1 + half / m + half / k + half / n

    attention = 2 * 1024 * (1024 + 512) * slower(TOKENS, 1024, 1536) + 2 * 1024 * 1024 * slower(TOKENS, 1024, 1024)
    ffn = up * slower(TOKENS, 1024, 8192) + down * slower(TOKENS, 4096, 1024)
    assert seconds(layer(constants=slow).mean_layer.matmul) == pytest.approx(TOKENS * (attention + ffn) / RATE)


def test_latent_attention_goes_by_its_narrow_vectors():
    """DeepSeek-V2: queries by a latent of 64, keys and values by one of 32 beside 16 rotated numbers."""
    mla = replace(
        DENSE,
        q_rank=64,
        kv_rank=32,
        rope_width=16,
        key_width=48,
        value_width=32,
        kv_heads=8,
        kv_width=80,
        core_width=48,
    )
    attention = 1024 * 64 + 64 * 8 * 48 + 1024 * (32 + 16) + 32 * 8 * (32 + 32) + 8 * 32 * 1024
    expected = 2 * TOKENS * (attention + 3 * 1024 * 4096) / RATE
    assert seconds(layer(work=mla).mean_layer.matmul) == pytest.approx(expected)


def test_each_token_computes_with_its_experts_alone():
    moe = replace(
        DENSE, moe_layers=4, experts=8, experts_per_token=2, expert_ffn_width=256, shared_ffn_width=128, ffn_width=0,
        widest_ffn=0,
    )  # fmt: skip
    found = layer(work=moe)
    assert seconds(found.expert_matmuls.matmul) == pytest.approx(2 * TOKENS * 2 * 3 * 1024 * 256 / RATE)
    assert seconds(found.shared_experts.matmul) == pytest.approx(2 * TOKENS * 3 * 1024 * 128 / RATE)
    mixture = found.expert_matmuls.matmul + found.shared_experts.matmul + 2 * TOKENS * 1024 * 8 / RATE
    assert seconds(found.mixture.matmul) == pytest.approx(seconds(mixture))


@pytest.mark.parametrize(("compile", "passes"), [("true", 1.0), ("false", 1.5)])
def test_what_is_between_products_takes_bytes_over_the_bandwidth(compile, passes):
    widths = replace(PLAIN, pointwise=14, pointwise_ffn=6, unfused=0.5)
    moved = (14 * 1024 + 6 * 4096) * TOKENS * 2
    found = layer(f"compile={compile}", constants=widths).mean_layer
    assert seconds(found.pointwise) == pytest.approx(passes * moved / 1e12)


def test_backward_takes_twice_the_products_and_attention_computes_its_scores_again():
    one = LayerTime(1.0, 10.0, 100.0)
    assert one.forward == 111
    assert one.backward() == 2 * 1 + BACKWARD_ATTENTION * 10 + BACKWARD_POINTWISE * 100
    assert one.backward(reached=1, trained=0) == one.backward() - 1  # frozen weights have no gradient
    assert one.backward(reached=0, trained=0) == 0
    assert (one + one * 2) == LayerTime(3.0, 30.0, 300.0)


@pytest.mark.parametrize(
    ("plan", "share"), [("recompute=full", 1.0), ("recompute=full,recompute_every=4", 0.25), ("", 0)]
)
def test_full_recompute_is_a_forward_more(plan, share):
    found = layer(plan, constants=Constants())
    assert seconds(found.recomputed_s) == pytest.approx(share * seconds(found.mean_layer.forward))


def test_of_five_layers_every_second_are_three():
    found = layer("recompute=full,recompute_every=2", work=replace(DENSE, layers=5), constants=Constants())
    assert seconds(found.recomputed_s) == pytest.approx(3 / 5 * seconds(found.mean_layer.forward))


def test_the_head_computes_a_logit_for_each_word_on_the_last_stage():
    found = layer().head
    assert seconds(found.matmul) == pytest.approx(2 * TOKENS * 1024 * 32000 / RATE)
    scored = layer(work=replace(DENSE, scored=1, tied=1)).head
    assert seconds(scored.matmul) == pytest.approx(2 * TOKENS * 1024 / RATE)


def test_the_host_bounds_a_layer_from_below():
    slow = replace(PLAIN, host=1.0)
    eager, compiled = layer("compile=false", constants=slow), layer("compile=true", constants=slow)
    assert seconds(eager.host_s(0.0)) == pytest.approx(1.0) and seconds(compiled.host_s(0.0)) == pytest.approx(0.5)
    assert seconds(eager.host_s(100.0)) < 0.01  # the device is what is waited for


def test_the_ideal_is_the_data_sheets():
    of_matmuls, of_attention = layer("dp_shard=8").ideal_s()
    tokens = 64 * 512 / 8
    assert seconds(of_matmuls) == pytest.approx(tokens * 6 * (4 * MATRICES + 1024 * 32000) / 1e15)
    assert seconds(of_attention) == pytest.approx(tokens * 3 * 4 * 2 * 256 * 8 * 256 / 1e15)
