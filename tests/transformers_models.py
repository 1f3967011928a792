"""Small models of transformers' own classes, for tests of what goes to and from Hugging Face folders."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

ORIGINAL = 32
"""Context before stretching; sequences of tests are longer, so that a wrong stretch shows."""
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
"""Sizes of the models in `THEIRS`, as config.json names them."""
THEIRS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(**SIZES, attention_bias=True, head_dim=16),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}),
    "llama-llama3": LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 5e5,
            "original_max_position_embeddings": ORIGINAL,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3-yarn": Qwen3Config(
        **SIZES,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e6,
            "original_max_position_embeddings": ORIGINAL,
        },
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=3),
    "qwen3-moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[0]
    ),
    "deepseek": DeepseekV3Config(
        **SIZES | {"num_hidden_layers": 3, "num_key_value_heads": 4},
        num_nextn_predict_layers=0,  # transformers computes none
        moe_intermediate_size=20,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=10,
    ),
}
"""Small models of each family, and of its variants."""


def random_theirs(name: str) -> Any:
    """Return the model THEIRS[name] with random weights, norms and biases too, so that leaving one out shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(THEIRS[name]))  # a model writes into its config
    with torch.no_grad():
        for weight, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "mlp.gate" in weight or "experts" in weight:  # nothing initializes some of these
                parameter.normal_(std=0.3)
            elif parameter.dim() == 1 and not weight.endswith("inv_freq"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def load_theirs(folder: Path) -> Any:
    """Return the model in `folder` as transformers loads it in fp32; fail if a weight is missing or unknown to it."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def odd_defaults(model_type: str, defaults: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The defaults that transformers' class of a model type has otherwise: key -> the given one, and theirs."""
    theirs = CONFIG_MAPPING[model_type]().to_dict()
    theirs |= {key: value for key, value in (theirs.get("rope_parameters") or {}).items() if key == "rope_theta"}
    alike = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    return {key: (value, theirs[key]) for key, value in alike.items() if key in theirs and theirs[key] != value}
