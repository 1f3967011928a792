"""Kinds of layers and rotary embeddings in config.json: the same again after both ways, and refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.config.attention import RopeScaling
from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.models.hf_family import CONFIG_DEFAULTS, Family, all_sliding, none_sliding
from argosy.models.hf_layers import (
    cycle_of,
    dense_from,
    in_json,
    layers_from_json,
    layers_to_json,
    plain,
    refuse,
    rope_from_json,
    rope_to_json,
    share_of,
)

SIZES = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "ffn_width": 64, "vocab_size": 64}
PLAIN, WINDOWED = Family("Plain"), Family("Windowed", windows=none_sliding)
GIVEN = CONFIG_DEFAULTS | {"num_hidden_layers": 4, "max_position_embeddings": 64}


def model(**more: Any) -> ModelConfig:
    return ModelConfig.model_validate(SIZES | more)


@pytest.mark.parametrize(
    ("values", "cycle"), [("abab", "ab"), ("aaaa", "a"), ("aabaab", "aab"), ("aab", "aab"), ("ababa", "ab"), ("", "")]
)
def test_the_shortest_beginning_that_gives_all(values, cycle):
    assert cycle_of(values) == tuple(cycle)


@pytest.mark.parametrize(("part", "whole"), [(1, 3), (5, 7), (32, 96), (49, 64), (3, 11)])
def test_a_share_gives_the_part_again(part, whole):
    assert int(whole * share_of(part, whole)) == part


@pytest.mark.parametrize(
    ("dense", "first", "others"), [([], 0, ()), ([0, 1], 2, ()), ([0, 2], 1, (2,)), ([1, 3], 0, (1, 3))]
)
def test_layers_without_experts(dense, first, others):
    assert dense_from(dense) == {"moe.first_dense_layers": first, "moe.dense_layers": others}


@pytest.mark.parametrize("listed", [["full"], ["sliding", "sliding", "sliding", "full"], ["sliding"]])
def test_kinds_of_layers_go_both_ways(listed):
    config = model(attention={"layers": listed, "window": 6 * ("sliding" in listed)})
    there = layers_to_json(config, WINDOWED)
    back = layers_from_json(there, GIVEN | there, WINDOWED, "config.json")
    assert back.get("attention.layers", ("full",)) == cycle_of(config.attention.layers)
    assert back.get("attention.window", 0) == config.attention.window


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        (WINDOWED, {"layer_types": ["full_attention"] * 3}, "it must have 4 entries, as num_hidden_layers says"),
        (WINDOWED, {"layer_types": ["odd"]}, 'layer_types = "odd": known for this class are full_attention, sliding'),
        (PLAIN, {"use_sliding_window": True}, "this class's attention reads the whole document"),
        (WINDOWED, {"use_sliding_window": True}, "layer_types must say which layers have windows"),
        (WINDOWED, {"sliding_window_pattern": "LLLG"}, "layer_types must say which layers have windows"),
    ],
)
def test_layers_that_cannot_be_are_refused(family, values, said):
    with pytest.raises(UserError, match=r"config\.json: ") as refused:
        layers_from_json(values, GIVEN | values, family, "config.json")
    assert said in str(refused.value)


def test_a_window_of_null_is_none():
    family = Family("Windowed", windows=all_sliding)
    found = layers_from_json({"sliding_window": None}, GIVEN, family, "config.json")
    assert found == {}


def test_a_class_without_such_layers_cannot_have_the_model():
    with pytest.raises(UserError, match=r"Plain knows full\. Choose another family"):
        layers_to_json(model(attention={"layers": ["sliding"], "window": 4}), PLAIN)


@pytest.mark.parametrize(
    "scaling",
    [
        {"kind": "none"},
        {"kind": "linear", "factor": 4.0},
        {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 32},
        {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 32, "attention_factor": 1.5, "truncate": False},
    ],
    ids=lambda scaling: scaling["kind"],
)
def test_rotary_embeddings_go_both_ways(scaling):
    config = model(rope_theta=5e5, rope_scaling=scaling)
    there = rope_to_json(config, PLAIN)
    back = rope_from_json(GIVEN | there, {"head_width": 8}, PLAIN, "config.json")
    assert back == {"rope_theta": 5e5, "rope_scaling": config.rope_scaling}


def test_sliding_layers_have_an_embedding_of_their_own():
    family, kinds = Family("Nested", windows=none_sliding, nests_rope=True), ("sliding", "full")
    config = model(
        attention={"layers": kinds, "window": 4, "sliding_rope_theta": 100.0, "sliding_rope_scaled": False},
        rope_scaling={"kind": "linear", "factor": 4.0},
    )
    there = rope_to_json(config, family)
    back = rope_from_json(GIVEN | there, {"head_width": 8, "attention.layers": kinds}, family, "f")
    assert back["attention.sliding_rope_theta"] == 100.0 and back["attention.sliding_rope_scaled"] is False
    assert back["rope_scaling"] == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "odd"}, 'rope_scaling.rope_type = "odd": known are default, linear, llama3'),
        ({"rope_type": "linear"}, "rope_scaling.factor is missing, and linear needs it. Add it."),
        ({"rope_type": "linear", "factor": 2.0, "odd": 1}, "rope_scaling.odd = 1: not known"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "this class rotates whole heads"),
    ],
)
def test_a_rotary_embedding_that_is_not_known_is_refused(rope, said):
    with pytest.raises(UserError) as refused:
        rope_from_json(GIVEN | {"rope_scaling": rope}, {"head_width": 8}, PLAIN, "config.json")
    assert said in str(refused.value)


def test_a_share_of_the_frequencies_is_one_of_whole_heads():
    """transformers reads it of the same key, in place of the share of the head."""
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    given = GIVEN | {"rope_scaling": rope, "partial_rotary_factor": 0.5}
    back = rope_from_json(given, {"head_width": 8}, Family("Partial", partial=1.0), "config.json")
    assert back["rope_scaling"].rotated_share == 0.25 and "attention.rotary_width" not in back


def test_a_class_that_takes_some_kinds_alone_says_so():
    given = GIVEN | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(UserError, match=r'rope_type = "linear": this class takes none and longrope alone'):
        rope_from_json(given, {"head_width": 8}, Family("Long", ropes=("none", "longrope")), "config.json")


def test_long_values_are_cut_in_messages():
    assert len(in_json("x" * 1000)) == 100 and in_json({"a": 1}) == '{"a": 1}'
    assert plain((1, 2)) == [1, 2] and plain("a") == "a"
    with pytest.raises(UserError, match=r"config.json: key = 1: why. Choose another model."):
        refuse("config.json", "key", 1, "why")
