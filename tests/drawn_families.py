"""Random small configurations of each family, drawn within what its class of transformers allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from argosy.config.model import FAMILIES
from argosy.models.hf_families import FAMILY_OF as CLASSES
from argosy.models.hf_family import Family

VOCABULARY, ORIGINAL = 101, 16
"""ORIGINAL: the context before stretching, less than a test's sequence."""


class Draw(Protocol):
    """Takes one of several values."""

    def __call__(self, options: Sequence[Any], /) -> Any: ...


def _sizes(draw: Draw, family: str) -> dict[str, Any]:
    kv_heads = draw([1, 2, 4])
    heads = kv_heads * draw([1, 2])
    return {
        "hidden_size": 12 * heads,
        "intermediate_size": draw([20, 36]),
        "num_hidden_layers": draw([2, 3, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": draw([False, True]),
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _rope(draw: Draw) -> dict[str, Any]:
    theta = draw([1e3, 1e4])
    kind = draw(["default", "linear", "llama3", "yarn"])
    more: dict[str, dict[str, Any]] = {
        "linear": {"factor": 4.0},
        "llama3": {
            "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    }  # fmt: skip
    return {"rope_type": kind, "rope_theta": theta, **more.get(kind, {})}


def _windows(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    kinds = [draw(["sliding_attention", "full_attention"]) for _ in range(layers)]
    return {"sliding_window": draw([3, 8, 17, 64]), "layer_types": kinds}


def _experts(draw: Draw, count: str = "num_experts") -> dict[str, Any]:
    return {count: draw([4, 6]), "num_experts_per_tok": draw([1, 2, 3])}


def _deepseek_experts(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_routed_experts": 8,
        "num_experts_per_tok": draw([2, 3]),
        "moe_intermediate_size": 20,
        "n_shared_experts": draw([1, 2]),
        "first_k_dense_replace": draw([0, 1]),
        "norm_topk_prob": draw([True, False]),
        "routed_scaling_factor": draw([1.0, 2.5]),
        "num_nextn_predict_layers": 0,  # which transformers does not compute
    } | draw([{"n_group": 1, "topk_group": 1}, {"n_group": 4, "topk_group": 2}])


def _latent(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_key_value_heads": sizes["num_attention_heads"],
        "kv_lora_rank": 16,
        "q_lora_rank": draw([None, 12]),
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": draw([8, 12]),
        "v_head_dim": 10,
    }


def _llama(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": draw([False, True]), "mlp_bias": draw([False, True]), "rope_parameters": _rope(draw)}


def _qwen2(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": _rope(draw)} | draw([{}, {"use_sliding_window": True, **_windows(draw, sizes)}])


def _qwen3(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return _qwen2(draw, sizes) | {"head_dim": draw([8, 16]), "attention_bias": draw([False, True])}


def _gemma2(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return _windows(draw, sizes) | {
        "head_dim": draw([8, 16]),
        "query_pre_attn_scalar": draw([16, 21]),
        "attn_logit_softcapping": draw([None, 2.0]),
        "final_logit_softcapping": draw([None, 3.0]),
        "attention_bias": draw([False, True]),
    }


def _gemma3(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    full = draw([{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}]) | {"rope_theta": 1e4}
    sliding = {"rope_type": "default", "rope_theta": draw([1e2, 1e4])}
    ropes = {"full_attention": full, "sliding_attention": sliding}
    return _gemma2(draw, sizes) | {"rope_parameters": ropes, "attn_logit_softcapping": None}


def _olmo3(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    full = _rope(draw)
    sliding = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    return _windows(draw, sizes) | {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _granite(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": draw([False, True]),
        "embedding_multiplier": draw([1.0, 12.0]),
        "residual_multiplier": draw([1.0, 0.22]),
        "attention_multiplier": draw([0.1, 0.0625]),
        "logits_scaling": draw([1.0, 6.0]),
    }


def _smollm3(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "no_rope_layers": [draw([0, 1]) for _ in range(sizes["num_hidden_layers"])],
        "attention_bias": draw([False, True]),
        "mlp_bias": draw([False, True]),
        "rope_parameters": _rope(draw),
    }


def _glm(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": draw([0.5, 1.0])}
    return {"head_dim": 16, "attention_bias": draw([False, True]), "rope_parameters": rope}


def _phi3(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    share = draw([0.5, 1.0])
    pairs, steps = int(12 * share) // 2, {"short_factor": 0.1, "long_factor": 3.0}
    original = draw([8, 64])  # below and above the rows and the documents of tests
    long = {"rope_type": "longrope", "original_max_position_embeddings": original} | {
        name: [1.0 + step * i for i in range(pairs)] for name, step in steps.items()
    }
    rope = draw([{"rope_type": "default"}, long]) | {"rope_theta": 1e3, "partial_rotary_factor": share}
    return {"sliding_window": draw([None, 9]), "rope_parameters": rope}


def _nemotron(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": draw([0.5, 1.0])}
    return {"attention_bias": draw([False, True]), "mlp_bias": draw([False, True]), "rope_parameters": rope}


def _cohere(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": draw([False, True]), "logit_scale": draw([0.0625, 1.0])}


def _sparse(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    layers, step = sizes["num_hidden_layers"], draw([1, 2])
    return _experts(draw) | {
        "moe_intermediate_size": 20,
        "norm_topk_prob": draw([False, True]),
        "mlp_only_layers": draw([[], [0], [1]]) if layers > 1 + step else [],  # some layer has experts
        "decoder_sparse_step": step,
    }


def _gpt_oss(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    rope = draw([
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": ORIGINAL, "rope_theta": 1e4},
        {"rope_type": "default", "rope_theta": 1e3},
    ])  # fmt: skip
    return _windows(draw, sizes) | _experts(draw, "num_local_experts") | {
        "head_dim": draw([8, 16]), "swiglu_limit": draw([1.0, 7.0]), "attention_bias": draw([False, True]),
        "rope_parameters": rope,
    }  # fmt: skip


def _glm4_moe(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return _deepseek_experts(draw, sizes) | _glm(draw, sizes) | {"use_qk_norm": draw([False, True])}


def _dots1(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return _deepseek_experts(draw, sizes) | _windows(draw, sizes) | {"attention_bias": draw([False, True])}


def _deepseek_v2(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = _deepseek_experts(draw, sizes) | {"norm_topk_prob": False}
    grouped = experts["n_group"] > 1
    method = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return experts | method | _latent(draw, sizes) | ({} if grouped else {"n_group": None, "topk_group": None})


def _deepseek_v3(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    return _deepseek_experts(draw, sizes) | _latent(draw, sizes)


def _qwen3_5(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    layers, key_heads = sizes["num_hidden_layers"], draw([1, 2])
    between = (draw(["linear_attention", "full_attention"]) for _ in range(layers - 2))
    kinds = ["linear_attention", *between, "full_attention"]  # transformers' cache wants one of the latter
    return {
        "layer_types": kinds,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw([1, 2, 3]),
        "linear_key_head_dim": draw([16, 20]),
        "linear_value_head_dim": draw([8, 12]),
        "linear_conv_kernel_dim": draw([2, 4]),
        "head_dim": draw([8, 16]),
        "attention_bias": draw([False, True]),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": draw([0.25, 0.5, 1.0])},
    }


def _gated_experts(draw: Draw) -> dict[str, Any]:
    return _experts(draw) | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}


def _mlp_kinds(draw: Draw, layers: int) -> list[str]:
    return [*(draw(["dense", "sparse"]) for _ in range(layers - 1)), "sparse"]


def _two_ropes(draw: Draw) -> dict[str, Any]:
    return {
        kind: {"rope_type": "default", "rope_theta": draw([1e2, 1e4]), "partial_rotary_factor": draw([0.5, 1.0])}
        for kind in ("full_attention", "sliding_attention")
    }


def _mimo(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    absent = ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")
    experts = {n: v for n, v in _deepseek_experts(draw, sizes).items() if n not in absent}
    return _windows(draw, sizes) | experts | {
        "num_attention_heads": sizes["num_key_value_heads"] * draw([2, 4]),  # sliding layers have twice the latter
        "head_dim": draw([8, 16]),
        "v_head_dim": draw([8, 12, 20]),
        "attention_value_scale": draw([None, 0.7]),
        "attention_bias": draw([False, True]),
        "mlp_layer_types": _mlp_kinds(draw, sizes["num_hidden_layers"]),
        "rope_parameters": _two_ropes(draw),
    }  # fmt: skip


def _laguna(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    kv_heads, layers = sizes["num_key_value_heads"], sizes["num_hidden_layers"]
    return _windows(draw, sizes) | _experts(draw) | {
        "num_attention_heads_per_layer": [kv_heads * draw([1, 2, 4]) for _ in range(layers)],
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "moe_routed_scaling_factor": draw([1.0, 2.5]),
        "mlp_layer_types": _mlp_kinds(draw, layers),
        "gating": draw([True, "per-element"]),
        "head_dim": draw([8, 16]),
        "attention_bias": draw([False, True]),
        "rope_parameters": _two_ropes(draw),
    }  # fmt: skip


def _gemma4(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    windows = _windows(draw, sizes)
    windows["layer_types"][-1] = "full_attention"
    full = draw([
        {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        {"rope_type": "default", "rope_theta": 1e3},
    ])  # fmt: skip
    return windows | {
        "head_dim": 8,
        "global_head_dim": draw([8, 16]),
        "attention_k_eq_v": draw([False, True]),
        "num_global_key_value_heads": draw([None, 1]),
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": draw([None, 3.0]),
        "attention_bias": draw([False, True]),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e2}},
    }


def _llama4(draw: Draw, sizes: dict[str, Any]) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    experts = draw([{"interleave_moe_layer_step": draw([1, 2])}, {"moe_layers": [0, layers - 1]}])
    return _experts(draw, "num_local_experts") | experts | {
        "intermediate_size": 20,
        "intermediate_size_mlp": 28,
        "head_dim": draw([8, 16]),
        "use_qk_norm": draw([False, True]),
        "no_rope_layers": [draw([0, 1]) for _ in range(layers)],
        "attention_chunk_size": draw([3, 8, 17, 64]),
        "attn_temperature_tuning": draw([False, True]),
        "floor_scale": draw([4, 16]),
        "attn_scale": draw([0.1, 0.7]),
        "attention_bias": draw([False, True]),
        "rope_parameters": _rope(draw),
    }  # fmt: skip


Drawn = Callable[[Draw, dict[str, Any]], dict[str, Any]]
DRAWN: dict[str, Drawn] = {
    "llama": _llama,
    "cwm": lambda d, s: _windows(d, s) | {"head_dim": d([8, 16]), "rope_parameters": _rope(d)},
    "mistral": lambda d, s: {"sliding_window": d([None, 5, 24]), "head_dim": d([8, 16]), "rope_parameters": _rope(d)},
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": lambda d, s: {"head_dim": d([8, 16]), "attention_bias": d([False, True])},
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo2": lambda d, s: {"attention_bias": d([False, True]), "rope_parameters": _rope(d)},
    "olmo3": _olmo3,
    "exaone4": lambda d, s: d([{"sliding_window": None}, _windows(d, s)]) | {"rope_parameters": _rope(d)},
    "granite": lambda d, s: _granite(d, s) | {"mlp_bias": d([False, True])},
    "smollm3": _smollm3,
    "glm": _glm,
    "glm4": _glm,
    "phi3": _phi3,
    "cohere": _cohere,
    "cohere2": lambda d, s: _cohere(d, s) | _windows(d, s),
    "seed_oss": lambda d, s: {
        "head_dim": d([8, 16]),
        "attention_bias": True,
        "attention_out_bias": d([False, True]),
        "mlp_bias": d([False, True]),
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "nemotron": _nemotron,
    "ernie4_5": lambda d, s: {"head_dim": d([8, 16])},
    "hunyuan_v1_dense": lambda d, s: {"head_dim": d([8, 16]), "attention_bias": d([False, True])},
    "mixtral": lambda d, s: _experts(d, "num_local_experts") | {"sliding_window": d([None, 7])},
    "qwen2_moe": lambda d, s: _sparse(d, s) | {"shared_expert_intermediate_size": 28, "qkv_bias": d([False, True])},
    "qwen3_moe": lambda d, s: _sparse(d, s) | {"head_dim": d([8, 16]), "attention_bias": d([False, True])},
    "olmoe": lambda d, s: _experts(d) | {"norm_topk_prob": d([False, True])},
    "granitemoe": lambda d, s: _granite(d, s) | _experts(d, "num_local_experts"),
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "qwen3_next": lambda d, s: _qwen3_5(d, s) | _sparse(d, s) | _gated_experts(d),
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": lambda d, s: _qwen3_5(d, s) | _gated_experts(d),
    "mimo_v2_flash": _mimo,
    "laguna": _laguna,
    "gemma4_text": _gemma4,
    "llama4_text": _llama4,
}
"""Family -> what a drawn configuration says beside the sizes."""
assert set(DRAWN) == set(FAMILIES) == set(CLASSES)


def draw_config(family: str, draw: Draw) -> PreTrainedConfig:
    """Return a random configuration of transformers' class for `family`."""
    sizes = _sizes(draw, family)
    kind = CONFIG_MAPPING["deepseek_v3" if family == "kimi_k2" else family]
    config: PreTrainedConfig = kind(**sizes | DRAWN[family](draw, sizes))
    return config


def random_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """Return the model with random weights, biases and norms, so that leaving one out shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or name.endswith("embed_scale"):
                continue
            if name.endswith("conv1d.weight"):
                weight.normal_()
            elif config.model_type == "gemma4_text" and name.endswith("q_norm.weight"):
                weight.normal_(mean=0.3, std=0.1)  # nothing else keeps its scores small
            elif name.endswith(
                "linear_attn.norm.weight"
            ):  # it makes results alike that are nearly 0, with their rounding
                weight.normal_(std=0.1)
            elif weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            elif weight.dim() > 2 or "router" in name or "mlp.gate." in name or "block_sparse_moe" in name:
                weight.normal_(std=0.2)
    return model.eval()


def family_entry(family: str) -> Family:
    """Return our entry of the family."""
    return CLASSES[family]
