"""The Hugging Face classes with gated delta-nets between layers of full attention, one entry each: Qwen3-Next and the
text models of Qwen3.5."""

from __future__ import annotations

from dataclasses import replace

from argosy.models.hf_family import EXPERT_NAMES, Family, Fused, linear_between
from argosy.models.hf_mixtures import PLAIN_EXPERTS, SHARED_NAMES, SPARSE_KEYS

DELTA_KEYS = {
    "delta_net.key_heads": "linear_num_key_heads",
    "delta_net.value_heads": "linear_num_value_heads",
    "delta_net.key_width": "linear_key_head_dim",
    "delta_net.value_width": "linear_value_head_dim",
    "delta_net.conv_width": "linear_conv_kernel_dim",
}
DELTA_NAMES = {
    "blocks.*.attention.decay_log": "model.layers.*.linear_attn.A_log",
    "blocks.*.attention.decay_bias": "model.layers.*.linear_attn.dt_bias",
    "blocks.*.attention.out_norm": "model.layers.*.linear_attn.norm",
    "blocks.*.attention.out": "model.layers.*.linear_attn.out_proj",
}
GATED_ATTENTION = {"qk_norm": True, "attention.gate": True, "norms.zero_centered": True}
FUSED = {
    "model.layers.*.self_attn.q_proj": Fused(
        ("blocks.*.attention.q", "blocks.*.attention.out_gate"), "head_rows", "heads"
    ),
    "model.layers.*.linear_attn.conv1d.weight": Fused(
        ("blocks.*.attention.q_conv", "blocks.*.attention.k_conv", "blocks.*.attention.v_conv")
    ),
}
DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
SHARED_DEFAULTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}
MULTIMODAL = ("mrope_section", "mrope_interleaved")
QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    keys=DELTA_KEYS,
    fixed=GATED_ATTENTION,
    constants={"attn_output_gate": True, "output_gate_type": "swish"},
    defaults=DEFAULTS | {"num_key_value_heads": 4},
    names=DELTA_NAMES
    | {
        "blocks.*.attention.gate_in": "model.layers.*.linear_attn.in_proj_z",
        "blocks.*.attention.beta_in": "model.layers.*.linear_attn.in_proj_b",
        "blocks.*.attention.decay_in": "model.layers.*.linear_attn.in_proj_a",
    },
    fused=FUSED
    | {
        "model.layers.*.linear_attn.in_proj_qkv": Fused(
            ("blocks.*.attention.q_in", "blocks.*.attention.k_in", "blocks.*.attention.v_in")
        )
    },
    # Modules that predict further tokens; like transformers, we ignore them.
    skipped="mtp.",
    partial=0.25,
    windows=linear_between,
    rope_of_pictures=MULTIMODAL,
)
LINEAR_FAMILIES = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        keys=SPARSE_KEYS | DELTA_KEYS | {"moe.shared_ffn_width": "shared_expert_intermediate_size"},
        fixed=PLAIN_EXPERTS | GATED_ATTENTION | {"moe.shared_experts": 1, "moe.shared_gate": True},
        constants={"use_sliding_window": False},
        defaults=DEFAULTS
        | SHARED_DEFAULTS
        | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": (), "intermediate_size": 5632},
        names=EXPERT_NAMES | SHARED_NAMES | DELTA_NAMES,
        fused=FUSED
        | {
            "model.layers.*.linear_attn.in_proj_qkvz": Fused(
                tuple(f"blocks.*.attention.{name}_in" for name in ("q", "k", "v", "gate")),
                "head_rows",
                "delta_net.key_heads",
            ),
            "model.layers.*.linear_attn.in_proj_ba": Fused(
                ("blocks.*.attention.beta_in", "blocks.*.attention.decay_in"), "head_rows", "delta_net.key_heads"
            ),
        },
        aliases={"num_local_experts": "num_experts"},
        needs=("moe.experts",),
        skipped="mtp.",
        partial=0.25,
        windows=linear_between,
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(
        QWEN3_5,
        architecture="Qwen3_5MoeForCausalLM",
        keys=DELTA_KEYS
        | {k: v for k, v in SPARSE_KEYS.items() if k not in ("moe.normalize_weights", "moe.every")}
        | {
            "ffn_width": "moe_intermediate_size",  # no layer is dense
            "moe.shared_ffn_width": "shared_expert_intermediate_size",
        },
        fixed=PLAIN_EXPERTS | GATED_ATTENTION | {"moe.shared_experts": 1, "moe.shared_gate": True},
        defaults=DEFAULTS
        | SHARED_DEFAULTS
        | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": None},  # of dense layers: there are none
        names=QWEN3_5.names | EXPERT_NAMES | SHARED_NAMES,
        aliases={"num_local_experts": "num_experts"},
        needs=("moe.experts",),
    ),
}
