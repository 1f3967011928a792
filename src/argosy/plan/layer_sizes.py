"""The sizes in which layers may differ, for what reads them all together: rules, the search, and the cost model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from argosy.config.model import ModelConfig, repeated
from argosy.plan.layer_spec import LayerSpec, layer_spec


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
    return found or {model.ffn_width: 0}


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
        "core_width": mean(lambda s: (s.heads + s.kv_heads) * max(key(s), value(s))) / (heads + kv_heads),
        "attention_span": scores / len(specs) / (heads * (key_width + value_width)),
        "cached_share": cached / len(specs) / kv_numbers / seq_len,
        "ffn_width": sum(dense) / len(dense),
        "widest_ffn": max(dense),
    }
