"""The Hugging Face classes of mixtures of experts that are known, one entry each."""

from __future__ import annotations

from dataclasses import replace

from argosy.models.hf_dense import GRANITE, GRANITE_DEFAULTS, GRANITE_FAMILY
from argosy.models.hf_family import (
    DEEPSEEK_NAMES,
    EXPERT_NAMES,
    EXPERTS_UP,
    FURTHER,
    FURTHER_COPIES,
    FURTHER_NAMES,
    MIXTRAL_NAMES,
    Converted,
    Family,
    FusedTensor,
    all_sliding,
    every,
    from_the_last,
    none_sliding,
)

SHARED_NAMES = {
    "blocks.*.mlp.shared.gate": "model.layers.*.mlp.shared_expert.gate_proj",
    "blocks.*.mlp.shared.up": "model.layers.*.mlp.shared_expert.up_proj",
    "blocks.*.mlp.shared.down": "model.layers.*.mlp.shared_expert.down_proj",
    "blocks.*.mlp.shared_gate": "model.layers.*.mlp.shared_expert_gate",
}
DEEPSEEK_EXPERT_NAMES = {n: t for n, t in DEEPSEEK_NAMES.items() if ".mlp." in n}
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
"""Keys of experts as DeepSeek names them."""
MIXTRAL_KEYS = {
    "moe.experts": "num_local_experts",
    "moe.experts_per_token": "num_experts_per_tok",
    "moe.expert_ffn_width": "intermediate_size",
    "moe.aux_coefficient": "router_aux_loss_coef",
}
SPARSE_KEYS = {
    "moe.experts": "num_experts",
    "moe.experts_per_token": "num_experts_per_tok",
    "moe.expert_ffn_width": "moe_intermediate_size",
    "moe.normalize_weights": "norm_topk_prob",
    "moe.aux_coefficient": "router_aux_loss_coef",
    "moe.every": "decoder_sparse_step",
}
"""Keys of experts as Qwen names them."""
DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    keys=MOE_KEYS
    | {
        "mla.kv_rank": "kv_lora_rank",
        "mla.rope_width": "qk_rope_head_dim",
        "mla.nope_width": "qk_nope_head_dim",
        "mla.value_width": "v_head_dim",
    },
    converted={
        "mla.q_rank": Converted("q_lora_rank", lambda value: value or 0, lambda value: value or None),
        "mtp.modules": FURTHER,
    },
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
    names=EXPERT_NAMES | DEEPSEEK_NAMES | FURTHER_NAMES,
    aliases={"num_local_experts": "n_routed_experts"},
    needs=("mla.kv_rank", "moe.shared_experts"),
    copies=FURTHER_COPIES,
    rotary="pairs",
)
MIXTURES = {
    "mixtral": Family(
        "MixtralForCausalLM",
        keys=MIXTRAL_KEYS,
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
        names=EXPERT_NAMES | SHARED_NAMES,
        aliases={"num_local_experts": "num_experts"},
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
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        keys=MIXTRAL_KEYS | {"moe.experts": "num_experts", "moe.normalize_weights": "norm_topk_prob"},
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
    ),
    "granitemoe": replace(
        GRANITE_FAMILY,
        architecture="GraniteMoeForCausalLM",
        keys=GRANITE | MIXTRAL_KEYS,
        fixed=PLAIN_EXPERTS,
        defaults=GRANITE_DEFAULTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        names={
            "blocks.*.mlp.router": "model.layers.*.block_sparse_moe.router.layer",
            "blocks.*.mlp.experts.down": "model.layers.*.block_sparse_moe.output_linear.weight",
        },
        fused={
            "model.layers.*.block_sparse_moe.input_linear.weight": FusedTensor(EXPERTS_UP, "expert_rows"),
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        keys=MIXTRAL_KEYS | {"ffn_limit": "swiglu_limit"},
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
            "model.layers.*.mlp.experts.gate_up_proj": FusedTensor(EXPERTS_UP, "interleaved"),
            "model.layers.*.mlp.experts.gate_up_proj_bias": FusedTensor(
                ("blocks.*.mlp.experts.gate_bias", "blocks.*.mlp.experts.up_bias"), "interleaved"
            ),
            "model.layers.*.mlp.experts.down_proj": FusedTensor(("blocks.*.mlp.experts.down",), "interleaved"),
        },
        aliases={"num_experts": "num_local_experts"},
        windows=every(2),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        keys=MOE_KEYS | {"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        converted={"mtp.modules": FURTHER},
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
        names=EXPERT_NAMES | DEEPSEEK_EXPERT_NAMES | FURTHER_NAMES,
        aliases={"num_local_experts": "n_routed_experts"},
        needs=("moe.shared_experts",),
        copies=FURTHER_COPIES,
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
        names=EXPERT_NAMES | DEEPSEEK_EXPERT_NAMES,
        aliases={"num_local_experts": "n_routed_experts"},
        needs=("moe.shared_experts",),
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
        converted={
            "mla.q_rank": DEEPSEEK_V3.converted["mla.q_rank"],
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
        # It has none for num_experts_per_tok.
        defaults={k: v for k, v in DEEPSEEK_V3.defaults.items() if k != "num_experts_per_tok"}
        | {
            "norm_topk_prob": False,
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
        copies={},
    ),
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
}
