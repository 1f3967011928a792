"""A config.json is read whatever it says: a model, or one message that names the file and the key."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HunYuanDenseV1Config
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

from argosy.config.load import load
from argosy.errors import UserError
from argosy.models.hf import import_config
from argosy.models.rope import rotary_table
from argosy.plan.layer_spec import RopeSpec
from mutations import ODD_VALUES

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 128,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 16,
    "layer_types": ["full_attention"],
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32, "attention_factor": 1.1386294361}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": LLAMA | {"rope_scaling": LLAMA3},
    "yarn": LLAMA | {"rope_parameters": YARN},
    "mixtral": LLAMA | EXPERTS | {"model_type": "mixtral", "architectures": None, "num_local_experts": 4},
    "qwen3_moe": LLAMA
    | EXPERTS
    | {"model_type": "qwen3_moe", "architectures": None, "num_experts": 4, "mlp_only_layers": [0]},
    "deepseek_v3": LLAMA
    | EXPERTS
    | {"model_type": "deepseek_v3", "architectures": None, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
       "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8,
       "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
}  # fmt: skip
ODD = [*ODD_VALUES, 10**5, 10**8, 10**18, "4", 2.5, [1, "a"], {"a": 1}, [None]]


def write(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_whatever_stands_at_a_key_is_a_model_or_one_short_message(name: str, tmp_path: Path) -> None:
    assert import_config(write(tmp_path, CONFIGS[name])).layers == 2
    chance = random.Random(name)
    for _ in range(100):
        changed = json.loads(json.dumps(CONFIGS[name]))
        for _ in range(chance.choice([1, 1, 2])):
            table = changed
            if chance.random() < 0.3:
                found = changed.get(chance.choice(["rope_scaling", "rope_parameters"]))
                table = found if isinstance(found, dict) else changed
            new = ["quantization_config", "rope_scaling", "original_max_position_embeddings", "partial_rotary_factor"]
            table[chance.choice([*table, *new])] = chance.choice(ODD)
        try:
            import_config(write(tmp_path, changed))
        except UserError as refused:
            said = str(refused)
            assert "config.json: " in said
            assert len(said) < 3000 + 5 * len(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("llama", {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}}),  # SmolLM2
        ("cohere", {"model_max_length": 131_072, "tie_word_embeddings": True}),  # Command R
        ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),  # Phi-4-mini
        ("cohere2", {"rotary_pct": 1.0, "position_embedding_type": "rope_gptj", "use_parallel_block": True,
                     "order_of_interleaved_layers": "local_attn_first", "use_gated_activation": True,
                     "layer_switch": 4, "use_embedding_sharing": True, "use_parallel_embedding": True}),  # Command R7B
    ],
)  # fmt: skip
def test_keys_that_published_models_have_beside_are_taken(family: str, said: dict[str, Any], tmp_path: Path) -> None:
    plain = {k: v for k, v in LLAMA.items() if k not in ("architectures", "layer_types")} | {"model_type": family}
    expected = import_config(write(tmp_path, plain | {"tie_word_embeddings": family.startswith("cohere")}))
    assert import_config(write(tmp_path, plain | {"tie_word_embeddings": expected.tie_embeddings} | said)) == expected
    changed = {key: 0.5 for key, value in said.items() if family == "cohere2" and not isinstance(value, bool | int)}
    for key, value in changed.items():
        with pytest.raises(UserError, match=f"{key} = {value}: only"):
            import_config(write(tmp_path, plain | said | {key: value}))


def test_heads_that_are_null_follow_from_the_others(tmp_path: Path) -> None:
    plain = {k: v for k, v in LLAMA.items() if k not in ("architectures", "layer_types")} | {"model_type": "seed_oss"}
    found = import_config(write(tmp_path, plain | {"num_key_value_heads": None, "head_dim": None}))
    assert (found.kv_heads, found.head_width) == (4, 16)


def test_an_alpha_of_hunyuan_stretches_the_base(tmp_path: Path) -> None:
    plain = {k: v for k, v in LLAMA.items() if k not in ("architectures", "layer_types")}
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
    said = plain | {"model_type": "hunyuan_v1_dense", "rope_scaling": scaling}
    found, theirs = import_config(write(tmp_path, said)), HunYuanDenseV1Config(**said)
    ours, _ = rotary_table(RopeSpec(16, found.rope_theta, found.rope_scaling), 40)
    of_theirs, _ = HunYuanDenseV1RotaryEmbedding(theirs)(torch.zeros(1), torch.arange(40)[None])
    torch.testing.assert_close(ours, of_theirs[0])
    with pytest.raises(UserError, match='rope_type = "dynamic": known are'):
        import_config(write(tmp_path, plain | {"model_type": "llama", "rope_scaling": scaling}))


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("llama3", "num_hidden_layers", 10**5, "num_hidden_layers: Input should be less than or equal to 8192"),
        ("mixtral", "num_local_experts", 10**8, "num_local_experts: Input should be less than or equal to 65536"),
        ("llama3", "num_attention_heads", 0, "num_attention_heads: Input should be greater than 0"),
        ("llama3", "num_attention_heads", "4", "num_attention_heads: Input should be a valid integer"),
        ("llama3", "num_hidden_layers", True, "num_hidden_layers: Input should be a valid integer"),
        ("llama3", "rope_scaling", True, "rope_scaling: Input should be a valid dictionary"),
        ("llama3", "quantization_config", 4, "quantization_config: Input should be a valid dictionary"),
        ("qwen3_moe", "mlp_only_layers", [0, "1"], r"mlp_only_layers\[1\]: Input should be a valid integer"),
    ],
)
def test_a_size_or_kind_that_no_model_has_is_named(
    name: str, key: str, value: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"config.json: {said}"):
        import_config(write(tmp_path, CONFIGS[name] | {key: value}))


def test_experts_of_all_layers_are_counted_before_anything_is_made_of_them(tmp_path: Path) -> None:
    changed = CONFIGS["mixtral"] | {"num_hidden_layers": 8000, "num_local_experts": 60_000}
    with pytest.raises(UserError, match="makes 480000000 experts; try 32 or less"):
        import_config(write(tmp_path, changed))


@pytest.mark.parametrize("key", ["model.layers", "model.moe.experts", "model.heads"])
def test_a_run_file_has_the_same_limits(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key} = 1000000000000: must be a whole number .* at most"):
        load(None, {key: 10**12})
