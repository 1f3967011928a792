"""Classes whose layers differ: what of config.json is refused, and lists that say the same in other words."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.models.hf_config import config_from_json

SIZES = {
    "hidden_size": 48, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "head_dim": 8,
}  # fmt: skip
CLASSES: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {"v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "laguna": {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads_per_layer": [4, 2, 4, 2]},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "attention_k_eq_v": True},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 28},
}


def read(family: str, **keys: Any) -> ModelConfig:
    return config_from_json(SIZES | {"model_type": family} | CLASSES[family] | keys, "config.json")


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("mimo_v2_flash", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types = .*it must have 4 entries"),
        ("mimo_v2_flash", {"mlp_layer_types": ["dense"] * 3 + ["thick"]}, 'mlp_layer_types = "thick"'),
        ("mimo_v2_flash", {"attention_value_scale": -1.0}, "value_scale: Input should be greater than 0"),
        ("mimo_v2_flash", {"num_key_value_heads": 4}, "layer 1 has 4 heads and 8 key/value heads"),
        ("laguna", {"num_attention_heads_per_layer": [4, 2]}, "num_attention_heads_per_layer has 2 entries for 4"),
        ("laguna", {"num_attention_heads_per_layer": [4, 2, 5, 2]}, "layer 2 has 5 heads and 2 key/value heads"),
        ("laguna", {"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping = 3.0: only 0.0 is known"),
        ("gemma4_text", {"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input = 256: only 0"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2: only 0 is known"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block = true: only false"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "only null and \"vision\" is known"),
        ("gemma4_text", {"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config has layer 9"),
        ("gemma4_text", {"per_layer_config": {"1": {"hidden_size": 8}}}, "per_layer_config.1.hidden_size"),
        ("gemma4_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types ends with sliding_attention"),
        ("llama4_text", {"moe_layers": [1, 7]}, "moe_layers = .* one beyond them"),
        ("llama4_text", {"moe_layers": []}, "moe_layers = .* names none of the 4 layers"),
        ("llama4_text", {"attention_chunk_size": "many"}, "attention_chunk_size: Input should be a valid integer"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "known for this class are full_.*chunked_"),
    ],
)  # fmt: skip
def test_a_config_that_would_be_computed_otherwise_is_refused_by_its_key(
    family: str, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{said}"):
        read(family, **keys)


def test_full_layers_of_gemma_4_are_said_in_either_way() -> None:
    own = {"head_dim": 16, "num_key_value_heads": 1}
    first = read("gemma4_text", num_global_key_value_heads=1)
    assert first == read("gemma4_text", per_layer_config={"3": own}, global_head_dim=None)
    assert (first.attention.head_widths, first.attention.kv_heads) == ((8, 8, 8, 16), (2, 2, 2, 1))
    assert first.attention.keys_as_values == (False, False, False, True)


def test_layers_of_llama_4_have_chunks_where_they_rotate_and_experts_in_turn() -> None:
    found = read("llama4_text", interleave_moe_layer_step=2)
    assert found.attention.layers == ("chunked", "chunked", "chunked", "full")
    assert found.attention.rotary_layers == (True, True, True, False) and found.moe.every == 2
    assert found == read("llama4_text", interleave_moe_layer_step=2, moe_layers=[1, 3])
    assert read("llama4_text", moe_layers=[1, 2]).moe.dense_layers == (3,)
