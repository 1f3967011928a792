"""The arithmetic is that of the model which is built, and of the published sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from argosy.config.attention import AttentionConfig, MLAConfig
from argosy.config.layers import preset_names
from argosy.config.load import load
from argosy.config.model import ModelConfig, MoEConfig, MTPConfig
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.models.mtp import further_tokens
from argosy.plan.parameters import parameters
from argosy.plan.workload import Workload, train_flops_per_token

LLAMA3_8B = ModelConfig(layers=32, width=4096, heads=32, kv_heads=8, head_width=128, ffn_width=14336, vocab_size=128256)
LLAMA3_2_1B = ModelConfig(
    layers=16, width=2048, heads=32, kv_heads=8, head_width=64, ffn_width=8192, vocab_size=128256,
    tie_embeddings=True,
)  # fmt: skip
QWEN25_05B = ModelConfig(
    family="qwen2", layers=24, width=896, heads=14, kv_heads=2, head_width=64, ffn_width=4864,
    vocab_size=151936, qkv_bias=True, tie_embeddings=True,
)  # fmt: skip
QWEN25_7B = ModelConfig(
    family="qwen2", layers=28, width=3584, heads=28, kv_heads=4, head_width=128, ffn_width=18944,
    vocab_size=152064, qkv_bias=True,
)  # fmt: skip
QWEN3_06B = ModelConfig(
    family="qwen3", layers=28, width=1024, heads=16, kv_heads=8, head_width=128, ffn_width=3072,
    vocab_size=151936, qk_norm=True, tie_embeddings=True,
)  # fmt: skip
QWEN3_8B = ModelConfig(
    family="qwen3", layers=36, width=4096, heads=32, kv_heads=8, head_width=128, ffn_width=12288,
    vocab_size=151936, qk_norm=True,
)  # fmt: skip
SMALL = ModelConfig(layers=3, width=64, heads=4, kv_heads=2, head_width=24, ffn_width=96, vocab_size=200)

LATENT = MLAConfig(kv_rank=20, q_rank=36, rope_width=24, nope_width=16, value_width=40)  # values are not padded

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_embeddings": True},
    {"attention_bias": True},
    {"qkv_bias": True},
    {"qk_norm": True},
    {"kv_heads": 4, "qk_norm": True, "attention_bias": True, "tie_embeddings": True},
    {"moe": MoEConfig(experts=6, experts_per_token=2, expert_ffn_width=40)},
    {"moe": MoEConfig(experts=4, experts_per_token=3, expert_ffn_width=40, shared_experts=2, first_dense_layers=1)},
    {"kv_heads": 4, "mla": LATENT, "attention_bias": True},
    {"kv_heads": 4, "mla": LATENT.model_copy(update={"q_rank": 0}), "moe": MoEConfig(experts=4, balance="bias")},
    {"mtp": MTPConfig(modules=2)},
    {"ffn_widths": (64, 96), "attention": AttentionConfig(heads=(4, 8), kv_heads=(2, 4), head_widths=(12, 24))},
    {"attention": AttentionConfig(kv_heads=(2, 4), keys_as_values=(False, True), value_norm=True)},
    {"mtp": MTPConfig(modules=1), "tie_embeddings": True, "moe": MoEConfig(experts=4, first_dense_layers=1)},
]
PRESETS = preset_names("models")
LARGER = {
    "deepseek-v2", "deepseek-v3", "gemma2-27b", "gemma2-9b", "gemma3-12b", "gemma3-27b", "gemma3-4b", "glm4-32b",
    "glm4.5", "gpt-oss-120b", "llama3-70b", "llama3.1-405b", "llama3.1-70b", "llama3.1-8b", "llama3.2-3b",
    "llama4-maverick", "mixtral-8x22b", "mixtral-8x7b", "olmo2-13b", "phi4", "qwen3-1.7b", "qwen3-14b",
    "qwen3-235b-a22b", "qwen3-32b", "qwen3-4b", "qwen3.5-9b",
}  # fmt: skip
"""Presets that differ in numbers alone from a smaller one of their family."""


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_parameters_are_those_of_the_module(variant):
    config = SMALL.model_copy(update=variant)
    assert parameters(config) == sum(p.numel() for p in Decoder(config).parameters())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGER else ()) for name in PRESETS]
)
def test_parameters_of_a_preset_are_those_of_the_module(name):
    config = load("demo", {"model.preset": name, "model.vocab_size": 1000}).model
    assert parameters(config) == sum(p.numel() for p in Decoder(config).parameters())


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA3_2_1B, 1_235_814_400),
        (QWEN25_05B, 494_032_768),
        (QWEN25_7B, 7_615_616_512),
        (QWEN3_06B, 596_049_920),
        (QWEN3_8B, 8_190_735_360),
    ],
    ids=["llama3-8b", "llama3.2-1b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-8b"],
)
def test_parameters_are_the_published_ones(config, published):
    assert parameters(config) == published


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
@pytest.mark.parametrize("seq_len", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_flops_are_those_that_a_step_executes(variant, seq_len):
    """The counter counts the masked half of attention too, which the formula leaves out."""
    config = SMALL.model_copy(update=variant)
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), 0)
    tokens_BT = torch.zeros(2, seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        further = further_tokens(tokens_BT, tokens_BT, tokens_BT, config.mtp.modules) if config.mtp.modules else None
        model(tokens_BT, tokens_BT, further_BTn2=further).backward()
    work = Workload.of_model(config, seq_len, global_batch=1)
    causal_half = work.train_flops_per_token - 6 * work.matmul_parameters
    counted = counter.get_total_flops() / tokens_BT.numel()
    assert counted == pytest.approx(train_flops_per_token(config, seq_len) + causal_half, rel=0.02)


DELTA = {"key_heads": 2, "value_heads": 4, "key_width": 16, "value_width": 24}


def test_flops_of_a_delta_net_are_those_that_a_step_executes():
    config = ModelConfig.model_validate(
        SMALL.model_dump() | {"attention": {"layers": ["linear"]}, "delta_net": DELTA, "family": "qwen3_5_text"}
    )
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), 0)
    for block in model.blocks.values():
        block.attention.recomputes = False
    tokens_BT = torch.zeros(2, 128, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens_BT, tokens_BT).backward()
    assert counter.get_total_flops() / 256 == pytest.approx(train_flops_per_token(config, 128), rel=1e-6)


def test_llama3_8b_at_its_training_length_is_the_known_figure():
    """6 x 7.5 billion matmul parameters, and 6 x 32 layers x 8192 x 4096 of attention."""
    assert train_flops_per_token(LLAMA3_8B, 8192) == pytest.approx(4.503e10 + 6.44e9, rel=1e-3)
