"""The Hugging Face classes in our terms: keys of config.json, the settings that a class implies, names of weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.models.own_family import declared_family

KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "ffn_width": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Field of `ModelConfig` -> the key of config.json that has the same value."""

DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10_000.0,
}
"""The values that transformers takes for keys missing in config.json. Sizes without a default must be there."""

NAMES = {
    "embedding": "model.embed_tokens",
    "blocks.*.attention_norm": "model.layers.*.input_layernorm",
    "blocks.*.attention.q": "model.layers.*.self_attn.q_proj",
    "blocks.*.attention.k": "model.layers.*.self_attn.k_proj",
    "blocks.*.attention.v": "model.layers.*.self_attn.v_proj",
    "blocks.*.attention.o": "model.layers.*.self_attn.o_proj",
    "blocks.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "blocks.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "blocks.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "blocks.*.mlp.up": "model.layers.*.mlp.up_proj",
    "blocks.*.mlp.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
"""Our module or weight -> theirs. * is the block's number; # is an expert's, whose weights we keep in stacks."""

MIXTRAL_NAMES = {
    "blocks.*.mlp.router": "model.layers.*.block_sparse_moe.gate",
    "blocks.*.mlp.experts.gate": "model.layers.*.block_sparse_moe.experts.#.w1.weight",
    "blocks.*.mlp.experts.down": "model.layers.*.block_sparse_moe.experts.#.w2.weight",
    "blocks.*.mlp.experts.up": "model.layers.*.block_sparse_moe.experts.#.w3.weight",
}
EXPERT_NAMES = {
    "blocks.*.mlp.router": "model.layers.*.mlp.gate",
    "blocks.*.mlp.experts.gate": "model.layers.*.mlp.experts.#.gate_proj.weight",
    "blocks.*.mlp.experts.up": "model.layers.*.mlp.experts.#.up_proj.weight",
    "blocks.*.mlp.experts.down": "model.layers.*.mlp.experts.#.down_proj.weight",
}
DEEPSEEK_NAMES = {
    "blocks.*.mlp.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "blocks.*.mlp.shared.gate": "model.layers.*.mlp.shared_experts.gate_proj",
    "blocks.*.mlp.shared.up": "model.layers.*.mlp.shared_experts.up_proj",
    "blocks.*.mlp.shared.down": "model.layers.*.mlp.shared_experts.down_proj",
    "blocks.*.attention.q_down": "model.layers.*.self_attn.q_a_proj",
    "blocks.*.attention.q_norm": "model.layers.*.self_attn.q_a_layernorm",
    "blocks.*.attention.q_up": "model.layers.*.self_attn.q_b_proj",
    "blocks.*.attention.kv_down": "model.layers.*.self_attn.kv_a_proj_with_mqa",
    "blocks.*.attention.kv_norm": "model.layers.*.self_attn.kv_a_layernorm",
    "blocks.*.attention.kv_up": "model.layers.*.self_attn.kv_b_proj",
}
MTP_NAMES = "model.layers.{layers}."
"""DeepSeek-V3 stores a module that predicts a second token as one more layer; like transformers, we ignore it."""


@dataclass(frozen=True)
class Family:
    """One Hugging Face class."""

    architecture: str
    keys: dict[str, str] = field(default_factory=dict)
    """In addition to `KEYS`."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` without a key in the class -> the value that the class implies."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json without a field of ours -> the only value that we can compute."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """In addition to `DEFAULTS`."""
    names: dict[str, str] = field(default_factory=dict)
    """In addition to `NAMES`."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Keys of other versions -> the key in `keys`."""
    hidden_act: str = "silu"
    own_split: str = ""
    """Pattern that `AutoTokenizer` of transformers splits text by, whatever tokenizer.json says; empty: it obeys."""


QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

DENSE = {"qkv_bias": False, "mla.kv_rank": 0, "moe.experts": 0}
PLAIN_EXPERTS = {
    "qkv_bias": False,
    "mla.kv_rank": 0,
    "moe.router": "softmax",
    "moe.routed_scale": 1.0,
    "moe.shared_experts": 0,
    "moe.groups": 1,
    "moe.top_groups": 1,
    "moe.balance": "aux",
}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", fixed=DENSE, defaults={"max_position_embeddings": 2048}),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        fixed=DENSE | {"qkv_bias": True, "attention_bias": False},
        constants={"attention_bias": False},
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
        own_split=QWEN2_SPLIT,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        fixed=DENSE,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        keys={
            "moe.experts": "num_local_experts",
            "moe.experts_per_token": "num_experts_per_tok",
            "moe.expert_ffn_width": "intermediate_size",
            "moe.aux_coefficient": "router_aux_loss_coef",
        },
        fixed=PLAIN_EXPERTS | {"attention_bias": False, "moe.first_dense_layers": 0, "moe.normalize_weights": True},
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
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        keys={
            "moe.experts": "num_experts",
            "moe.experts_per_token": "num_experts_per_tok",
            "moe.expert_ffn_width": "moe_intermediate_size",
            "moe.normalize_weights": "norm_topk_prob",
            "moe.aux_coefficient": "router_aux_loss_coef",
        },
        fixed=PLAIN_EXPERTS,
        constants={"decoder_sparse_step": 1},
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
        },
        names=EXPERT_NAMES,
        aliases={"num_local_experts": "num_experts"},
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        keys={
            "moe.experts": "n_routed_experts",
            "moe.experts_per_token": "num_experts_per_tok",
            "moe.expert_ffn_width": "moe_intermediate_size",
            "moe.shared_experts": "n_shared_experts",
            "moe.first_dense_layers": "first_k_dense_replace",
            "moe.normalize_weights": "norm_topk_prob",
            "moe.routed_scale": "routed_scaling_factor",
            "moe.groups": "n_group",
            "moe.top_groups": "topk_group",
            "mla.kv_rank": "kv_lora_rank",
            "mla.rope_width": "qk_rope_head_dim",
            "mla.nope_width": "qk_nope_head_dim",
            "mla.value_width": "v_head_dim",
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
        names=EXPERT_NAMES | DEEPSEEK_NAMES,
        aliases={"num_local_experts": "n_routed_experts"},
    ),
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
    return Family(facts["architecture"], fixed=DENSE | {"ffn_gate": facts["gated"]}, hidden_act=facts["hidden_act"])


def value_of(config: ModelConfig, field: str) -> Any:
    """Return the value of a dotted field, e.g. "moe.experts"."""
    return reduce(getattr, field.split("."), config)


def their_names(name: str, config: ModelConfig) -> list[str]:
    """Return their name of our weight; for a stack of experts, the names of its slices.

    `blocks.3.attention.q.weight` -> [`model.layers.3.self_attn.q_proj.weight`].
    """
    names = NAMES | family_of(config.family).names
    block = name.split(".")[1] if name.startswith("blocks.") else ""
    pattern = name.replace(f".{block}.", ".*.", 1) if block else name
    if pattern in names:
        theirs = names[pattern].replace("*", block)
        return [theirs.replace("#", str(expert)) for expert in range(config.moe.experts)] if "#" in theirs else [theirs]
    module, _, kind = pattern.rpartition(".")
    return [f"{names[module].replace('*', block)}.{kind}"]


def to_theirs(name: str, weight: Tensor, config: ModelConfig) -> list[Tensor]:
    """Return the tensors of `their_names(name)`. They share memory with `weight` where they can."""
    order = _rotary_order(name, config)
    weight = weight if order is None else weight[order.argsort()]
    return list(weight.unbind()) if is_stack(name) else [weight]


def to_ours(name: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
    """Return our weight, from the tensors of `their_names(name)`."""
    order = _rotary_order(name, config)
    weight = torch.stack(parts) if is_stack(name) else parts[0]
    return weight if order is None else weight[order]


def is_stack(name: str) -> bool:
    """Return True if the weight is a stack of experts', which they store one by one."""
    return ".experts." in name


def _rotary_order(name: str, config: ModelConfig) -> Tensor | None:
    """Return the places of our rows of a DeepSeek weight among theirs; None if the order is the same.

    They keep the two rows of a rotary pair side by side; we keep them in two halves. This concerns queries and keys.
    """
    mla, module = config.mla, name.rpartition(".")[0].rpartition(".")[2]
    if not mla.kv_rank or module not in ("q", "q_up", "kv_down"):
        return None
    halves = torch.cat((torch.arange(0, mla.rope_width, 2), torch.arange(1, mla.rope_width, 2)))
    if module == "kv_down":
        return torch.cat((torch.arange(mla.kv_rank), mla.kv_rank + halves))
    head = torch.cat((torch.arange(mla.nope_width), mla.nope_width + halves))
    return (torch.arange(config.heads)[:, None] * mla.key_width + head).flatten()
