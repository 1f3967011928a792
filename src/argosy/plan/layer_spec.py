"""A layer of the decoder as data, derived from `ModelConfig`: what differs from layer to layer.

The table of parameters, attention, its cache, the cost model and `simulate` read it layer by layer. What all layers
share (width, norms, multipliers) they read from the config.

Rules, the search and the cost model read the sizes in which layers may differ all together (`head_counts`,
`dense_widths`, `mean_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from argosy.config.attention import DeltaNetConfig, RopeScaling
from argosy.config.model import ModelConfig, repeated

DELTA_CHUNK = 64
"""Tokens of a chunk in which gated delta-nets compute rows (`models.delta_net`)."""
CHUNK_LOGITS = 8 * 2**20
"""Logits that the loss computes at once (32 MiB in fp32): enough for full-speed matmuls, few enough for caches."""
LEAST_CHUNK_ROWS = {"cpu": 256, "accelerator": 4096}
"""Tokens that it computes at once at least, by kind of device, whatever the vocabulary. Each chunk reads the head's
weight twice and adds to its gradient: 16 bytes a weight, for 6 FLOPs a weight and token. Where a device does 200 FLOPs
in the time of a byte, so much traffic takes as long as 500 tokens."""
FROZEN_CHUNK_ROWS = 512
"""Tokens at most, in their place, where the head is frozen: 4 bytes a weight, for 4 FLOPs a weight and token."""
MOST_EVERY = 8
"""Largest value of `recompute_every` for which the planner looks which layers are recomputed."""


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
    """True if the layer computes values; False: they are its keys, before norm and rotation."""
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


@lru_cache(256)
def head_counts(model: ModelConfig) -> dict[tuple[int, int], int]:
    """Return the different numbers of query and key/value heads of layers, each with the first layer that has it."""
    found: dict[tuple[int, int], int] = {}
    for layer in range(max(model.all_layers, 1)):
        spec = layer_spec(model, layer)
        if spec.delta_net is None or not found:
            found.setdefault((spec.heads, spec.kv_heads), layer)
    return found


@lru_cache(256)
def dense_widths(model: ModelConfig) -> dict[int, int]:
    """Return the different widths of feed-forwards, each with the first layer that has it. Experts' are not among
    them."""
    found: dict[int, int] = {}
    for layer in range(max(model.all_layers, 1)):
        if not model.is_moe_layer(layer):
            found.setdefault(repeated(model.ffn_widths, layer, model.ffn_width), layer)
    return found


def tensor_parts(model: ModelConfig) -> int:
    """Return the largest number of ranks that all layers' query heads and feed-forwards can be dealt out to."""
    return math.gcd(*(heads for heads, _ in head_counts(model)), *dense_widths(model))


def names_of_heads(model: ModelConfig, heads: int, kv_heads: int) -> tuple[str, str]:
    """Return what messages call these numbers of heads: their keys and, if layers differ, the first such layer."""
    layer, attention = head_counts(model)[heads, kv_heads], model.attention
    where = f" (layer {layer})" if len(head_counts(model)) > 1 else ""
    keys = (f"model.{'attention.' * bool(getattr(attention, key))}{key}" for key in ("heads", "kv_heads"))
    named = [f"{key} = {number}{where}" for key, number in zip(keys, (heads, kv_heads), strict=True)]
    return named[0], named[1]


def passed_over(model: ModelConfig) -> tuple[tuple[float, float, float], ...]:
    """Return for each n of MOST_EVERY: n, and the shares of layers with experts, and with a delta-net, among those
    whose number is no multiple of n, which `recompute_every` = n passes over; where all layers have other shares."""
    specs = [layer_spec(model, layer) for layer in range(max(model.all_layers, 1))]
    unlike = [(float(spec.has_experts), float(spec.delta_net is not None)) for spec in specs]
    if len(set(unlike)) < 2:
        return ()

    def shares(some: list[tuple[float, float]]) -> tuple[float, float]:
        experts, deltas = map(sum, zip(*some, strict=True))
        return experts / len(some), deltas / len(some)

    some = {n: [one for layer, one in enumerate(unlike) if layer % n] for n in range(2, MOST_EVERY + 1)}
    return tuple((float(n), *shares(ones)) for n, ones in some.items() if ones and shares(ones) != shares(unlike))


def mean_sizes(model: ModelConfig, seq_len: int) -> dict[str, Any]:
    """Return the sizes in which layers may differ, as means of such a kind that products of them are the mean
    products: of queries, results, scores and cached bytes; and key/value heads by groups of layers, if they differ.
    """
    latent, mla = bool(model.mla.kv_rank), model.mla
    layers = [*range(model.layers), *range(model.layers, max(model.all_layers, 1))]
    specs = [layer_spec(model, layer) for layer in layers]
    some = [spec for spec in specs if spec.delta_net is None] or specs

    def mean(figure: Callable[[LayerSpec], float]) -> float:
        return sum(map(figure, some)) / len(some)

    def key(spec: LayerSpec) -> int:
        return mla.key_width if latent else spec.head_width

    def value(spec: LayerSpec) -> int:
        return mla.value_width if latent else spec.value_width

    def normed(spec: LayerSpec) -> int:
        if spec.delta_net is not None:
            return 0
        of_values = model.attention.value_norm * spec.kv_heads * value(spec)
        of_keys = spec.has_qk_norm * (spec.heads + spec.kv_heads) * key(spec)
        return mla.q_rank + mla.kv_rank if latent else of_keys + of_values

    heads, kv_heads = mean(lambda spec: spec.heads), mean(lambda spec: spec.kv_heads)
    kv_numbers = mean(lambda spec: spec.kv_heads * (key(spec) + value(spec)))
    scores = sum(spec.mean_seen(seq_len) * spec.heads * (key(spec) + value(spec)) for spec in specs)
    cached = sum(spec.seen(seq_len) * spec.kv_heads * (key(spec) + value(spec)) for spec in specs)
    groups = []
    for heads_of_group in sorted({spec.kv_heads for spec in some}):
        group = [spec for spec in some if spec.kv_heads == heads_of_group]
        numbers = [heads_of_group * (key(spec) + value(spec)) for spec in group]
        of_cache = sum(n * spec.seen(seq_len) for n, spec in zip(numbers, group, strict=True))
        groups.append(
            (float(heads_of_group), sum(numbers) / len(some) / kv_numbers, of_cache / cached if cached else 0.0)
        )
    dense = [spec.ffn_width for spec in specs if not spec.has_experts] or [model.ffn_width]
    key_width, value_width = mean(lambda s: s.heads * key(s)) / heads, mean(lambda s: s.heads * value(s)) / heads
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "key_width": key_width,
        "value_width": value_width,
        "kv_width": kv_numbers / kv_heads,
        "kv_groups": tuple(groups) if len(groups) > 1 else (),
        "unprojected": mean(lambda spec: 0 if spec.has_values else spec.kv_heads * value(spec)),
        "normed": sum(map(normed, specs)) / len(specs),
        "core_width": mean(lambda s: (s.heads + s.kv_heads) * max(key(s), value(s))) / (heads + kv_heads),
        "attention_span": scores / len(specs) / (heads * (key_width + value_width)),
        "cached_share": cached / len(specs) / kv_numbers / seq_len,
        "ffn_width": sum(dense) / len(dense),
        "widest_ffn": max(dense),
    }
