"""The Hugging Face classes of dense decoders that are known, one entry each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from argosy.models.hf_family import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Family,
    FusedTensor,
    all_sliding,
    every,
    from_the_last,
    inverse,
    inverse_square,
    none_sliding,
    or_none,
)

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

POST_NORMS = {
    "blocks.*.attention_post_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.mlp_post_norm": "model.layers.*.post_feedforward_layernorm",
}
GEMMA_NAMES = POST_NORMS | {"blocks.*.mlp_norm": "model.layers.*.pre_feedforward_layernorm"}
QKV = FusedTensor(("blocks.*.attention.q", "blocks.*.attention.k", "blocks.*.attention.v"))
GATE_UP = FusedTensor(("blocks.*.mlp.gate", "blocks.*.mlp.up"))
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
DENSE_FAMILIES = {
    "llama": Family("LlamaForCausalLM", keys={"ffn_bias": "mlp_bias"}, defaults={"max_position_embeddings": 2048}),
    "cwm": Family(
        "CwmForCausalLM",
        fixed={"attention_bias": False},
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": 8192,
        },
        windows=lambda given, layers: [SLIDING_ATTENTION if layer % 4 else FULL_ATTENTION for layer in range(layers)],
    ),
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
        text_split=QWEN2_SPLIT,
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
        constants={"full_attn_mod": 1, "interpolate_factor": 1},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        fused={"model.layers.*.self_attn.qkv_proj": QKV, "model.layers.*.mlp.gate_up_proj": GATE_UP},
        partial=1.0,
        windows=all_sliding,
        lists_layers=False,
        ropes=("none", "longrope"),
    ),
    "cohere": COHERE,
    "cohere2": replace(
        COHERE,
        architecture="Cohere2ForCausalLM",
        constants={
            "rotary_pct": 1.0,
            "position_embedding_type": "rope_gptj",
            "order_of_interleaved_layers": "local_attn_first",
            "use_gated_activation": True,
            "use_parallel_block": True,
        },
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
        stretches_base=True,
    ),
}
