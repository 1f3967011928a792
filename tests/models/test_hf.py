"""Our decoder and transformers' classes are the same function, in both directions."""

from __future__ import annotations

import json
import os
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from argosy.config.attention import RopeScaling
from argosy.config.model import ModelConfig
from argosy.data.stores.model_folder import ModelFolder, model_folder
from argosy.errors import ArgosyWarning, UserError
from argosy.models import hf, hf_config
from argosy.models.decoder import Decoder
from argosy.models.hf_config import SCORED
from argosy.models.rope import rotary_table
from argosy.plan.layer_spec import layer_spec
from drawn_families import draw_config
from transformers_models import ORIGINAL, SIZES, THEIRS, load_theirs, random_theirs

SEQ_LEN = 100

LINEAR = RopeScaling(kind="linear", factor=4.0)
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, original_max_seq_len=ORIGINAL, low_freq_factor=1.0)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=ORIGINAL, beta_fast=4.0)
QWEN2 = {"family": "qwen2", "qkv_bias": True, "norm_eps": 1e-6}
QWEN3 = {"family": "qwen3", "qk_norm": True, "norm_eps": 1e-6}

EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_ffn_width": 20, "aux_coefficient": 0.01}
NEMOTRON = {
    "family": "nemotron", "ffn_gate": False, "activation": "relu2", "attention": {"rotary_width": 6},
    "norms": {"kind": "layer", "bias": True, "zero_centered": True},
}  # fmt: skip
MIXTRAL = {"family": "mixtral", "moe": EXPERTS, "ffn_width": 20}
QWEN3_MOE = QWEN3 | {"family": "qwen3_moe", "moe": EXPERTS | {"normalize_weights": False}}
LATENT = {"kv_rank": 16, "q_rank": 24, "rope_width": 12, "nope_width": 8, "value_width": 10}
DEEPSEEK = {
    "family": "deepseek_v3",
    "norm_eps": 1e-6,
    "layers": 3,
    "kv_heads": 4,
    "mla": LATENT,
    "moe": {
        "experts": 8, "experts_per_token": 3, "expert_ffn_width": 20, "shared_experts": 2, "first_dense_layers": 1,
        "router": "sigmoid", "routed_scale": 2.5, "groups": 4, "top_groups": 2, "balance": "bias",
    },
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "llama-gqa": {},
    "llama-no-gqa": {"kv_heads": 4},
    "llama-tied": {"tie_embeddings": True},
    "llama-bias": {"attention_bias": True},
    "llama-wide-heads": {"head_width": 20},
    "llama-theta": {"rope_theta": 10_000.0},
    "llama-linear": {"rope_scaling": LINEAR},
    "llama-llama3": {"rope_scaling": LLAMA3, "rope_theta": 1000.0},
    "llama-yarn": {"rope_scaling": YARN, "rope_theta": 1000.0},
    "qwen2": QWEN2,
    "qwen2-tied": QWEN2 | {"tie_embeddings": True, "kv_heads": 4},
    "qwen2-yarn": QWEN2 | {"rope_scaling": YARN, "rope_theta": 1000.0},
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3 | {"tie_embeddings": True},
    "qwen3-wide-heads": QWEN3 | {"head_width": 32, "heads": 6, "width": 40},
    "qwen3-yarn": QWEN3 | {"rope_scaling": YARN, "attention_bias": True},
    "mixtral": MIXTRAL,
    "mixtral-tied": MIXTRAL | {"tie_embeddings": True, "moe": EXPERTS | {"experts_per_token": 4}},
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-normalized": QWEN3_MOE | {"moe": EXPERTS | {"first_dense_layers": 1}, "attention_bias": True},
    "deepseek": DEEPSEEK,
    "deepseek-bias": DEEPSEEK | {"attention_bias": True, "mla": LATENT | {"q_rank": 0}},
    "deepseek-yarn": DEEPSEEK | {"rope_scaling": YARN, "rope_theta": 1000.0},
}


@pytest.fixture(params=VARIANTS, ids=str)
def config(request: pytest.FixtureRequest, small: ModelConfig) -> ModelConfig:
    return ModelConfig.model_validate(small.model_dump() | VARIANTS[request.param])


def tokens(config: ModelConfig) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))


def load_ours(folder: Path) -> tuple[ModelConfig, Decoder]:
    config, weights = hf.import_folder(folder)
    model = Decoder(config)
    model.to_empty(device="cpu")
    model.load_state_dict(dict(weights))  # biases of routers too
    return config, model


@torch.no_grad()
def assert_same_logits(ours: Decoder, theirs: Any) -> None:
    tokens_BT = tokens(ours.config)
    torch.testing.assert_close(ours(tokens_BT), theirs(tokens_BT).logits, atol=2e-5, rtol=2e-5)


def test_what_we_export_gives_the_same_logits_in_transformers(config, build, tmp_path):
    ours = build(config)
    hf.export_folder(config, ours.state_dict(), tmp_path / "out", dtype=torch.float32)
    assert_same_logits(ours, load_theirs(tmp_path / "out"))


@pytest.mark.parametrize("family", SCORED)
def test_reward_models_score_as_in_transformers(family: str, tmp_path: Path) -> None:
    described = draw_config(family, random.Random(family).choice)
    described.num_labels, described.pad_token_id = 1, None
    torch.manual_seed(0)
    theirs = AutoModelForSequenceClassification.from_config(described, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path / "theirs")
    config, ours = load_ours(tmp_path / "theirs")
    assert config.score and "score.weight" in ours.state_dict() and "head.weight" not in ours.state_dict()
    hf.export_folder(config, ours.state_dict(), tmp_path / "out", dtype=torch.float32)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens_1T = tokens(config)[:1]
    with torch.no_grad():
        score = ours(tokens_1T)[0, -1]
        for model in (theirs, again):
            torch.testing.assert_close(model(tokens_1T).logits[0], score, atol=2e-5, rtol=2e-5)


def test_classes_of_several_labels_are_refused(tmp_path: Path) -> None:
    described = draw_config("llama", random.Random(0).choice)
    described.num_labels = 3
    AutoModelForSequenceClassification.from_config(described).save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match=r'architectures = \["LlamaForSequenceClassification"\]'):
        hf.import_config(tmp_path / "theirs")


@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-tied", "llama-bias", "qwen3-tied", "mixtral", "deepseek", "nemotron"]
)
def test_multipliers_of_mup_are_folded_into_what_is_exported(name, small, build, tmp_path):
    mup = {"base_width": 12} | ({} if name == "deepseek" else {"base_head_width": 3})
    config = ModelConfig.model_validate(small.model_dump() | (VARIANTS | {"nemotron": NEMOTRON})[name] | {"mup": mup})
    ours = build(config)
    hf.export_folder(config, ours.state_dict(), tmp_path / "out", dtype=torch.float32)
    assert_same_logits(ours, load_theirs(tmp_path / "out"))
    assert hf.import_config(tmp_path / "out").mup.base_width == 0


def test_export_and_import_give_back_config_and_weights_exactly(config, build, tmp_path):
    weights = build(config).state_dict()
    hf.export_folder(config, weights, tmp_path / "out", dtype=torch.float32)
    config_again, weights_again = hf.import_folder(tmp_path / "out")
    assert config_again == config
    assert list(weights_again) == list(weights)
    assert all(torch.equal(weights_again[name], weights[name]) for name in weights)


@pytest.mark.parametrize("name", THEIRS)
def test_what_transformers_saves_gives_the_same_logits_here(name, tmp_path):
    theirs = random_theirs(name)
    theirs.save_pretrained(tmp_path)
    _, ours = load_ours(tmp_path)
    assert_same_logits(ours, theirs)


PUBLISHED_ROPE = {
    "llama-3.1": {"rope_scaling": RopeScaling(kind="llama3", factor=8.0), "max_seq_len": 131072},
    "llama-3.2": {"rope_scaling": RopeScaling(kind="llama3", factor=32.0), "max_seq_len": 131072},
    "qwen3-128k": {
        "rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_max_seq_len=32768),
        "rope_theta": 1e6,
        "max_seq_len": 131072,
    },
}


@pytest.mark.parametrize("variant", PUBLISHED_ROPE.values(), ids=PUBLISHED_ROPE)
def test_rotary_tables_of_published_models_are_those_of_transformers(variant, small):
    config = small.model_copy(update=variant | {"head_width": 128})
    rope = layer_spec(config, 0).places
    assert rope is not None
    described = hf_config.config_to_json(config, dtype=torch.float32, eod_id=None)
    positions = torch.arange(9000)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**described))(torch.zeros(1), positions[None])
    for ours, table in zip(rotary_table(rope, 9000), theirs, strict=True):
        torch.testing.assert_close(ours, table[0], atol=3e-3, rtol=0)  # fp32 angles of thousands of radians
        torch.testing.assert_close(ours[:50], table[0, :50], atol=1e-5, rtol=0)


def test_a_config_written_by_transformers_4_reads_the_same():
    """Llama 3.1's published config.json, as it stood before `rope_parameters` existed."""
    config = hf_config.config_from_json(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        },
        Path("config.json"),
    )
    assert config == ModelConfig(
        layers=32, width=4096, heads=32, kv_heads=8, head_width=128, ffn_width=14336, vocab_size=128256,
        max_seq_len=131072, rope_scaling=RopeScaling(kind="llama3", factor=8.0),
    )  # fmt: skip


def test_a_first_generation_llama_config_takes_the_defaults_of_its_class():
    given = {key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "max_position_embeddings")}
    scaling = {"type": "linear", "factor": 2}
    config = hf_config.config_from_json({**given, "model_type": "llama", "rope_scaling": scaling}, Path("config.json"))
    assert (config.kv_heads, config.head_width, config.max_seq_len) == (4, 12, 2048)
    assert (config.rope_theta, config.norm_eps) == (10_000.0, 1e-6)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


def test_weights_in_bf16_are_the_rounded_ones(small, build, tmp_path):
    weights = build(small).state_dict()
    hf.export_folder(small, weights, tmp_path / "out")
    _, again = hf.import_folder(tmp_path / "out")
    assert all(torch.equal(again[name], weights[name].bfloat16()) for name in weights)
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_is_exported_has_the_rights_of_any_new_file(small, build, tmp_path):
    before = os.umask(0o027)
    try:
        hf.export_folder(small, build(small).state_dict(), tmp_path / "out")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {0o640}


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "a/b", ""])
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(UserError, match=r"index\.json: '.*' in weight_map is not the name of a file"):
        hf.stored_in(model_folder(tmp_path))


def test_large_models_are_cut_into_shards_with_an_index(small, build, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SHARD_BYTES", 40_000)
    ours = build(small)
    hf.export_folder(small, ours.state_dict(), tmp_path / "out", dtype=torch.float32)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(file.stat().st_size < 44_000 for file in files)
    assert_same_logits(ours, load_theirs(tmp_path / "out"))
    _, again = load_ours(tmp_path / "out")
    assert torch.equal(again(tokens(small)), ours(tokens(small)))
    monkeypatch.undo()
    hf.export_folder(small, ours.state_dict(), tmp_path / "one", dtype=torch.float32)
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "out" / "model.safetensors")
    files[0].unlink()  # what save_pretrained leaves of a save in shards before one without: the index
    assert torch.equal(load_ours(tmp_path / "out")[1](tokens(small)), ours(tokens(small)))


def test_weights_are_read_only_when_asked_for(small, build, tmp_path, monkeypatch):
    hf.export_folder(small, build(small).state_dict(), tmp_path / "out")
    read, read_into = [], ModelFolder.read_into

    def counted(self: ModelFolder, name: str, start: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        read_into(self, name, start, buffer)

    monkeypatch.setattr(ModelFolder, "read_into", counted)
    _, weights = hf.import_folder(tmp_path / "out")
    assert sum(read) < 8000  # config.json and headers
    read.clear()
    assert weights["embedding.weight"].shape == (101, 48)
    assert weights.part("head.weight", (7, 8), (3, 40)).shape == (3, 40)
    assert read == [101 * 48 * 2, 3 * 48 * 2]


@pytest.fixture
def tokenizer_file(tmp_path) -> Path:
    symbols = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:99], "Ġ"]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "given.json"))
    return tmp_path / "given.json"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_tokenizer_goes_with_the_model_and_encodes_the_same(family, small, build, tokenizer_file, tmp_path):
    config = small.model_copy(update={"family": family, "qk_norm": family == "qwen3"})
    out = tmp_path / "out"
    hf.export_folder(config, build(config).state_dict(), out, tokenizer=tokenizer_file, eod_id=0)
    theirs = AutoTokenizer.from_pretrained(out)
    text = "ABC <|end|>  def 123"
    assert theirs(text)["input_ids"] == Tokenizer.from_file(str(tokenizer_file)).encode(text).ids
    assert theirs.decode(theirs("ABC 12")["input_ids"]) == "ABC 12"
    assert theirs.eos_token_id == 0 and theirs.model_max_length == config.max_seq_len
    assert load_theirs(out).generation_config.eos_token_id == 0


def test_a_tokenizer_that_transformers_would_take_for_another_is_exported_with_a_warning(
    small, build, tokenizer_file, tmp_path
):
    config = small.model_copy(update={"family": "qwen2", "qkv_bias": True})
    weights = build(config).state_dict()
    with pytest.warns(ArgosyWarning, match=r"given\.json: AutoTokenizer .* PreTrainedTokenizerFast\.from_pretrained"):
        hf.export_folder(config, weights, tmp_path / "out", tokenizer=tokenizer_file, eod_id=0)
    text, ids = "ABC 123", Tokenizer.from_file(str(tokenizer_file))
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")(text)["input_ids"] == ids.encode(text).ids

    vocabulary = {symbol: i for i, symbol in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:100]])}
    own = Qwen2Tokenizer(vocabulary, [], unk_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>")
    own.backend_tokenizer.save(str(tmp_path / "own.json"))  # of Qwen2's own kind: no warning
    hf.export_folder(config, weights, tmp_path / "own", tokenizer=tmp_path / "own.json", eod_id=0)


def test_a_folder_that_exists_is_not_touched(small, build, tmp_path):
    with pytest.raises(UserError, match="exists already"):
        hf.export_folder(small, build(small).state_dict(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_export_that_fails_leaves_nothing(small, build, tmp_path):
    weights = build(small).state_dict()
    weights["head.weight"] = weights["head.weight"][:50]
    with pytest.raises(UserError, match=r"head.weight has shape \[50, 48\].*asks for \[101, 48\]"):
        hf.export_folder(small, weights, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"qk_norm": True}, "qk_norm = true and model.family = llama: .*qwen3"),
        ({"family": "qwen2"}, "qkv_bias = false and model.family = qwen2: Qwen2ForCausalLM computes as with true"),
        (QWEN2 | {"attention_bias": True}, "attention_bias = true and model.family = qwen2: .*computes as with false"),
        ({"qkv_bias": True}, "qkv_bias = true and model.family = llama: LlamaForCausalLM computes as with false"),
        ({"family": "qwen3"}, "qk_norm = false and model.family = qwen3: .*llama"),
        ({"moe": EXPERTS}, "moe.experts = 6 and model.family = llama: LlamaForCausalLM computes as with 0"),
        ({"family": "mixtral"}, "moe.experts = 0 and model.family = mixtral.*llama or qwen3"),
        (MIXTRAL | {"moe": EXPERTS | {"balance": "bias"}}, 'moe.balance = "bias".*computes as with "aux"'),
        (DEEPSEEK | {"norm_eps": 1e-5}, "norm_eps = 1e-05 .*computes as with 1e-06"),
        (
            DEEPSEEK | {"moe": DEEPSEEK["moe"] | {"shared_experts": 0}},
            "shared_experts = 0.*wants mla.kv_rank and moe.shared_experts above",
        ),
        (
            QWEN3 | {"family": "dots1", "moe": DEEPSEEK["moe"] | {"shared_experts": 0}},
            "shared_experts = 0 and model.family = dots1: the class wants moe.shared_experts above 0",
        ),
        ({"heads": 5, "kv_heads": 5}, "width = 48 is not a multiple of model.heads = 5"),
        (
            {"family": "llama4_text", "qk_norm": True, "attention": {"norm_weights": False}}
            | {"mup": {"base_width": 12, "base_head_width": 3}},
            "base_head_width = 3 and model.family = llama4_text: .*Choose another",
        ),
    ],
)
def test_models_that_the_family_cannot_express_are_refused(update, message, small, build, tmp_path):
    config = ModelConfig.model_validate(small.model_dump() | update)
    with pytest.raises(UserError, match=message):
        hf.export_folder(config, build(config).state_dict(), tmp_path / "out")


def test_a_tokenizer_of_another_model_is_refused(small, build, tokenizer_file, tmp_path):
    config = small.model_copy(update={"vocab_size": 50})
    with pytest.raises(UserError, match=r"101 tokens and model.vocab_size = 50"):
        hf.export_folder(config, build(config).state_dict(), tmp_path / "out", tokenizer=tokenizer_file)
    engine = Tokenizer.from_file(str(tokenizer_file))
    engine.add_special_tokens(["<image>"])  # Gemma 3's is beyond the embedding of its model without pictures
    engine.save(str(tmp_path / "wider.json"))
    hf.export_folder(small, build(small).state_dict(), tmp_path / "wider", tokenizer=tmp_path / "wider.json", eod_id=0)
    with pytest.raises(UserError, match="no token 4000"):
        hf.export_folder(small, build(small).state_dict(), tmp_path / "out", tokenizer=tokenizer_file, eod_id=4000)


@pytest.fixture
def exported(small, build, tmp_path) -> Path:
    hf.export_folder(small, build(small).state_dict(), tmp_path / "model")
    return tmp_path / "model"


def rewrite_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "drop"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r'model_type = "gpt2".*known are llama \(LlamaForCausalLM\), cwm'),
        ({"model_type": "drop"}, "model_type = null"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = .*not known"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"mlp_bias": True}, "missing model.layers.0.mlp.down_proj.bias and 5 more"),
        ({"use_sliding_window": True}, "use_sliding_window = true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .*known for this class"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types = .*known for this class"),
        ({"quantization_config": {"quant_method": "fp8"}}, 'quantization_config = "fp8"'),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 'rope_scaling.rope_type = "dynamic"'),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.short_factor is missing, and longrope"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [2.0]}},
            "short_divisors has 1 numbers",
        ),
        ({"rope_parameters": {"rope_type": "axial"}}, 'rope_type = "axial": known are default, linear, llama3, yarn'),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters.sliding_attention",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "fastest": 9}}, "rope_scaling.fastest = 9: not known"),
        ({"attn_temperature_tuning": True}, "attn_temperature_tuning = true: not known for this class"),
        ({"hidden_size": "drop"}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, "kv_heads = 3 does not divide heads = 4"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers.*two"),
        ({"num_hidden_layers": 3}, "missing model.layers.2.input_layernorm.weight and 8 more"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight and 8 more has no place"),
        ({"intermediate_size": 81}, r"mlp.gate_proj.weight has shape \[80, 48\].*asks for \[81, 48\]"),
    ],
)
def test_folders_that_we_would_compute_differently_are_refused(changes, message, exported):
    rewrite_config(exported, **changes)
    with pytest.raises(UserError, match=message) as raised:
        hf.import_folder(exported)
    assert str(exported) in str(raised.value)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        (QWEN2, {"attention_bias": True}, "attention_bias = true: only false is known"),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, r"missing model\.layers\.1\.mlp\.down_proj\.weight and 2 more"),
        (QWEN3_MOE, {"num_experts": 7}, "missing model.layers.0.mlp.experts.6.down_proj.weight and 5 more"),
        (DEEPSEEK, {"scoring_func": "softmax"}, 'scoring_func = "softmax": only "sigmoid" is known'),
        (DEEPSEEK, {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05: only 1e-06 is known"),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling.mscale_all_dim"),
        (DEEPSEEK, {"n_group": 3}, "n_group|groups = 3 does not divide"),
    ],
)
def test_folders_of_other_families_that_we_would_compute_differently_are_refused(
    variant, changes, message, small, build, tmp_path
):
    config = ModelConfig.model_validate(small.model_dump() | variant)
    hf.export_folder(config, build(config).state_dict(), tmp_path / "out")
    rewrite_config(tmp_path / "out", **changes)
    with pytest.raises(UserError, match=message):
        hf.import_folder(tmp_path / "out")


def test_biases_of_routers_keep_their_precision_and_a_second_tokens_module_is_read_over(small, build, tmp_path):
    config = ModelConfig.model_validate(small.model_dump() | DEEPSEEK)
    weights = build(config).state_dict()
    weights["blocks.1.mlp.router.bias"] += 1.001
    hf.export_folder(config, weights, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    save_file(stored | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, tmp_path / "out/model.safetensors")
    _, again = hf.import_folder(tmp_path / "out")
    assert torch.equal(again["blocks.1.mlp.router.bias"], weights["blocks.1.mlp.router.bias"])
    assert again["blocks.1.mlp.experts.up"].dtype == torch.bfloat16


def test_a_head_that_is_missing_hints_at_tied_embeddings(small, build, tmp_path):
    tied = small.model_copy(update={"tie_embeddings": True})
    hf.export_folder(tied, build(tied).state_dict(), tmp_path / "out")
    rewrite_config(tmp_path / "out", tie_word_embeddings="drop")
    with pytest.raises(UserError, match=r"missing lm_head.weight. Should tie_word_embeddings be true\?"):
        hf.import_folder(tmp_path / "out")


def test_a_head_stored_beside_the_embedding_it_is_tied_to_is_read_over(small, build, tmp_path):
    hf.export_folder(small, build(small).state_dict(), tmp_path / "out")
    rewrite_config(tmp_path / "out", tie_word_embeddings=True)
    with pytest.raises(UserError, match=r"tie_word_embeddings = true, and lm_head.weight differs from"):
        hf.import_folder(tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    save_file(
        stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, tmp_path / "out/model.safetensors"
    )
    _, weights = hf.import_folder(tmp_path / "out")
    assert "head.weight" not in weights
    del stored["model.embed_tokens.weight"]  # of two names of one tensor, safetensors.torch.save_model keeps the first
    save_file(stored, tmp_path / "out/model.safetensors")
    assert torch.equal(hf.import_folder(tmp_path / "out")[1]["embedding.weight"], stored["lm_head.weight"])


def test_weights_in_integers_are_refused(exported):
    weights = load_file(exported / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, exported / "model.safetensors")
    with pytest.raises(UserError, match=r'model.norm.weight = "I8": quantized'):
        hf.import_folder(exported)


@pytest.mark.parametrize("size", [2**40, 2**62, 2**64])
def test_a_size_that_the_weights_cannot_have_is_refused_before_anything_is_computed_with_it(exported, size):
    rewrite_config(exported, intermediate_size=size)
    with pytest.raises(UserError, match=r"config.json: blocks.0.mlp.gate.weight would have the shape"):
        hf.import_folder(exported)


def test_files_that_are_missing_or_broken_are_named(exported):
    weights = exported / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model.safetensors is not safetensors"):
        hf.import_folder(exported)
    weights.rename(exported / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model.safetensors is not there. Save the \*.bin"):
        hf.import_folder(exported)
    (exported / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not JSON"):
        hf.import_folder(exported)
    (exported / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json is not there"):
        hf.import_folder(exported)
