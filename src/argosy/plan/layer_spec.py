"""A layer of the decoder as data, derived from `ModelConfig`: what differs from layer to layer.

The table of parameters, attention, its cache, the cost model and `simulate` read it layer by layer. What all layers
share (width, norms, multipliers) they read from the config.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.attention import DeltaNetConfig, RopeScaling
from argosy.config.model import ModelConfig

DELTA_CHUNK = 64
"""Tokens of a chunk in which gated delta-nets compute rows (`models.delta_net`)."""


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding."""

    width: int
    """Numbers of a head that it turns, the first ones."""
    theta: float
    scaling: RopeScaling


@dataclass(frozen=True)
class LayerSpec:
    """The structure of one layer."""

    window: int
    """Tokens that a token sees, itself included; 0: all before it."""
    rope: RopeSpec | None
    """None: queries and keys are not rotated."""
    heads: int
    kv_heads: int
    head_width: int
    """Width of a query or key head; with latent attention, of its rotated part."""
    has_experts: bool
    delta_net: DeltaNetConfig | None = None
    """The gated delta-net that it has in place of attention; None: attention."""

    def seen(self, tokens: int) -> int:
        """Return how many keys and values a cache holds after `tokens` tokens."""
        if self.delta_net is not None:  # its state does not grow
            return 0
        return min(tokens, self.window) if self.window else tokens

    def mean_seen(self, seq_len: int) -> float:
        """Return the tokens that a token attends to, on average over a sequence: half of it without a window."""
        window = self.seen(seq_len)
        return window - window * window / (2 * seq_len)


def layer_spec(model: ModelConfig, layer: int) -> LayerSpec:
    """Return layer `layer` (from 0) of `model`."""
    attention = model.attention
    kind = attention.layers[layer % len(attention.layers)] if attention.layers else "full"
    is_sliding, is_linear = kind == "sliding", kind == "linear"
    rotates = not attention.rotary_layers or attention.rotary_layers[layer % len(attention.rotary_layers)]
    return LayerSpec(
        window=attention.window if is_sliding else 0,
        rope=_rope(model, is_sliding) if rotates and not is_linear else None,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_width=model.head_width,
        has_experts=model.is_moe_layer(layer),
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


def _rope(model: ModelConfig, is_sliding: bool) -> RopeSpec:
    attention = model.attention
    theta = attention.sliding_rope_theta if is_sliding and attention.sliding_rope_theta else model.rope_theta
    scaling = RopeScaling() if is_sliding and not attention.sliding_rope_scaled else model.rope_scaling
    return RopeSpec(attention.rotary_width or model.head_width, theta, scaling)
