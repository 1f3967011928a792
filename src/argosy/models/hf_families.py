"""The Hugging Face classes that are known, one entry each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from argosy.errors import UserError
from argosy.models.hf_family import (
    DEEPSEEK_NAMES,
    EXPERT_NAMES,
    MIXTRAL_NAMES,
    Converted,
    Family,
    Fused,
    inverse,
    inverse_square,
    or_none,
)
from argosy.models.own_family import declared_family

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SLIDING, FULL = "sliding_attention", "full_attention"


def every(number: int) -> Callable[[Mapping[str, Any], int], list[str]]:
    """Return the rule by which every so many layers are full, and sliding between."""

    def kinds(given: Mapping[str, Any], layers: int) -> list[str]:
        n = given.get("sliding_window_pattern", number)
        return [SLIDING if (layer + 1) % n else FULL for layer in range(layers)]

    return kinds


def all_sliding(given: Mapping[str, Any], layers: int) -> list[str]:
    """All layers are sliding, if there is a window."""
    return [SLIDING] * layers


def from_the_last(given: Mapping[str, Any], layers: int) -> list[str]:
    """Layers from max_window_layers on are sliding, if windows are used at all."""
    first = given.get("max_window_layers", layers) if given.get("use_sliding_window", True) else layers
    return [SLIDING if layer >= first else FULL for layer in range(layers)]


def none_sliding(given: Mapping[str, Any], layers: int) -> list[str]:
    """No layer is sliding unless it is listed."""
    return [FULL] * layers


POST_NORMS = {
    "blocks.*.attention_post_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}
GEMMA_NAMES = POST_NORMS | {"blocks.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm"}
QKV = Fused(("blocks.*.attention.q", "blocks.*.attention.k", "blocks.*.attention.v"))
GATE_UP = Fused(("blocks.*.mlp.gate", "blocks.*.mlp.up"))
PLAIN_EXPERTS = {"moe.balance": "aux"}
MOE_KEYS = {
    "moe.experts": "n_routed_experts",
    "moe.experts_per_token": "num_experts_per_tok",
    "moe.expert_ffn_width": "moe_intermediate_size",
    "moe.shared_experts": "n_shared_experts",
    "moe.first_dense_layers": "first_k_dense_replace",
    "moe.normalize_weights": "norm_topk_prob",
    "moe.routed_scale": "routed_scaling_factor",
    "moe.groups": "n_group",
    "moe.top_groups": "topk_group",
}
"""As DeepSeek names them."""
SPARSE_KEYS = {
    "moe.experts": "num_experts",
    "moe.experts_per_token": "num_experts_per_tok",
    "moe.expert_ffn_width": "moe_intermediate_size",
    "moe.normalize_weights": "norm_topk_prob",
    "moe.aux_coefficient": "router_aux_loss_coef",
    "moe.every": "decoder_sparse_step",
}
"""As Qwen names them."""
GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
}
GRANITE_DEFAULTS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "max_position_embeddings": 2048,
}


def root_of_width(given: Mapping[str, Any]) -> float:
    """Gemma's factor on embeddings."""
    return float(given["hidden_size"] ** 0.5)


GEMMA = Family(
    "GemmaForCausalLM",
    fixed={"activation": "gelu_tanh", "norms.zero_centered": True},
    derived={"embedding_scale": root_of_width},
    defaults={"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True},
    hidden_act="gelu_pytorch_tanh",
)
GEMMA2 = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    fixed=GEMMA.fixed | {"norms.place": "around"},
    converted={
        "attention.scale": inverse_square("query_pre_attn_scalar"),
        "attention.softcap": or_none("attn_logit_softcapping"),
        "logit_softcap": or_none("final_logit_softcapping"),
    },
    defaults=GEMMA.defaults
    | {
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
    names=GEMMA_NAMES,
    act_key="hidden_activation",
    windows=every(2),
)
OLMO2 = Family(
    "Olmo2ForCausalLM",
    fixed={"norms.place": "after", "qk_norm": True, "attention.norm_over": "all"},
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    names=POST_NORMS,
)
GRANITE_FAMILY = Family(
    "GraniteForCausalLM",
    keys=GRANITE | {"ffn_bias": "mlp_bias"},
    converted={"logit_scale": inverse("logits_scaling")},
    defaults=GRANITE_DEFAULTS,
)
GLM = Family(
    "GlmForCausalLM",
    keys={"qkv_bias": "attention_bias"},
    fixed={"attention_bias": False},
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "rms_norm_eps": 1.5625e-07,
    },
    fused={"model.layers.*.mlp.gate_up_proj": GATE_UP},
    rotary="pairs",
    partial=0.5,
)
COHERE = Family(
    "CohereForCausalLM",
    keys={"norm_eps": "layer_norm_eps", "logit_scale": "logit_scale"},
    fixed={"norms.place": "parallel", "norms.kind": "layer"},
    constants={"use_qk_norm": False},
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    rotary="pairs",
)
QWEN2_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    keys=MOE_KEYS
    | {
        "mla.kv_rank": "kv_lora_rank",
        "mla.rope_width": "qk_rope_head_dim",
        "mla.nope_width": "qk_nope_head_dim",
        "mla.value_width": "v_head_dim",
    },
    converted={"mla.q_rank": Converted("q_lora_rank", lambda value: value or 0, lambda value: value or None)},
    # The class uses this epsilon for the norms of latents, whatever config.json says.
    fixed={"moe.router": "sigmoid", "moe.balance": "bias", "norm_eps": 1e-6},
    constants={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-6,
    },
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    names=EXPERT_NAMES | DEEPSEEK_NAMES,
    aliases={"num_local_experts": "n_routed_experts"},
    needs=("moe.experts", "mla.kv_rank", "moe.shared_experts"),
    # A module that predicts a second token, stored as one more layer; like transformers, we ignore it.
    skipped="model.layers.{layers}.",
    rotary="pairs",
)
FAMILIES = {
    "llama": Family("LlamaForCausalLM", keys={"ffn_bias": "mlp_bias"}, defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        "MistralForCausalLM",
        defaults={"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
        fixed={"attention_bias": False},
        windows=all_sliding,
        lists_layers=False,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        fixed={"qkv_bias": True, "attention_bias": False},
        constants={"attention_bias": False},
        defaults=QWEN2_DEFAULTS,
        own_split=QWEN2_SPLIT,
        windows=from_the_last,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        fixed={"qk_norm": True},
        defaults=QWEN2_DEFAULTS | {"head_dim": 128},
        windows=from_the_last,
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": replace(
        GEMMA2,
        architecture="Gemma3ForCausalLM",
        fixed=GEMMA2.fixed | {"qk_norm": True},
        converted={n: form for n, form in GEMMA2.converted.items() if n != "attention.softcap"},
        constants={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        defaults={n: value for n, value in GEMMA2.defaults.items() if n != "attn_logit_softcapping"}
        | {
            "max_position_embeddings": 131_072,
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
        },
        windows=every(6),
        sliding_theta=10_000.0,
        nests_rope=True,
    ),
    "olmo2": OLMO2,
    "olmo3": replace(
        OLMO2,
        architecture="Olmo3ForCausalLM",
        defaults=OLMO2.defaults | {"sliding_window": 4096, "rope_theta": 500_000.0},
        windows=every(4),
        nests_rope=True,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        fixed={"norms.place": "after", "qk_norm": True, "attention_bias": False},
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        names=POST_NORMS,
        windows=every(4),
        rotates="sliding if any",
    ),
    "granite": GRANITE_FAMILY,
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        keys={"ffn_bias": "mlp_bias"},
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
        },
        windows=none_sliding,
        rotates="listed",
    ),
    "glm": GLM,
    "glm4": replace(
        GLM,
        architecture="Glm4ForCausalLM",
        fixed=GLM.fixed | {"norms.place": "around"},
        names={
            "blocks.*.attention_post_norm": "model.layers.*.post_self_attn_layernorm",
            "blocks.*.mlp_post_norm": "model.layers.*.post_mlp_layernorm",
        },
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        fixed={"attention_bias": False},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        fused={"model.layers.*.self_attn.qkv_proj": QKV, "model.layers.*.mlp.gate_up_proj": GATE_UP},
        partial=1.0,
        windows=all_sliding,
        lists_layers=False,
    ),
    "cohere": COHERE,
    "cohere2": replace(
        COHERE,
        architecture="Cohere2ForCausalLM",
        constants={},
        defaults=COHERE.defaults | {"rope_theta": 10_000.0, "sliding_window": 4096},
        windows=every(4),
        rotates="sliding",
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        keys={"qkv_bias": "attention_bias", "ffn_bias": "mlp_bias", "attention_bias": "attention_out_bias"},
        defaults={
            "max_position_embeddings": 524_288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
        },
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        keys={"ffn_bias": "mlp_bias"},
        fixed={"ffn_gate": False, "activation": "relu2"},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        hidden_act="relu2",
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        keys={"ffn_bias": "mlp_bias", "norm_eps": "norm_eps"},
        fixed={
            "ffn_gate": False,
            "activation": "relu2",
            "norms.kind": "layer",
            "norms.bias": True,
            "norms.zero_centered": True,
        },
        defaults={"max_position_embeddings": 4096, "norm_eps": 1e-5, "initializer_range": 0.0134},
        hidden_act="relu2",
        partial=0.5,
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        fixed={"attention_bias": False},
        constants={"use_bias": False},
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        rotary="pairs",
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        fixed={"qk_norm": True, "attention.norm_after_rotary": True},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        names={
            "blocks.*.attention.q_norm": "model.layers.*.self_attn.query_layernorm",
            "blocks.*.attention.k_norm": "model.layers.*.self_attn.key_layernorm",
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        keys={
            "moe.experts": "num_local_experts",
            "moe.experts_per_token": "num_experts_per_tok",
            "moe.expert_ffn_width": "intermediate_size",
            "moe.aux_coefficient": "router_aux_loss_coef",
        },
        fixed=PLAIN_EXPERTS | {"attention_bias": False},
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        names=MIXTRAL_NAMES,
        aliases={"num_experts": "num_local_experts"},
        needs=("moe.experts",),
        windows=all_sliding,
        lists_layers=False,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        keys=SPARSE_KEYS | {"qkv_bias": "qkv_bias", "moe.shared_ffn_width": "shared_expert_intermediate_size"},
        fixed=PLAIN_EXPERTS | {"moe.shared_experts": 1, "moe.shared_gate": True, "attention_bias": False},
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
            "qkv_bias": True,
            "use_sliding_window": False,
        },
        names=EXPERT_NAMES
        | {
            "blocks.*.mlp.shared.gate": "model.layers.*.mlp.shared_expert.gate_proj",
            "blocks.*.mlp.shared.up": "model.layers.*.mlp.shared_expert.up_proj",
            "blocks.*.mlp.shared.down": "model.layers.*.mlp.shared_expert.down_proj",
            "blocks.*.mlp.shared_gate": "model.layers.*.mlp.shared_expert_gate",
        },
        aliases={"num_local_experts": "num_experts"},
        needs=("moe.experts",),
        windows=none_sliding,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        keys=SPARSE_KEYS,
        fixed=PLAIN_EXPERTS | {"qk_norm": True},
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
        },
        names=EXPERT_NAMES,
        aliases={"num_local_experts": "num_experts"},
        needs=("moe.experts",),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        keys={
            "moe.experts": "num_experts",
            "moe.experts_per_token": "num_experts_per_tok",
            "moe.expert_ffn_width": "intermediate_size",
            "moe.normalize_weights": "norm_topk_prob",
            "moe.aux_coefficient": "router_aux_loss_coef",
        },
        fixed=PLAIN_EXPERTS | {"qk_norm": True, "attention.norm_over": "all"},
        constants={"clip_qkv": None},
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
        },
        names=EXPERT_NAMES,
        aliases={"num_local_experts": "num_experts"},
        needs=("moe.experts",),
    ),
    "granitemoe": replace(
        GRANITE_FAMILY,
        architecture="GraniteMoeForCausalLM",
        keys=GRANITE
        | {
            "moe.experts": "num_local_experts",
            "moe.experts_per_token": "num_experts_per_tok",
            "moe.expert_ffn_width": "intermediate_size",
            "moe.aux_coefficient": "router_aux_loss_coef",
        },
        fixed=PLAIN_EXPERTS,
        defaults=GRANITE_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        names={
            "blocks.*.mlp.router": "model.layers.*.block_sparse_moe.router.layer",
            "blocks.*.mlp.experts.down": "model.layers.*.block_sparse_moe.output_linear.weight",
        },
        fused={
            "model.layers.*.block_sparse_moe.input_linear.weight": Fused(
                ("blocks.*.mlp.experts.gate", "blocks.*.mlp.experts.up"), "expert_rows"
            )
        },
        needs=("moe.experts",),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        keys={
            "moe.experts": "num_local_experts",
            "moe.experts_per_token": "num_experts_per_tok",
            "moe.expert_ffn_width": "intermediate_size",
            "moe.aux_coefficient": "router_aux_loss_coef",
            "ffn_limit": "swiglu_limit",
        },
        fixed=PLAIN_EXPERTS
        | {
            "attention.sinks": True,
            "activation": "clamped_swiglu",
            "moe.router_bias": True,
            "moe.expert_bias": True,
        },
        constants={"swiglu_alpha": 1.702},
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "router_aux_loss_coef": 0.001,
            "swiglu_limit": 7.0,
            "sliding_window": 128,
        },
        names={
            "blocks.*.attention.sinks": "model.layers.*.self_attn.sinks",
            "blocks.*.mlp.router": "model.layers.*.mlp.router",
            "blocks.*.mlp.router.logit_bias": "model.layers.*.mlp.router.bias",
            "blocks.*.mlp.experts.down_bias": "model.layers.*.mlp.experts.down_proj_bias",
        },
        fused={
            "model.layers.*.mlp.experts.gate_up_proj": Fused(
                ("blocks.*.mlp.experts.gate", "blocks.*.mlp.experts.up"), "interleaved"
            ),
            "model.layers.*.mlp.experts.gate_up_proj_bias": Fused(
                ("blocks.*.mlp.experts.gate_bias", "blocks.*.mlp.experts.up_bias"), "interleaved"
            ),
            "model.layers.*.mlp.experts.down_proj": Fused(("blocks.*.mlp.experts.down",), "interleaved"),
        },
        aliases={"num_experts": "num_local_experts"},
        needs=("moe.experts",),
        windows=every(2),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        keys=MOE_KEYS | {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        fixed={"moe.router": "sigmoid", "moe.balance": "bias", "attention_bias": False},
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": False,
            "rms_norm_eps": 1e-5,
        },
        names=EXPERT_NAMES | {n: t for n, t in DEEPSEEK_NAMES.items() if ".mlp." in n},
        aliases={"num_local_experts": "n_routed_experts"},
        needs=("moe.experts", "moe.shared_experts"),
        skipped="model.layers.{layers}.",
        partial=0.5,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        keys=MOE_KEYS,
        fixed={"moe.router": "sigmoid", "moe.balance": "bias", "qk_norm": True},
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        names=EXPERT_NAMES | {n: t for n, t in DEEPSEEK_NAMES.items() if ".mlp." in n},
        aliases={"num_local_experts": "n_routed_experts"},
        needs=("moe.experts", "moe.shared_experts"),
        windows=from_the_last,
    ),
    "deepseek_v2": replace(
        DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        fixed={"moe.balance": "aux", "norm_eps": 1e-6, "moe.group_score": "best", "moe.normalize_weights": False},
        keys={
            k: v
            for k, v in DEEPSEEK_V3.keys.items()
            if k not in ("moe.normalize_weights", "moe.groups", "moe.top_groups")
        },
        converted=DEEPSEEK_V3.converted
        | {
            "moe.groups": Converted("n_group", lambda value: value or 1, lambda value: value),
            "moe.top_groups": Converted("topk_group", lambda value: value or 1, lambda value: value),
        },
        constants={
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
            "rms_norm_eps": 1e-6,
            "mlp_bias": False,
        },
        defaults=DEEPSEEK_V3.defaults
        | {
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
        },
        skipped="",
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
}
"""`ModelConfig.family`, which is also the `model_type` of config.json -> the class."""


def family_of(name: str) -> Family:
    """Return the class of a family, also of the user's. Raises: UserError if it names none, or is not known here."""
    if name in FAMILIES:
        return FAMILIES[name]
    facts = declared_family(name).facts
    if not facts["architecture"]:
        raise UserError(
            f"model.family = {name!r} names no class of transformers, so there is nothing to export it as. Add "
            "architecture and hidden_act to its @extend.family."
        )
    return Family(facts["architecture"], fixed={"ffn_gate": facts["gated"]}, hidden_act=facts["hidden_act"])
