"""Mixtures of experts: keys that config.json leaves out are as transformers has them; other models are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.models.hf_config import config_from_json, config_to_json
from argosy.models.hf_family import CONFIG_DEFAULTS
from argosy.models.hf_mixtures import MIXTURES
from transformers_models import odd_defaults

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 101,
    "num_key_value_heads": 8,
}  # fmt: skip


def read(family: str, **keys: Any) -> ModelConfig:
    return config_from_json(SIZES | {"model_type": family} | keys, "config.json")


@pytest.mark.parametrize("family", MIXTURES)
def test_a_missing_key_is_what_transformers_takes(family: str) -> None:
    model_type = "deepseek_v3" if family == "kimi_k2" else family
    assert odd_defaults(model_type, CONFIG_DEFAULTS | MIXTURES[family].defaults) == {}


def test_the_first_and_the_third_deepseek_differ_where_their_classes_do() -> None:
    second, third = read("deepseek_v2", num_experts_per_tok=6), read("deepseek_v3")
    assert (second.moe.router, second.moe.balance, second.moe.normalize_weights) == ("softmax", "aux", False)
    assert (second.moe.experts, second.moe.groups, second.moe.experts_per_token) == (64, 1, 6)
    assert (third.moe.router, third.moe.balance, third.moe.normalize_weights) == ("sigmoid", "bias", True)
    assert (third.moe.experts, third.moe.groups, third.moe.experts_per_token) == (256, 8, 8)
    with pytest.raises(UserError, match=r"config.json: num_experts_per_tok is missing\. Add it"):
        read("deepseek_v2")


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: only null is known. Choose another model."),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5: only 1.702 is known"),
        ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func = "softmax": only "sigmoid" is known'),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05: only 1e-06 is known"),
        (
            "deepseek_v2",
            {"num_experts_per_tok": 6, "norm_topk_prob": True},
            "norm_topk_prob = true: only false is known",
        ),
        ("deepseek_v2", {"num_experts_per_tok": 6, "topk_method": "noaux_tc"}, 'topk_method = "noaux_tc"'),
        ("qwen3_moe", {"moe_intermediate_size": "wide"}, "moe_intermediate_size: Input should be a valid integer"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_its_key(family: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read(family, **keys)
    assert f"config.json: {said}" in str(refused.value)


def test_the_width_of_shared_experts_is_written_where_it_follows_from_other_sizes() -> None:
    config = read("qwen2_moe", moe_intermediate_size=24)
    plain = config.model_copy(update={"moe": config.moe.model_copy(update={"shared_ffn_width": 0})})
    written = config_to_json(plain, dtype=torch.float32, eod_id=None)
    assert written["shared_expert_intermediate_size"] == 24
    assert config_from_json(written, "config.json").moe.shared_ffn_width == 24


@pytest.mark.parametrize("family", MIXTURES)
def test_no_two_weights_have_one_name(family: str) -> None:
    names, fused = MIXTURES[family].names, MIXTURES[family].fused
    assert len(set(names.values())) == len(names) and not set(names.values()) & set(fused)
    assert not set(names) & {ours for tensor in fused.values() for ours in tensor.ours}
