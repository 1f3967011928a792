"""The run file's tables `model.attention`, `model.norms`, `model.mla`, `model.delta_net` and `model.rope_scaling`: the
parts of attention, the places of norms, latent and linear attention, and the stretching of rotary frequencies.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from argosy.config.section import Section

AttentionKind = Literal["full", "sliding", "chunked", "linear"]


class RopeScaling(Section):
    """Stretching of rotary frequencies, so that a model reads longer contexts than it was trained on."""

    kind: Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"] = "none"
    """none; linear: position interpolation; llama3: as Llama 3.1, by wavelength; yarn: Peng et al. 2023; longrope: a
    divisor for each frequency (Ding et al. 2024; Phi-3.5); proportional: the lowest frequencies are 0 (Gemma 4)."""
    factor: PositiveFloat = 1.0
    """New context length over the original one."""
    original_max_seq_len: PositiveInt = 8192
    """Context length before stretching (llama3, yarn, longrope)."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths longer than original_max_seq_len / this are stretched fully."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths shorter than original_max_seq_len / this stay as they are."""
    beta_fast: PositiveFloat = 32.0
    """yarn: dimensions that turn more often than this over the original context stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """yarn: dimensions that turn less often than this over the original context are stretched fully."""
    truncate: bool = True
    """yarn: the two dimensions at which the ramp begins and ends are whole numbers."""
    attention_factor: NonNegativeFloat = 0.0
    """yarn, longrope: factor on queries and keys; 0 is 0.1 ln(factor) + 1 (yarn), or the root of 1 + ln(factor) /
    ln(original_max_seq_len) (longrope)."""
    short_divisors: tuple[PositiveFloat, ...] = ()
    """longrope: one for each pair that is rotated, of rows (in generation: prompts with what follows) of
    original_max_seq_len tokens or less, however short their documents are."""
    long_divisors: tuple[PositiveFloat, ...] = ()
    """longrope: the same of longer rows."""
    rotated_share: Annotated[PositiveFloat, Field(le=1.0)] = 1.0
    """proportional: the share of the frequencies that are not 0."""

    @model_validator(mode="after")
    def _divisors_fit(self) -> Self:
        both = len(self.short_divisors), len(self.long_divisors)
        if both[0] != both[1] or (self.kind == "longrope") != bool(both[0]):
            raise ValueError(
                f"kind = {self.kind} with {both[0]} short_divisors and {both[1]} long_divisors: longrope needs as many "
                "of each as pairs are rotated, and other kinds take none"
            )
        if self.kind == "longrope" and self.original_max_seq_len == 1:
            raise ValueError("original_max_seq_len = 1 with longrope: it divides by its logarithm; give 2 or more")
        return self


class AttentionConfig(Section):
    """Attention layer by layer: windows, rotary embedding, norms of queries and keys. Lists are repeated."""

    layers: tuple[AttentionKind, ...] = ()
    """Kinds of the layers' attention, e.g. five times sliding, then full (Gemma 3), or three times linear, then full
    (Qwen3-Next; linear is the gated delta-net of model.delta_net); empty: all are full."""
    window: NonNegativeInt = 0
    """sliding: number of tokens that a token sees, itself included. chunked: documents are cut into chunks of this
    many tokens, and a token sees those of its own (Llama 4)."""
    rotary_layers: tuple[bool, ...] = ()
    """By layer: true rotates queries and keys; false is no position at all (NoPE). Empty: all rotate."""
    temperature: NonNegativeFloat = 0.0
    """Queries of layers that do not rotate are multiplied by 1 + temperature ln(1 + floor(n / temperature_floor)), n
    counted from 1 in the document (Llama 4); 0: they are not."""
    temperature_floor: PositiveInt = 8192
    """temperature: as said."""
    heads: tuple[PositiveInt, ...] = ()
    """Query heads of the layers, where they are not all model.heads (Laguna). This and the next three are lists."""
    kv_heads: tuple[PositiveInt, ...] = ()
    """Key/value heads of the layers, where they are not all model.kv_heads (MiMo-V2, Gemma 4)."""
    head_widths: tuple[PositiveInt, ...] = ()
    """Widths of the layers' heads, where they are not all model.head_width (Gemma 4); even numbers."""
    keys_as_values: tuple[bool, ...] = ()
    """Layers whose values are their keys, before norm and rotation: there is no v projection (Gemma 4)."""
    value_width: NonNegativeInt = 0
    """Width of a value head (MiMo-V2); 0: that of a key head."""
    value_norm: bool = False
    """An RMSNorm without weights on each value head (Gemma 4)."""
    value_scale: PositiveFloat = 1.0
    """Factor on values (MiMo-V2)."""
    rotary_width: NonNegativeInt = 0
    """Numbers of a head that are rotated, from the first on; 0: all."""
    sliding_rotary_width: NonNegativeInt = 0
    """sliding: the same of these layers; 0: as the others."""
    sliding_rope_theta: NonNegativeFloat = 0.0
    """sliding: base of the rotary frequencies; 0: rope_theta."""
    sliding_rope_scaled: bool = True
    """sliding: rope_scaling applies to these layers too."""
    norm_over: Literal["head", "all"] = "head"
    """qk_norm: over each head, or over all heads together (OLMo 2)."""
    norm_after_rotary: bool = False
    """qk_norm: after the rotation (Hunyuan), not before it."""
    norm_weights: bool = True
    """qk_norm: false: without weights (Llama 4)."""
    norm_unrotated: bool = True
    """qk_norm: in layers that do not rotate too (false: Llama 4)."""
    scale: NonNegativeFloat = 0.0
    """Factor on scores; 0: one over the root of head_width."""
    softcap: NonNegativeFloat = 0.0
    """Scores are softcap * tanh(scores / softcap) (Gemma 2); 0: as they are."""
    sinks: bool = False
    """A learned score for each head that takes part in the softmax and stands for no token (gpt-oss)."""
    sinks_in_full: bool = True
    """sinks: in layers without a window too; false: in sliding ones alone (MiMo-V2)."""
    gate: bool = False
    """A gate on the result of each head, by a sigmoid of the layer's input (Qwen3-Next)."""
    gate_kind: Literal["sigmoid", "softplus"] = "sigmoid"
    """gate: softplus in place of the sigmoid, from a projection without biases (Laguna)."""
    gate_over: Literal["number", "head"] = "number"
    """gate: one for each number of a head, or one for all of it (Laguna)."""

    @model_validator(mode="after")
    def _windows_fit(self) -> Self:
        windowed = [kind for kind in self.layers if kind in ("sliding", "chunked")]
        if windowed and not self.window:
            raise ValueError(f"layers has {windowed[0]}, and window = 0; set window to the tokens that a layer sees")
        if "chunked" in windowed and (self.softcap or self.sinks):
            raise ValueError("chunked layers are not supported with softcap or sinks; leave these out")
        if self.window and not windowed:
            raise ValueError(f'window = {self.window} has no effect without sliding layers; set layers = ["sliding"]')
        for key in ("rotary_width", "sliding_rotary_width"):
            if getattr(self, key) % 2:
                raise ValueError(f"{key} = {getattr(self, key)} must be even: rotary embedding turns pairs")
        if odd := [width for width in self.head_widths if width % 2]:
            raise ValueError(f"head_widths has {odd[0]}, and each must be even: rotary embedding turns pairs")
        return self

    @model_validator(mode="after")
    def _parts_are_there(self) -> Self:
        if any(self.keys_as_values) and self.value_width:
            raise ValueError(
                f"value_width = {self.value_width} with keys_as_values: values are as wide as keys there; set 0"
            )
        for key, found in (
            ("keys_as_values", any(self.keys_as_values)),
            ("norm_weights = false", not self.norm_weights),
            ("norm_after_rotary = true", self.norm_after_rotary),
        ):
            if found and self.norm_over == "all":
                raise ValueError(f'{key} with norm_over = "all" is not supported; set norm_over = "head"')
        if not self.sinks_in_full and not (self.sinks and "sliding" in self.layers):
            raise ValueError("sinks_in_full = false has no effect without sinks in sliding layers; leave it out")
        if (self.gate_kind, self.gate_over) != ("sigmoid", "number") and not self.gate:
            raise ValueError("gate_kind and gate_over have no effect without gate = true; leave them out")
        return self


class NormConfig(Section):
    """The norms around attention and feed-forward."""

    place: Literal["before", "after", "around", "parallel"] = "before"
    """before: of their inputs; after: of their results (OLMo 2); around: both (Gemma 2); parallel: one norm, whose
    result both take (Cohere)."""
    kind: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    bias: bool = False
    """layer: with a bias."""
    zero_centered: bool = False
    """The factor is one plus the weight (Gemma)."""

    @model_validator(mode="after")
    def _bias_fits(self) -> Self:
        if self.bias and self.kind == "rms":
            raise ValueError('bias = true with kind = "rms": RMSNorm has none; set kind = "layer"')
        return self


class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are kept as one narrow vector a token."""

    kv_rank: NonNegativeInt = 0
    """Width of that vector; 0 is ordinary attention."""
    q_rank: NonNegativeInt = 0
    """Width of the latent that queries are made from; 0 makes them from the hidden state."""
    rope_width: PositiveInt = 64
    """Width of the rotated part of a query or key head; must be even and equal to model.head_width."""
    nope_width: PositiveInt = 128
    """Width of the part that is not rotated."""
    value_width: PositiveInt = 128
    """Width of a value head; at most nope_width + rope_width."""

    @property
    def key_width(self) -> int:
        """Width of one query or key head."""
        return self.nope_width + self.rope_width

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.kv_rank and self.rope_width % 2:
            raise ValueError(f"rope_width = {self.rope_width} must be even: rotary embedding turns pairs")
        if self.kv_rank and self.value_width > self.key_width:
            raise ValueError(
                f"value_width = {self.value_width} is more than nope_width + rope_width = {self.key_width}; "
                f"try {self.key_width} or less"
            )
        return self


class DeltaNetConfig(Section):
    """Gated delta-net (Yang, Kautz & Hatamizadeh 2024): attention of cost linear in the sequence, whose state is one
    matrix a head. Layers whose kind in attention.layers is linear have it."""

    key_heads: NonNegativeInt = 0
    """Query and key heads; 0: no layer is linear."""
    value_heads: NonNegativeInt = 0
    """Value heads, a multiple of key_heads; each has a state of key_width x value_width."""
    key_width: PositiveInt = 128
    """Width of a query or key head."""
    value_width: PositiveInt = 128
    """Width of a value head."""
    conv_width: PositiveInt = 4
    """Tokens, itself included, that the short convolution of queries, keys and values mixes into one."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.key_heads and (not self.value_heads or self.value_heads % self.key_heads):
            raise ValueError(
                f"value_heads = {self.value_heads} is no multiple of key_heads = {self.key_heads}; "
                f"try {max(1, self.value_heads // self.key_heads) * self.key_heads}"
            )
        if self.value_heads and not self.key_heads:
            raise ValueError(f"value_heads = {self.value_heads} with key_heads = 0; give key_heads too")
        return self
