"""Which sizes and parts of a decoder go together; what does not is said with what to set. Which layers have experts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from argosy.config.model import ModelConfig, MoEConfig, repeated

EXPERTS = {"experts": 8, "experts_per_token": 2}
MLA = {"kv_rank": 8, "rope_width": 64}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"heads": 6, "kv_heads": 4}, "kv_heads = 4 does not divide heads = 6; try one of [1, 2, 3, 6]"),
        ({"head_width": 7}, "head_width = 7 must be even: rotary embedding turns pairs"),
        ({"layers": 3, "attention": {"heads": [4, 6]}}, "layer 1 has 6 heads and 4 key/value heads"),
        ({"layers": 8192, "moe": {"experts": 64}}, "makes 524288 experts; try 32 or less"),
        ({"layers": 2, "moe": {"experts": 8, "first_dense_layers": 2}},
         "moe.first_dense_layers = 2 leaves none of layers = 2 to moe.experts = 8; try 1 or less, or experts = 0"),
        ({"layers": 2, "moe": {"experts": 8, "every": 3}}, "leave none of layers = 2 to moe.experts = 8; set"),
        ({"layers": 1, "moe": {"experts": 8, "dense_layers": [0]}}, "leave none of layers = 1 to moe.experts = 8"),
        ({"mla": MLA, "kv_heads": 2}, "latent attention has a key for each query head; set kv_heads = 4"),
        ({"mla": MLA, "head_width": 32}, "head_width = 32 and mla.rope_width = 64: with latent attention both"),
        ({"mla": MLA, "qk_norm": True}, "the latents have norms of their own; set qk_norm = false"),
        ({"mla": MLA, "qkv_bias": True}, "latent attention has no q, k and v alike; set qkv_bias = false"),
        ({"mla": MLA, "attention": {"softcap": 3.0}}, "latent attention has none of these settings; leave the"),
        ({"attention": {"rotary_width": 66}}, "attention.rotary_width = 66 is more than head_width = 64; leave it out"),
        ({"attention": {"head_widths": [64, 32], "rotary_width": 34}}, "is more than head_width = 32; leave it out"),
        ({"rope_scaling": {"kind": "longrope", "short_divisors": [1.0], "long_divisors": [1.0]}},
         "has 1 numbers, and heads of one width, of which 64 numbers are rotated, need 32"),
        ({"mup": {"base_width": 64}, "ffn_widths": [8, 16]}, "ffn_widths with mup.base_width = 64: layers of"),
        ({"mup": {"base_ffn_width": 64}}, "base_ffn_width = 64 has no effect without base_width; give it too"),
        ({"mup": {"base_width": 64, "base_expert_ffn_width": 8}}, "has no effect with moe.experts = 0; leave it out"),
        ({"mup": {"base_width": 64, "base_q_rank": 8}, "mla": MLA}, "base_q_rank = 8 has no effect with mla.q_rank"),
        ({"attention": {"layers": ["linear", "full"]}}, "layers are linear if and only if delta_net says their heads"),
        ({"delta_net": {"key_heads": 2, "value_heads": 2}}, "layers are linear if and only if delta_net says their"),
        ({"activation": "clamped_swiglu"}, "clamped_swiglu needs a limit, and no other activation has one"),
        ({"ffn_limit": 7.0}, "ffn_limit = 7 and activation = silu"),
    ],
)  # fmt: skip
def test_parts_that_do_not_go_together_are_refused_with_a_remedy(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ModelConfig.model_validate(keys)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"experts_per_token": 9}, "experts_per_token = 9 is more than experts = 8; try 8 or less"),
        ({"groups": 3}, "groups = 3 does not divide experts = 8; try one of [1, 2, 4, 8]"),
        ({"groups": 2, "top_groups": 4}, "top_groups = 4 is more than groups = 2; try 2"),
        ({"groups": 8}, "groups = 8 leaves 1 expert in a group, and a group is judged by its best two; try 4 or less"),
        ({"groups": 4, "experts_per_token": 5}, "is more than the 2 experts of top_groups = 1; try top_groups = 3"),
    ],
)
def test_experts_and_their_groups_fit(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        MoEConfig.model_validate(EXPERTS | keys)
    assert said in str(refused.value)
    assert MoEConfig.model_validate({**EXPERTS, **keys, "experts": 0}).experts == 0  # then they mean nothing


@pytest.mark.parametrize(
    ("moe", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first_dense_layers": 2}, [2, 3, 4, 5]),
        ({"every": 2}, [1, 3, 5]),
        ({"every": 2, "first_dense_layers": 2, "dense_layers": [5]}, [3]),
        ({"experts": 0}, []),
    ],
)
def test_layers_with_experts_come_in_turn(moe: dict[str, Any], layers: list[int]) -> None:
    model = ModelConfig.model_validate({"layers": 6, "moe": EXPERTS | moe})
    assert [layer for layer in range(6) if model.is_moe_layer(layer)] == layers


def test_lists_are_repeated_over_the_layers() -> None:
    model = ModelConfig.model_validate(
        {"layers": 4, "heads": 8, "attention": {"heads": [4, 8, 12], "kv_heads": [2, 4]}}
    )
    assert [model.heads_of(layer) for layer in range(4)] == [(4, 2), (8, 4), (12, 2), (4, 4)]
    assert [repeated((1, 2), layer, 0) for layer in range(3)] == [1, 2, 1] and repeated((), 5, 7) == 7


def test_modules_that_predict_further_are_layers_of_training_alone() -> None:
    model = ModelConfig.model_validate({"layers": 4, "mtp": {"modules": 2}})
    assert (model.all_layers, model.embeds_at_both_ends) == (6, True)
    alone = model.without_further()
    assert (alone.all_layers, alone.embeds_at_both_ends, alone.without_further()) == (4, False, alone)
    assert ModelConfig(tie_embeddings=True).embeds_at_both_ends
    assert not ModelConfig(tie_embeddings=True, score=True).embeds_at_both_ends
