"""A Hugging Face class in our terms, as data: keys of config.json, the settings that it implies, names of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

from argosy.config.attention import AttentionKind
from argosy.config.model import ModelConfig

CONFIG_KEYS = {
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

CONFIG_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10_000.0,
}
"""The values that transformers takes for keys missing in config.json. Sizes without a default must be there."""

TENSOR_NAMES = {
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
    "score": "score",
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

FURTHER_NAMES = {
    "mtp.*.embedding_norm": "model.layers.*.enorm",
    "mtp.*.hidden_norm": "model.layers.*.hnorm",
    "mtp.*.projection": "model.layers.*.eh_proj",
    "mtp.*.norm": "model.layers.*.shared_head.norm",
}
"""Modules of multi-token prediction as DeepSeek stores them: each is one more layer after the last."""
FURTHER_COPIES = {
    "embedding.weight": "model.layers.*.embed_tokens.weight",
    "head.weight": "model.layers.*.shared_head.head.weight",
}
"""Weights of the model that are stored again with each of these modules."""


@dataclass(frozen=True)
class FusedTensor:
    """Weights of ours that are one tensor of theirs."""

    ours: tuple[str, ...]
    """Modules, or whole names of weights."""
    kind: Literal["rows", "expert_rows", "expert_columns", "head_rows", "interleaved"] = "rows"
    """rows: one below the other; expert_rows: so in each expert; expert_columns: the same, transposed; head_rows: so in
    each head; interleaved: in each expert in turns, transposed."""
    heads: str = ""
    """head_rows: the field of `ModelConfig` that is their number."""


@dataclass(frozen=True)
class Converted:
    """A key of config.json that has another form than our field."""

    key: str
    read: Callable[[Any], Any]
    """None stands for null, which is not the same as a missing key."""
    write: Callable[[Any], Any]


def or_none(key: str) -> Converted:
    """Return the conversion of a number whose 0 they write as null."""
    return Converted(key, lambda value: value or 0.0, lambda value: value or None)


def inverse(key: str) -> Converted:
    """Return the conversion of a factor that they divide by."""
    return Converted(key, lambda value: 1 / (value or 1.0), lambda value: _whole(1 / value))


def inverse_square(key: str) -> Converted:
    """Return the conversion of a factor that they give as one over its square."""
    return Converted(key, lambda value: (value or 1) ** -0.5, lambda value: _whole(value**-2) if value else None)


def _whole(value: float) -> float:
    """Return the value that was meant, if rounding left it beside a whole number."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value


@dataclass(frozen=True)
class Family:
    """One Hugging Face class."""

    architecture: str
    keys: dict[str, str] = field(default_factory=dict)
    """Keys in addition to `CONFIG_KEYS`."""
    converted: dict[str, Converted] = field(default_factory=dict)
    """Fields of `ModelConfig` whose key has another form."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Fields of `ModelConfig` without a key in the class -> the value that the class implies."""
    derived: dict[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Fields that follow from several keys."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json without a field of ours -> the only value that we can compute, or a tuple of some."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults in addition to `CONFIG_DEFAULTS`."""
    names: dict[str, str] = field(default_factory=dict)
    """Names in addition to `TENSOR_NAMES`."""
    fused: dict[str, FusedTensor] = field(default_factory=dict)
    """Their module or weight -> what of ours is in it."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Keys of other versions -> the key in `keys`."""
    needs: tuple[str, ...] = ()
    """Fields that may not be 0, beside the number of experts if the class has a key for it."""
    skipped: str = ""
    """Weights that are ignored on import, by how their names begin."""
    copies: dict[str, str] = field(default_factory=dict)
    """Our weight -> their name of the copy that each module of multi-token prediction (*) has of it."""
    hidden_act: str = "silu"
    act_key: str = "hidden_act"
    text_split: str = ""
    """Pattern that `AutoTokenizer` of transformers splits text by, whatever tokenizer.json says; empty: it obeys."""
    rotary: Literal["halves", "pairs"] = "halves"
    """pairs: the two numbers that a rotation turns lie side by side."""
    partial: float | None = None
    """Share of a head that is rotated, if config.json does not say it; None: always all."""
    by_layer: Callable[[Mapping[str, Any], Sequence[str]], dict[str, Any]] | None = None
    """Keys and kinds of layers, in their words -> fields that follow from both."""
    written: Callable[[ModelConfig], dict[str, Any]] | None = None
    """Keys that follow from several fields, or have a value for each layer."""
    window_kind: Literal["sliding", "chunked"] = "sliding"
    windows: Callable[[Mapping[str, Any], int], list[str]] | None = None
    """Keys and number of layers -> kinds of layers where config.json has no layer_types; None: no windows."""
    lists_layers: bool = True
    """config.json has layer_types."""
    rotates: Literal["all", "sliding", "sliding if any", "listed"] = "all"
    """The layers that have positions; listed: no_rope_layers says it."""
    sliding_theta: float = 0.0
    """Base of sliding layers if config.json does not say it, where they have one of their own."""
    stretches_base: bool = False
    """A rotary embedding called dynamic that has an alpha is none: alpha stretches the base, whatever the length."""
    ropes: tuple[str, ...] = ()
    """The kinds of `RopeScaling` that the class takes; empty: all."""
    nests_rope: bool = False
    """Full and sliding layers have their own rotary embedding."""
    rope_of_pictures: tuple[str, ...] = ()
    """Keys of the rotary embedding that change nothing for text."""

    @property
    def has_experts(self) -> bool:
        return "moe.experts" in self.keys

    @property
    def window_key(self) -> str:
        """The key of the tokens that a window has."""
        return "sliding_window" if self.window_kind == "sliding" else "attention_chunk_size"

    @property
    def kinds(self) -> dict[str, AttentionKind]:
        """The kinds of layers that the class knows, in its words -> in ours."""
        between: dict[str, AttentionKind] = {}
        if "delta_net.key_heads" in self.keys:
            between[LINEAR_ATTENTION] = "linear"
        elif self.windows is not None:
            between[f"{self.window_kind}_attention"] = self.window_kind
        return {FULL_ATTENTION: "full", **between}


EXPERTS_UP = ("blocks.*.mlp.experts.gate", "blocks.*.mlp.experts.up")
"""The matrices that lead into experts, which most classes keep in one tensor."""
FURTHER = Converted("num_nextn_predict_layers", lambda value: value or 0, lambda value: value)
"""The number of modules of multi-token prediction."""


def value_of(config: ModelConfig, field: str) -> Any:
    """Return the value of a dotted field, e.g. "moe.experts"."""
    return reduce(getattr, field.split("."), config)


SLIDING_ATTENTION, CHUNKED_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION = (
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "full_attention",
)


def every(number: int) -> Callable[[Mapping[str, Any], int], list[str]]:
    """Return the rule by which every so many layers are full, and sliding between."""

    def kinds(given: Mapping[str, Any], layers: int) -> list[str]:
        n = given.get("sliding_window_pattern", number)
        return [SLIDING_ATTENTION if (layer + 1) % n else FULL_ATTENTION for layer in range(layers)]

    return kinds


def linear_between(given: Mapping[str, Any], layers: int) -> list[str]:
    """Every so many layers are full, and linear between."""
    n = given["full_attention_interval"]
    return [LINEAR_ATTENTION if (layer + 1) % n else FULL_ATTENTION for layer in range(layers)]


def all_sliding(given: Mapping[str, Any], layers: int) -> list[str]:
    """All layers are sliding, if there is a window."""
    return [SLIDING_ATTENTION] * layers


def from_the_last(given: Mapping[str, Any], layers: int) -> list[str]:
    """Layers from max_window_layers on are sliding, if windows are used at all."""
    first = given.get("max_window_layers", layers) if given.get("use_sliding_window", True) else layers
    return [SLIDING_ATTENTION if layer >= first else FULL_ATTENTION for layer in range(layers)]


def none_sliding(given: Mapping[str, Any], layers: int) -> list[str]:
    """No layer is sliding unless it is listed."""
    return [FULL_ATTENTION] * layers
