"""GGUF files, as llama.cpp itself and transformers read them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.models import hf
from argosy.models.decoder import Decoder
from argosy.models.gguf_file import ARCHITECTURES, export_gguf
from argosy.models.initialize import materialize
from argosy.models.lazy_weights import HeldWeights, LazyWeights
from llama_cpp import LlamaCpp

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = SIZES | {"head_dim": 32}
"""Heads are wider than the model's width over their number: what a reader guesses from sizes is wrong."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
STRETCHED = {"factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
LLAMA3 = STRETCHED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
THEIRS: dict[str, Any] = {
    "llama": LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**WIDE, sliding_window=None),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, rope_parameters=STRETCHED | {"rope_type": "yarn"}),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3": Qwen3Config(**WIDE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**WIDE, **EXPERTS, norm_topk_prob=True),
    "gemma": GemmaConfig(**WIDE),
    "gemma2": Gemma2Config(**WIDE, query_pre_attn_scalar=32, sliding_window=16),
    "gemma3_text": Gemma3TextConfig(
        **WIDE | {"num_hidden_layers": 7}, query_pre_attn_scalar=32, sliding_window=16, rope_parameters=GEMMA3_ROPE
    ),
    "olmo2": Olmo2Config(**SIZES),
    "olmoe": OlmoeConfig(**SIZES | {"num_key_value_heads": 4}, num_experts=4, num_experts_per_tok=2),
    "granite": GraniteConfig(
        **SIZES, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.1, logits_scaling=2.0
    ),
    "smollm3": SmolLM3Config(**SIZES),
    "seed_oss": SeedOssConfig(**WIDE),
    "ernie4_5": Ernie4_5Config(**WIDE),
    "hunyuan_v1_dense": HunYuanDenseV1Config(**WIDE),
}
"""A small model of each family that has an architecture in llama.cpp."""
IDS = torch.randint(3, SIZES["vocab_size"], (1, 48), generator=torch.Generator().manual_seed(1))


def saved_theirs(name: str, folder: Path) -> torch.Tensor:
    """Save the model THEIRS[name] with random weights, norms and biases too. Return its logits."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(deepcopy(THEIRS[name])).eval()
    with torch.no_grad():
        for weight, parameter in theirs.named_parameters():
            if "mlp.gate" in weight or "experts" in weight:  # nothing initializes some of these
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        theirs.save_pretrained(folder)
        logits: torch.Tensor = theirs(IDS).logits[0]
    return logits


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the root mean square of the difference over that of what is expected."""
    return float((found - expected).norm() / expected.norm())


def test_each_architecture_is_held_against_llama_cpp() -> None:
    assert THEIRS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", THEIRS)
def test_llama_cpp_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    expected = saved_theirs(name, tmp_path / "theirs")
    config, weights = hf.import_folder(tmp_path / "theirs")
    export_gguf(config, weights, tmp_path / "gguf", "f16")
    with LlamaCpp(tmp_path / "gguf" / "model-F16.gguf") as read:
        assert far(read.logits(IDS[0].tolist()), expected) < 5e-3  # it rounds to fp16 between layers too


@pytest.mark.parametrize(("kind", "most"), {"f16": 1e-3, "bf16": 1e-2, "q8_0": 2e-2, "q4_0": 0.2}.items())
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_each_type_is_read_back_to_its_digits(name: str, kind: Any, most: float, tmp_path: Path) -> None:
    plain = SIZES | {"initializer_range": 0.02}
    config = LlamaConfig(**plain) if name == "llama" else Qwen3Config(**plain, head_dim=128)  # it reads no other
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    export_gguf(*hf.import_folder(tmp_path / "theirs"), tmp_path / "gguf", kind)
    file = f"model-{kind.upper()}.gguf"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file=file, dtype=torch.float32).eval()
    with torch.no_grad():
        expected, found = theirs(IDS).logits[0], read(IDS).logits[0]
    with LlamaCpp(tmp_path / "gguf" / file) as llama:
        also_found = llama.logits(IDS[0].tolist())
    assert far(found, expected) < most and far(also_found, expected) < most


def small(**settings: Any) -> tuple[ModelConfig, LazyWeights]:
    config = ModelConfig.model_validate({"layers": 2, "width": 64, "vocab_size": 40, "ffn_width": 64} | settings)
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), 0)
    return config, HeldWeights(model.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "cohere"}, "model.family = cohere: --format gguf knows llama, mistral"),
        ({"family": "llama", "qk_norm": True}, "model.qk_norm = True: llama.cpp's architecture for llama"),
        ({"family": "mistral", "attention": {"layers": ["sliding"], "window": 16}}, "model.attention.layers"),
        ({"family": "olmo2", "tie_embeddings": True, "qk_norm": True}, "model.attention.norm_over = head"),
        ({"family": "qwen2", "qkv_bias": True, "rope_scaling": {"kind": "llama3"}}, "rope_scaling.kind = llama3"),
        ({"family": "llama", "rope_scaling": {"kind": "yarn", "factor": 4, "beta_fast": 8}}, "rope_scaling = yarn"),
        ({"family": "mixtral", "moe": {"experts": 2, "balance": "bias"}}, "model.moe.balance = bias"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        export_gguf(*small(**settings), tmp_path / "gguf")
    assert not any(tmp_path.iterdir())


def test_a_window_that_no_text_reaches_is_none(tmp_path: Path) -> None:
    attention = {"layers": ["sliding"], "window": 64}
    export_gguf(*small(family="mistral", attention=attention, max_seq_len=64), tmp_path / "gguf")
    assert (tmp_path / "gguf" / "model-BF16.gguf").is_file()


def test_rows_that_are_no_whole_blocks_stay_in_sixteen_bits(tmp_path: Path) -> None:
    from gguf import GGUFReader

    export_gguf(*small(ffn_width=40), tmp_path / "gguf", "q4_0")
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "gguf" / "model-Q4_0.gguf").tensors}
    assert types["blk.0.ffn_down.weight"] == "F16" and types["blk.0.ffn_up.weight"] == "Q4_0"
    assert types["token_embd.weight"] == types["output.weight"] == "Q8_0" and types["output_norm.weight"] == "F32"
