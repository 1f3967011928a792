"""Weights of every family become theirs and ours again, number by number, and all of them have a name there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from argosy.config.model import FAMILIES, ModelConfig
from argosy.errors import UserError
from argosy.models.hf_names import conversions_of, copies_of, their_shapes
from argosy.plan.parameters import state_table

SIZES: dict[str, Any] = {
    "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "head_width": 8, "ffn_width": 24, "vocab_size": 32,
}  # fmt: skip
MOE = {"experts": 4, "experts_per_token": 2, "expert_ffn_width": 8}
MLA = {"kv_rank": 8, "q_rank": 8, "rope_width": 4, "nope_width": 4, "value_width": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "phi3": {},
    "mixtral": {"moe": MOE},
    "qwen3_moe": {"qk_norm": True, "moe": MOE},
}


def numbered(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights whose numbers are all different."""
    first, weights = 0, {}
    for name, parameter in state_table(config).items():
        count = torch.Size(parameter.shape).numel()
        weights[name] = torch.arange(first, first + count).view(parameter.shape)
        first += count
    return weights


@pytest.mark.parametrize("family", MODELS)
def test_weights_go_both_ways(family):
    config = ModelConfig.model_validate(SIZES | MODELS[family] | {"family": family})
    weights, theirs = numbered(config), Counter[str]()
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    for conversion in conversions_of(config):
        ours = [weights.pop(name) for name in conversion.ours]
        there = conversion.to_theirs(ours)
        theirs.update(conversion.theirs)
        assert [tuple(tensor.shape) for tensor in there] == their_shapes(conversion, shapes)
        assert all(torch.equal(a, b) for a, b in zip(conversion.to_ours(there), ours, strict=True))
    assert not weights and max(theirs.values()) == 1


def test_rows_that_convert_alone_are_those_rows():
    config = ModelConfig.model_validate(SIZES | {"family": "llama"})
    (embedding,) = (one for one in conversions_of(config) if one.ours == ("embedding.weight",))
    assert embedding.rows == "alone" and embedding.theirs == ("model.embed_tokens.weight",)
    whole = torch.arange(32 * 16).view(32, 16)
    assert torch.equal(embedding.to_ours([whole[3:5]])[0], embedding.to_ours([whole])[0][3:5])


def test_each_expert_is_a_tensor_of_theirs():
    config = ModelConfig.model_validate(SIZES | MODELS["mixtral"] | {"family": "mixtral"})
    stacks = [one for one in conversions_of(config) if one.rows == "theirs"]
    assert len(stacks) == 3 * config.layers and {len(one.theirs) for one in stacks} == {4}
    assert stacks[0].theirs[1] == "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def test_copies_must_be_alike():
    family = next(name for name in FAMILIES if name == "deepseek_v3")
    config = ModelConfig.model_validate(
        SIZES | {"family": family, "kv_heads": 4, "head_width": 4, "mla": MLA, "moe": MOE, "mtp": {"modules": 1}}
    )
    assert copies_of("embedding.weight", config) == ("model.layers.2.embed_tokens.weight",)
    (embedding,) = (one for one in conversions_of(config) if one.ours == ("embedding.weight",))
    weight = torch.ones(32, 16)
    assert len(embedding.to_theirs([weight])) == 2
    with pytest.raises(UserError, match=r"model.layers.2.embed_tokens.weight is not model.embed_tokens.weight"):
        embedding.to_ours([weight, weight + 1])
