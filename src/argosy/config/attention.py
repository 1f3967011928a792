"""The run file's tables `model.attention`, `model.norms`, `model.mla`, `model.delta_net` and `model.rope_scaling`: the
parts of attention, the places of norms, latent and linear attention, and the stretching of rotary frequencies.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from argosy.config.section import Section

AttentionKind = Literal["full", "sliding", "linear"]


class RopeScaling(Section):
    """Stretching of rotary frequencies, so that a model reads longer contexts than it was trained on."""

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    """none; linear: position interpolation; llama3: as Llama 3.1, by wavelength; yarn: Peng et al. 2023."""
    factor: PositiveFloat = 1.0
    """New context length over the original one."""
    original_max_seq_len: PositiveInt = 8192
    """Context length before stretching (llama3, yarn)."""
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
    """yarn: factor on queries and keys; 0 is 0.1 ln(factor) + 1."""


class AttentionConfig(Section):
    """Attention layer by layer: windows, rotary embedding, norms of queries and keys. Lists are repeated."""

    layers: tuple[AttentionKind, ...] = ()
    """Kinds of the layers' attention, e.g. five times sliding, then full (Gemma 3), or three times linear, then full
    (Qwen3-Next; linear is the gated delta-net of model.delta_net); empty: all are full."""
    window: NonNegativeInt = 0
    """sliding: the last so many tokens that a token sees, itself included."""
    rotary_layers: tuple[bool, ...] = ()
    """By layer: true rotates queries and keys; false is no position at all (NoPE). Empty: all rotate."""
    rotary_width: NonNegativeInt = 0
    """First so many of a head's numbers are rotated; 0: all."""
    sliding_rope_theta: NonNegativeFloat = 0.0
    """sliding: base of the rotary frequencies; 0: rope_theta."""
    sliding_rope_scaled: bool = True
    """sliding: rope_scaling applies to these layers too."""
    norm_over: Literal["head", "all"] = "head"
    """qk_norm: over each head, or over all heads together (OLMo 2)."""
    norm_after_rotary: bool = False
    """qk_norm: after the rotation (Hunyuan), not before it."""
    scale: NonNegativeFloat = 0.0
    """Factor on scores; 0: one over the root of head_width."""
    softcap: NonNegativeFloat = 0.0
    """Scores are softcap * tanh(scores / softcap) (Gemma 2); 0: as they are."""
    sinks: bool = False
    """A learned score for each head that takes part in the softmax and stands for no token (gpt-oss)."""
    gate: bool = False
    """A gate on the result of each head, by a sigmoid of the layer's input (Qwen3-Next)."""

    @model_validator(mode="after")
    def _windows_fit(self) -> Self:
        if "sliding" in self.layers and not self.window:
            raise ValueError("layers has sliding ones and window = 0; give the number of tokens that they see")
        if self.window and "sliding" not in self.layers:
            raise ValueError(f'window = {self.window} has no effect without sliding layers; set layers = ["sliding"]')
        if self.rotary_width % 2:
            raise ValueError(f"rotary_width = {self.rotary_width} must be even: rotary embedding turns pairs")
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
