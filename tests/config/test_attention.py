"""Which settings of attention, norms and rotary embedding go together; what does not is said with what to set."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from argosy.config.attention import AttentionConfig, DeltaNetConfig, MLAConfig, NormConfig, RopeScaling


@pytest.mark.parametrize(
    ("table", "keys", "said"),
    [
        (AttentionConfig, {"layers": ["sliding", "full"]}, "layers has sliding, and window = 0; set window"),
        (AttentionConfig, {"window": 8}, 'window = 8 has no effect without sliding layers; set layers = ["sliding"]'),
        (AttentionConfig, {"window": 8, "layers": ["full", "linear"]}, "has no effect without sliding layers"),
        (AttentionConfig, {"layers": ["chunked"], "window": 8, "sinks": True},
         "chunked layers are not supported with softcap or sinks; leave these out"),
        (AttentionConfig, {"rotary_width": 7}, "rotary_width = 7 must be even: rotary embedding turns pairs"),
        (AttentionConfig, {"sliding_rotary_width": 5}, "sliding_rotary_width = 5 must be even"),
        (AttentionConfig, {"head_widths": [8, 5]}, "head_widths has 5, and each must be even"),
        (AttentionConfig, {"keys_as_values": [False, True], "value_width": 4},
         "value_width = 4 with keys_as_values: values are as wide as keys there; set 0"),
        (AttentionConfig, {"keys_as_values": [True], "norm_over": "all"},
         'keys_as_values with norm_over = "all" is not supported; set norm_over = "head"'),
        (AttentionConfig, {"norm_weights": False, "norm_over": "all"}, 'norm_weights = false with norm_over = "all"'),
        (AttentionConfig, {"norm_after_rotary": True, "norm_over": "all"}, 'norm_after_rotary = true with norm_over'),
        (AttentionConfig, {"sinks_in_full": False}, "sinks_in_full = false has no effect without sinks in"),
        (AttentionConfig, {"gate_kind": "softplus"}, "gate_kind and gate_over have no effect without gate = true"),
        (NormConfig, {"bias": True}, 'bias = true with kind = "rms": RMSNorm has none; set kind = "layer"'),
        (MLAConfig, {"kv_rank": 8, "rope_width": 7}, "rope_width = 7 must be even"),
        (MLAConfig, {"kv_rank": 8, "rope_width": 8, "nope_width": 4, "value_width": 13},
         "value_width = 13 is more than nope_width + rope_width = 12; try 12 or less"),
        (DeltaNetConfig, {"key_heads": 4, "value_heads": 10}, "value_heads = 10 is no multiple of key_heads = 4;"),
        (DeltaNetConfig, {"key_heads": 4}, "value_heads = 0 is no multiple of key_heads = 4; try 4"),
        (DeltaNetConfig, {"value_heads": 4}, "value_heads = 4 with key_heads = 0; give key_heads too"),
        (RopeScaling, {"kind": "longrope"}, "kind = longrope with 0 short_divisors and 0 long_divisors"),
        (RopeScaling, {"kind": "longrope", "short_divisors": [1.0], "long_divisors": [1.0, 2.0]},
         "kind = longrope with 1 short_divisors and 2 long_divisors: longrope needs as many of each"),
        (RopeScaling, {"kind": "longrope", "short_divisors": [1.0], "long_divisors": [1.0], "original_max_seq_len": 1},
         "original_max_seq_len = 1 with longrope"),
        (RopeScaling, {"kind": "yarn", "short_divisors": [1.0], "long_divisors": [1.0]}, "and other kinds take none"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(table: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        table.model_validate(keys)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        (AttentionConfig, {"layers": ["sliding", "full"], "window": 8, "sinks": True, "sinks_in_full": False}),
        (AttentionConfig, {"gate": True, "gate_kind": "softplus", "gate_over": "head"}),
        (AttentionConfig, {"layers": ["chunked", "full"], "window": 8, "rotary_layers": [True, False]}),
        (MLAConfig, {"rope_width": 7}),  # without a rank it is ordinary attention
        (RopeScaling, {"kind": "longrope", "short_divisors": [1.0], "long_divisors": [2.0]}),
    ],
)
def test_settings_that_do_are_taken(table: Any, keys: dict[str, Any]) -> None:
    found = table.model_validate(keys).model_dump(include=set(keys))
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()} == keys


def test_a_key_of_latent_attention_has_both_parts() -> None:
    assert MLAConfig(kv_rank=8, rope_width=4, nope_width=12, value_width=16).key_width == 16
