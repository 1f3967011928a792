"""Layers as data: each follows from the config, and what differs between layers is found."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.config.model import ModelConfig
from argosy.plan.layer_spec import (
    LayerSpec,
    RopeSpec,
    TemperatureSpec,
    dense_widths,
    head_counts,
    layer_kinds,
    layer_spec,
    mean_sizes,
    names_of_heads,
    tensor_parts,
)

SIZES = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "ffn_width": 64, "vocab_size": 64}


def model(**more: Any) -> ModelConfig:
    return ModelConfig.model_validate(SIZES | more)


def windowed(**more: Any) -> ModelConfig:
    """Three layers with a window of 6, and one without, in turns."""
    return model(attention={"layers": ["sliding", "sliding", "sliding", "full"], "window": 6, **more})


def seen_by(spec: LayerSpec, tokens: int) -> float:
    """Return the mean, over a row, of what lies between a token's middle and where what it sees begins."""
    within = [at % spec.window if spec.is_chunked else at for at in range(tokens)]
    return sum(min(place + 0.5, spec.window or tokens) for place in within) / tokens


@pytest.mark.parametrize(("kind", "window"), [("full", 0), ("sliding", 6), ("chunked", 6)])
def test_the_mean_of_seen_tokens_is_that_of_a_count(kind, window):
    spec = layer_spec(model(attention={"layers": [kind], "window": window}), 0)
    assert (spec.window, spec.is_chunked) == (window, kind == "chunked")
    assert spec.mean_seen(20) == pytest.approx(seen_by(spec, 20))
    assert spec.seen(3) == 3 and spec.seen(20) == (window or 20)


def test_layers_that_are_alike_are_one_kind():
    kinds = layer_kinds(windowed())
    assert list(kinds.values()) == [[0, 1, 2], [3]]
    assert [spec.window for spec in kinds] == [6, 0]
    assert list(layer_kinds(model()).values()) == [[0, 1, 2, 3]]


def test_only_sliding_layers_have_the_base_of_their_own():
    config = windowed(sliding_rope_theta=100.0, sliding_rotary_width=4)
    sliding, full = layer_spec(config, 0).places, layer_spec(config, 3).places
    assert isinstance(sliding, RopeSpec) and isinstance(full, RopeSpec)
    assert (sliding.theta, sliding.width) == (100.0, 4) and (full.theta, full.width) == (config.rope_theta, 8)


def test_a_layer_without_rotation_may_have_a_temperature():
    config = model(attention={"rotary_layers": [True, False], "temperature": 0.1, "temperature_floor": 64})
    assert isinstance(layer_spec(config, 0).places, RopeSpec)
    assert layer_spec(config, 1).places == TemperatureSpec(0.1, 64)
    assert TemperatureSpec(0.1, 64).of_rows(4096) == TemperatureSpec(0.1, 64)


def test_sizes_that_differ_are_named_with_their_first_layer():
    config = model(attention={"heads": [4, 8], "kv_heads": [2, 2]}, ffn_widths=[64, 96])
    assert head_counts(config) == {(4, 2): 0, (8, 2): 1}
    assert dense_widths(config) == {64: 0, 96: 1}
    assert tensor_parts(config) == 4
    assert tensor_parts(model(heads=6, kv_heads=6, moe={"experts": 4})) == 6, "no layer has a feed-forward of ffn_width"
    assert names_of_heads(config, 8, 2)[0] == "model.attention.heads = 8 (layer 1)"
    assert names_of_heads(model(), 4, 2) == ("model.heads = 4", "model.kv_heads = 2")


def test_means_are_the_sizes_where_layers_are_alike():
    sizes = mean_sizes(model(), 64)
    assert (sizes["heads"], sizes["kv_heads"], sizes["key_width"], sizes["value_width"]) == (4, 2, 8, 8)
    assert sizes["kv_groups"] == () and sizes["cached_share"] == 1.0 and sizes["attention_span"] == 32.0
    assert (sizes["ffn_width"], sizes["widest_ffn"]) == (64, 64)


def test_windows_make_the_cache_and_the_span_smaller():
    sizes = mean_sizes(windowed(), 64)
    assert sizes["cached_share"] == pytest.approx((3 * 6 + 64) / (4 * 64))
    assert sizes["attention_span"] == pytest.approx((3 * (6 - 36 / 128) + 32) / 4)
