"""A layer of the decoder as data, derived from `ModelConfig`: what differs from layer to layer.

The table of parameters, attention, its cache, the cost model and `simulate` read it layer by layer. What all layers
share (width, norms, multipliers) they read from the config.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from argosy.config.attention import DeltaNetConfig, RopeScaling
from argosy.config.model import ModelConfig, repeated

DELTA_CHUNK = 64
"""Tokens of a chunk in which gated delta-nets compute rows (`models.delta_net`)."""


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding."""

    width: int
    """Numbers of a head that it turns, the first ones."""
    theta: float
    scaling: RopeScaling
    is_long: bool = False
    """longrope: rows are longer than the context before stretching."""

    def of_rows(self, seq_len: int) -> RopeSpec:
        """Return the one for rows of `seq_len` tokens."""
        is_long = self.scaling.kind == "longrope" and seq_len > self.scaling.original_max_seq_len
        return replace(self, is_long=True) if is_long else self


@dataclass(frozen=True)
class TemperatureSpec:
    """A factor on queries that grows with their place: 1 + scale ln(1 + floor((place + 1) / floor))."""

    scale: float
    floor: int

    def of_rows(self, seq_len: int) -> TemperatureSpec:
        """Return the one for rows of `seq_len` tokens: the same for all."""
        return self


@dataclass(frozen=True)
class LayerSpec:
    """The structure of one layer."""

    window: int
    """Tokens that a token sees, itself included; 0: all before it."""
    is_chunked: bool
    """The window does not slide: documents are cut into pieces of so many tokens."""
    places: RopeSpec | TemperatureSpec | None
    """The use of tokens' places in queries and keys; None: there is none."""
    has_qk_norm: bool
    heads: int
    kv_heads: int
    head_width: int
    """Width of a query or key head; with latent attention, of its rotated part."""
    value_width: int
    """Width of a value head."""
    has_values: bool
    """It computes values; False: they are its keys, before norm and rotation."""
    has_sinks: bool
    ffn_width: int
    """Hidden width of its feed-forward; 0 if it has experts."""
    has_experts: bool
    delta_net: DeltaNetConfig | None = None
    """The gated delta-net that it has in place of attention; None: attention."""

    @property
    def core_width(self) -> int:
        """Width of queries, keys and values where scores are computed: narrower ones are filled with zeros."""
        return max(self.head_width, self.value_width)

    def seen(self, tokens: int) -> int:
        """Return how many keys and values a cache holds after `tokens` tokens."""
        if self.delta_net is not None:  # its state does not grow
            return 0
        return min(tokens, self.window) if self.window else tokens

    def mean_seen(self, seq_len: int) -> float:
        """Return the tokens that a token attends to, on average over a sequence: half of it without a window."""
        window = self.seen(seq_len)
        if self.is_chunked:
            rest = seq_len % window
            return ((seq_len - rest) * window + rest * rest) / (2 * seq_len)
        return window - window * window / (2 * seq_len)


def layer_spec(model: ModelConfig, layer: int) -> LayerSpec:
    """Return layer `layer` (from 0) of `model`."""
    attention = model.attention
    kind = repeated(attention.layers, layer, "full")
    is_sliding, is_linear = kind == "sliding", kind == "linear"
    rotates = not is_linear and repeated(attention.rotary_layers, layer, True)
    heads, kv_heads = model.heads_of(layer)
    width = repeated(attention.head_widths, layer, model.head_width)
    has_experts = model.is_moe_layer(layer)
    return LayerSpec(
        window=attention.window if kind in ("sliding", "chunked") else 0,
        is_chunked=kind == "chunked",
        places=_rope(model, is_sliding, width) if rotates else None if is_linear else _temperature(model),
        has_qk_norm=model.qk_norm and not is_linear and (rotates or attention.norm_unrotated),
        heads=heads,
        kv_heads=kv_heads,
        head_width=width,
        value_width=attention.value_width or width,
        has_values=not repeated(attention.keys_as_values, layer, False),
        has_sinks=attention.sinks and (is_sliding or attention.sinks_in_full),
        ffn_width=0 if has_experts else repeated(model.ffn_widths, layer, model.ffn_width),
        has_experts=has_experts,
        delta_net=model.delta_net if is_linear else None,
    )


def layer_kinds(model: ModelConfig) -> dict[LayerSpec, list[int]]:
    """Return the different layers of `model`, in the order in which they first come, with their numbers."""
    found: dict[LayerSpec, list[int]] = {}
    for layer in range(model.layers):
        found.setdefault(layer_spec(model, layer), []).append(layer)
    return found


def halo_tokens(rank: int, ranks: int, chunk: int, window: int) -> int:
    """Return how many tokens other ranks of a context-parallel group send to `rank` for a row of a layer with a window.

    A rank has the chunks rank and 2 ranks - 1 - rank, of `chunk` tokens each; what is before them is sent.
    """
    chunks = (rank, 2 * ranks - 1 - rank)
    before = [(max(0, mine * chunk - (window - 1)), mine * chunk) for mine in chunks]
    own = [(mine * chunk, (mine + 1) * chunk) for mine in chunks]
    overlap = sum(max(0, min(b, d) - max(a, c)) for a, b in before for c, d in own)
    return sum(end - start for start, end in before) - overlap


def _temperature(model: ModelConfig) -> TemperatureSpec | None:
    attention = model.attention
    return TemperatureSpec(attention.temperature, attention.temperature_floor) if attention.temperature else None


def _rope(model: ModelConfig, is_sliding: bool, head_width: int) -> RopeSpec:
    attention = model.attention
    width = (is_sliding and attention.sliding_rotary_width) or attention.rotary_width
    theta = attention.sliding_rope_theta if is_sliding and attention.sliding_rope_theta else model.rope_theta
    scaling = RopeScaling() if is_sliding and not attention.sliding_rope_scaled else model.rope_scaling
    return RopeSpec(width or head_width, theta, scaling)
