"""Dense decoders: keys that config.json leaves out are as transformers has them; other models are refused."""

from __future__ import annotations

from typing import Any

import pytest

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.models.hf_config import config_from_json
from argosy.models.hf_dense import DENSE_FAMILIES
from argosy.models.hf_family import CONFIG_DEFAULTS
from transformers_models import odd_defaults

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 20, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 101,
    "num_key_value_heads": 8,
}  # fmt: skip
UNUSED = {"qwen2": "sliding_window", "qwen3": "sliding_window"}
"""Their classes take this one as null until use_sliding_window is true, and its own default then."""


def read(family: str, **keys: Any) -> ModelConfig:
    return config_from_json(SIZES | {"model_type": family} | keys, "config.json")


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_a_missing_key_is_what_transformers_takes(family: str) -> None:
    defaults = CONFIG_DEFAULTS | DENSE_FAMILIES[family].defaults
    used = {key: value for key, value in defaults.items() if key != UNUSED.get(family)}
    assert odd_defaults(family, used) == {}


@pytest.mark.parametrize(
    ("family", "field", "keys", "value"),
    [
        ("gemma", "embedding_scale", {}, 8.0),  # the root of 64
        ("gemma2", "attention.scale", {"query_pre_attn_scalar": 64}, 0.125),  # one over its root
        ("gemma2", "attention.softcap", {"attn_logit_softcapping": None}, 0.0),
        ("gemma3_text", "logit_softcap", {}, 0.0),
        ("granite", "logit_scale", {"logits_scaling": 4.0}, 0.25),  # logits are divided
        ("cohere", "norms.place", {}, "parallel"),
        ("nemotron", "ffn_gate", {}, False),
        (
            "exaone4",
            "attention.rotary_layers",
            {"layer_types": ["full_attention"] * 8},
            (False,),
        ),  # as sliding_window is
        ("seed_oss", "attention_bias", {}, False),  # of the output, which has a key of its own
        ("seed_oss", "qkv_bias", {}, True),
    ],
)
def test_a_key_of_another_form_is_our_field(family: str, field: str, keys: dict[str, Any], value: Any) -> None:
    found: Any = read(family, **keys)
    for name in field.split("."):
        found = getattr(found, name)
    assert found == pytest.approx(value) if isinstance(value, float) else found == value


S, F = "sliding", "full"


@pytest.mark.parametrize(
    ("family", "keys", "kinds"),
    [
        ("mistral", {}, (S,) * 8),
        ("mistral", {"sliding_window": None}, ()),
        ("gemma2", {}, (S, F) * 4),
        ("gemma3_text", {}, (S, S, S, S, S, F, S, S)),
        ("olmo3", {}, (S, S, S, F) * 2),
        ("cwm", {}, (F, S, S, S) * 2),
        ("qwen2", {}, ()),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 6}, (F,) * 6 + (S,) * 2),
        ("smollm3", {}, ()),
        ("exaone4", {"sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"] * 4},
         (S, F) * 4),
    ],
)  # fmt: skip
def test_which_layers_have_windows_is_the_classes_own_rule(family: str, keys: dict[str, Any], kinds: Any) -> None:
    attention = read(family, **keys).attention
    period = attention.layers
    assert tuple(period[layer % len(period)] for layer in range(8)) == kinds if kinds else set(period) <= {F}


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention = true: only false is known",
        ),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm = true: only false is known. Choose another model."),
        ("ernie4_5", {"use_bias": True}, "use_bias = true: only false is known"),
        ("qwen2", {"attention_bias": True}, "attention_bias = true: only false is known"),
        ("mistral", {"mlp_bias": True}, "mlp_bias = true: this class has no biases there"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = "gelu": only silu is known for this class'),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: this class rotates whole heads"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_its_key(family: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read(family, **keys)
    assert f"config.json: {said}" in str(refused.value)
