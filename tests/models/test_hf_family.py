"""Rules of Hugging Face classes about layers, and values that have another form there."""

from __future__ import annotations

import pytest

from argosy.config.model import ModelConfig
from argosy.models.hf_family import (
    Family,
    all_sliding,
    every,
    from_the_last,
    inverse,
    inverse_square,
    linear_between,
    none_sliding,
    or_none,
    value_of,
)

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


@pytest.mark.parametrize(
    ("rule", "given", "kinds"),
    [
        (every(2), {}, [SLIDING, FULL, SLIDING, FULL]),
        (every(2), {"sliding_window_pattern": 3}, [SLIDING, SLIDING, FULL, SLIDING]),
        (linear_between, {"full_attention_interval": 4}, [LINEAR, LINEAR, LINEAR, FULL]),
        (all_sliding, {}, [SLIDING] * 4),
        (none_sliding, {}, [FULL] * 4),
        (from_the_last, {"max_window_layers": 3}, [FULL, FULL, FULL, SLIDING]),
        (from_the_last, {"max_window_layers": 3, "use_sliding_window": False}, [FULL] * 4),
        (from_the_last, {}, [FULL] * 4),
    ],
)
def test_layers_that_no_list_names(rule, given, kinds):
    assert rule(given, 4) == kinds


@pytest.mark.parametrize(
    ("converted", "theirs", "ours"),
    [
        (or_none("k"), None, 0.0),
        (or_none("k"), 30.0, 30.0),
        (inverse("k"), 16, 1 / 16),
        (inverse("k"), 3.0, 1 / 3.0),
        (inverse_square("k"), 256, 1 / 16),
        (inverse_square("k"), 3, 3**-0.5),
    ],
)
def test_a_value_of_another_form_goes_both_ways(converted, theirs, ours):
    assert converted.read(theirs) == ours
    assert converted.write(converted.read(theirs)) == theirs


def test_a_dotted_field_is_found():
    assert value_of(ModelConfig(moe={"experts": 4}), "moe.experts") == 4


@pytest.mark.parametrize(
    ("family", "key", "kinds"),
    [
        (Family("A"), "sliding_window", {FULL: "full"}),
        (Family("A", windows=all_sliding), "sliding_window", {FULL: "full", SLIDING: "sliding"}),
        (
            Family("A", windows=all_sliding, window_kind="chunked"),
            "attention_chunk_size",
            {FULL: "full", "chunked_attention": "chunked"},
        ),
        (Family("A", keys={"delta_net.key_heads": "x"}), "sliding_window", {FULL: "full", LINEAR: "linear"}),
    ],
)
def test_a_class_knows_its_kinds_of_layers(family, key, kinds):
    assert (family.window_key, family.kinds) == (key, kinds)
