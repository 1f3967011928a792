"""The Hugging Face classes whose layers differ in more than their windows, one entry each: MiMo-V2-Flash, Laguna, the
text models of Gemma 4 without embeddings of their own in layers, and that of Llama 4; and those with gated delta-nets
between layers of full attention: Qwen3-Next and the text models of Qwen3.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from argosy.config.model import ModelConfig, repeated
from argosy.models.hf_dense import GEMMA_NAMES, root_of_width
from argosy.models.hf_family import (
    CHUNKED_ATTENTION,
    DEEPSEEK_NAMES,
    EXPERT_NAMES,
    EXPERTS_UP,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Converted,
    Family,
    FusedTensor,
    linear_between,
    none_sliding,
    or_none,
)
from argosy.models.hf_layers import cycle_of, dense_from
from argosy.models.hf_mixtures import MIXTRAL_KEYS, MOE_KEYS, PLAIN_EXPERTS, SHARED_NAMES, SPARSE_KEYS


def where_they_differ(values: Sequence[Any], usual: Any) -> tuple[Any, ...]:
    """Return the list of the layers' values as we keep it: empty if all are the usual one."""
    return () if set(values) == {usual} else cycle_of(values)


def first_and_sixth_full(given: Mapping[str, Any], layers: int) -> list[str]:
    """The first layer and each sixth are full, and sliding between."""
    return [FULL_ATTENTION if layer == 0 or (layer + 1) % 6 == 0 else SLIDING_ATTENTION for layer in range(layers)]


def fifth_sliding_last_full(given: Mapping[str, Any], layers: int) -> list[str]:
    """Each sixth layer and the last are full, and sliding between."""
    return [
        FULL_ATTENTION if layer == layers - 1 or (layer + 1) % 6 == 0 else SLIDING_ATTENTION for layer in range(layers)
    ]


def chunked_where_rotated(given: Mapping[str, Any], layers: int) -> list[str]:
    """Layers with positions have chunks."""
    interval = given["no_rope_layer_interval"]
    rotates = given.get("no_rope_layers") or [(layer + 1) % interval for layer in range(layers)]
    return [CHUNKED_ATTENTION if flag else FULL_ATTENTION for flag in rotates]


def mimo_layers(given: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Sliding layers have sinks, and twice the key/value heads of full ones."""
    usual = given["num_key_value_heads"]
    sinks = {"attention.sinks": True, "attention.sinks_in_full": False} if SLIDING_ATTENTION in kinds else {}
    return {
        "attention.kv_heads": where_they_differ([usual * (1 + (k == SLIDING_ATTENTION)) for k in kinds], usual),
        **sinks,
    }


def laguna_layers(given: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Each layer says its query heads. Raises: ValueError."""
    usual = given["num_attention_heads"]
    heads = given["num_attention_heads_per_layer"] or [usual] * len(kinds)
    if len(heads) != len(kinds):
        raise ValueError(f"num_attention_heads_per_layer has {len(heads)} entries for {len(kinds)} layers")
    return {"attention.heads": where_they_differ(heads, usual)}


def gemma4_layers(given: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Full layers have wider heads, maybe fewer of keys, whose values may be the keys. Raises: ValueError."""
    if kinds[-1] != FULL_ATTENTION:
        raise ValueError(f"layer_types ends with {kinds[-1]}, and transformers makes the last layer {FULL_ATTENTION}")
    shares, of_full = given["attention_k_eq_v"], {"head_dim": given["global_head_dim"]}
    if shares and given["num_global_key_value_heads"]:
        of_full["num_key_value_heads"] = given["num_global_key_value_heads"]
    own = given.get("per_layer_config")
    if own is None:
        own = {str(layer): of_full for layer, kind in enumerate(kinds) if kind == FULL_ATTENTION}
    if unknown := set(own) - {str(layer) for layer in range(len(kinds))}:
        raise ValueError(f"per_layer_config has layer {unknown.pop()}, and there are {len(kinds)}")

    def each(key: str) -> list[int]:
        return [own.get(str(layer), {}).get(key) or given[key] for layer in range(len(kinds))]

    return {
        "attention.head_widths": where_they_differ(each("head_dim"), given["head_dim"]),
        "attention.kv_heads": where_they_differ(each("num_key_value_heads"), given["num_key_value_heads"]),
        "attention.keys_as_values": where_they_differ([bool(shares) and k == FULL_ATTENTION for k in kinds], False),
    }


def gemma4_written(config: ModelConfig) -> dict[str, Any]:
    """Return what `gemma4_layers` reads."""
    attention = config.attention
    own = {}
    for layer in range(config.layers):
        width, kv_heads = repeated(attention.head_widths, layer, config.head_width), config.heads_of(layer)[1]
        of_layer = {"head_dim": width} if width != config.head_width else {}
        of_layer |= {"num_key_value_heads": kv_heads} if kv_heads != config.kv_heads else {}
        if of_layer:
            own[str(layer)] = of_layer
    return {"attention_k_eq_v": any(attention.keys_as_values), "per_layer_config": own}


def llama4_layers(given: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Experts in every so many layers, or in those listed; a temperature, if it is turned on. Raises: ValueError."""
    step, layers = given["interleave_moe_layer_step"], len(kinds)
    in_turn = list(range(step - 1, layers, step))
    sparse = in_turn if given["moe_layers"] is None else sorted(set(given["moe_layers"]))
    if not sparse or sparse[-1] >= layers:
        raise ValueError(f"moe_layers = {given['moe_layers']} names none of the {layers} layers, or one beyond them")
    dense = dense_from([layer for layer in range(layers) if layer not in sparse])
    return {
        "attention.temperature": given["attn_scale"] if given["attn_temperature_tuning"] else 0.0,
        **({"moe.every": step} if sparse == in_turn else dense),
    }


def llama4_written(config: ModelConfig) -> dict[str, Any]:
    """Return what `llama4_layers` reads."""
    temperature = config.attention.temperature
    return {
        "interleave_moe_layer_step": config.moe.every,
        "moe_layers": [layer for layer in range(config.layers) if config.is_moe_layer(layer)],
        "attn_temperature_tuning": temperature > 0,
        "attn_scale": temperature or 0.1,
    }


UNEVEN_FAMILIES = {
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        keys={k: v for k, v in MOE_KEYS.items() if k not in ("moe.shared_experts", "moe.first_dense_layers")}
        | {"attention.value_width": "v_head_dim", "qkv_bias": "attention_bias"},
        converted={
            "attention.value_scale": Converted("attention_value_scale", lambda value: value or 1.0, lambda value: value)
        },
        fixed={"moe.router": "sigmoid", "moe.balance": "bias", "attention_bias": False},
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
                "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334},
            },
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_routed_experts": 256,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "head_dim": 192,
            "v_head_dim": 128,
            "attention_value_scale": 0.707,
            "sliding_window": 129,
            "mlp_layer_types": None,
        },
        names=EXPERT_NAMES
        | {
            "blocks.*.mlp.router.bias": DEEPSEEK_NAMES["blocks.*.mlp.router.bias"],
            "blocks.*.attention.sinks": "model.layers.*.self_attn.attention_sink_bias",
        },
        aliases={"num_local_experts": "n_routed_experts"},
        skipped="model.mtp.",
        partial=0.334,
        windows=first_and_sixth_full,
        nests_rope=True,
        by_layer=mimo_layers,
    ),
    "laguna": Family(
        "LagunaForCausalLM",
        keys={k: v for k, v in SPARSE_KEYS.items() if k not in ("moe.normalize_weights", "moe.every")}
        | {"moe.routed_scale": "moe_routed_scaling_factor", "moe.shared_ffn_width": "shared_expert_intermediate_size"},
        converted={
            "attention.gate_over": Converted(
                "gating",
                lambda value: "head" if value in (None, True, "per-head") else "number",
                lambda value: True if value == "head" else "per-element",
            )
        },
        fixed={
            "moe.router": "sigmoid",
            "moe.balance": "bias",
            "moe.shared_experts": 1,
            "qk_norm": True,
            "attention.gate": True,
            "attention.gate_kind": "softplus",
        },
        constants={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0},
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 512,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
            "router_aux_loss_coef": 0.001,
            "gating": True,
            "num_attention_heads_per_layer": None,
            "mlp_layer_types": None,
            "moe_routed_scaling_factor": 1.0,
        },
        names=EXPERT_NAMES
        | {n: t for n, t in SHARED_NAMES.items() if ".shared." in n}
        | {
            "blocks.*.attention.out_gate": "model.layers.*.self_attn.g_proj",
            "blocks.*.mlp.router.bias": "model.layers.*.mlp.experts.e_score_correction_bias",
        },
        aliases={"num_local_experts": "num_experts"},
        partial=1.0,
        windows=none_sliding,
        nests_rope=True,
        by_layer=laguna_layers,
        written=lambda config: {
            "num_attention_heads_per_layer": [config.heads_of(layer)[0] for layer in range(config.layers)]
        },
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        converted={"logit_softcap": or_none("final_logit_softcapping")},
        fixed={
            "activation": "gelu_tanh",
            "norms.place": "around",
            "qk_norm": True,
            "attention.scale": 1.0,
            "attention.value_norm": True,
            "layer_scale": True,
        },
        derived={"embedding_scale": root_of_width},
        constants={
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "use_bidirectional_attention": (None, "vision"),  # the latter is of pictures alone
        },
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "final_logit_softcapping": None,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "attention_k_eq_v": False,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "per_layer_config": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_theta": 1e4},
            },
        },
        names=GEMMA_NAMES | {"blocks.*.layer_scale": "model.layers.*.layer_scalar"},
        hidden_act="gelu_pytorch_tanh",
        act_key="hidden_activation",
        windows=fifth_sliding_last_full,
        nests_rope=True,
        by_layer=gemma4_layers,
        written=gemma4_written,
    ),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        keys=MIXTRAL_KEYS
        | {
            "ffn_width": "intermediate_size_mlp",
            "qk_norm": "use_qk_norm",
            "attention.temperature_floor": "floor_scale",
        },
        fixed=PLAIN_EXPERTS
        | {
            "moe.router": "sigmoid",
            "moe.normalize_weights": False,
            "moe.weigh": "inputs",
            "moe.shared_experts": 1,
            "attention.norm_after_rotary": True,
            "attention.norm_weights": False,
            "attention.norm_unrotated": False,
        },
        defaults={
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "router_aux_loss_coef": 0.001,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        names={f"blocks.*.mlp.{n}": f"model.layers.*.feed_forward.{n}_proj" for n in ("gate", "up", "down")}
        | {"blocks.*.mlp.router": "model.layers.*.feed_forward.router"}
        | {n: t.replace(".mlp.", ".feed_forward.") for n, t in SHARED_NAMES.items() if ".shared." in n},
        fused={
            "model.layers.*.feed_forward.experts.gate_up_proj": FusedTensor(EXPERTS_UP, "expert_columns"),
            "model.layers.*.feed_forward.experts.down_proj": FusedTensor(
                ("blocks.*.mlp.experts.down",), "expert_columns"
            ),
        },
        aliases={"num_experts": "num_local_experts"},
        rotary="pairs",
        window_kind="chunked",
        windows=chunked_where_rotated,
        rotates="listed",
        by_layer=llama4_layers,
        written=llama4_written,
    ),
}


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
FUSED_QKV = {
    "model.layers.*.self_attn.q_proj": FusedTensor(
        ("blocks.*.attention.q", "blocks.*.attention.out_gate"), "head_rows", "heads"
    ),
    "model.layers.*.linear_attn.conv1d.weight": FusedTensor(
        ("blocks.*.attention.q_conv", "blocks.*.attention.k_conv", "blocks.*.attention.v_conv")
    ),
}
QWEN3_NEXT_DEFAULTS = {
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
    defaults=QWEN3_NEXT_DEFAULTS | {"num_key_value_heads": 4},
    names=DELTA_NAMES
    | {
        "blocks.*.attention.gate_in": "model.layers.*.linear_attn.in_proj_z",
        "blocks.*.attention.beta_in": "model.layers.*.linear_attn.in_proj_b",
        "blocks.*.attention.decay_in": "model.layers.*.linear_attn.in_proj_a",
    },
    fused=FUSED_QKV
    | {
        "model.layers.*.linear_attn.in_proj_qkv": FusedTensor(
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
        defaults=QWEN3_NEXT_DEFAULTS
        | SHARED_DEFAULTS
        | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": (), "intermediate_size": 5632},
        names=EXPERT_NAMES | SHARED_NAMES | DELTA_NAMES,
        fused=FUSED_QKV
        | {
            "model.layers.*.linear_attn.in_proj_qkvz": FusedTensor(
                tuple(f"blocks.*.attention.{name}_in" for name in ("q", "k", "v", "gate")),
                "head_rows",
                "delta_net.key_heads",
            ),
            "model.layers.*.linear_attn.in_proj_ba": FusedTensor(
                ("blocks.*.attention.beta_in", "blocks.*.attention.decay_in"), "head_rows", "delta_net.key_heads"
            ),
        },
        aliases={"num_local_experts": "num_experts"},
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
        defaults=QWEN3_NEXT_DEFAULTS
        | SHARED_DEFAULTS
        | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": None},  # of dense layers: there are none
        names=QWEN3_5.names | EXPERT_NAMES | SHARED_NAMES,
        aliases={"num_local_experts": "num_experts"},
    ),
}
