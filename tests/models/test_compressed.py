"""Compressed weights, as compressed-tensors itself makes them and transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Phi3Config, Qwen3Config, Qwen3MoeConfig

from argosy.data.stores.model_folder import CompressedFormat
from argosy.errors import UserError
from argosy.models import hf
from argosy.models.compressed import COMPRESSIONS

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
THEIRS = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "phi3": Phi3Config(**SIZES | {"vocab_size": 32064}),  # its class pads with token 32000
    "gemma2": Gemma2Config(**SIZES, head_dim=32),
}
IDS = torch.randint(3, 101, (1, 48), generator=torch.Generator().manual_seed(1))
MOST = {"fp8": 0.1, "int8": 0.02, "int4": 0.25}
"""Root mean square of the change of logits over that of logits, for weights at random, which are the hardest."""


def saved(name: str, folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(THEIRS[name]).eval()
    theirs.save_pretrained(folder)
    return theirs


def by_compressed_tensors(weight: Tensor, preset: str) -> Tensor:
    """Return a weight rounded as the package itself does it."""
    from compressed_tensors.quantization import preset_name_to_scheme  # here: all that run tests collect this module
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    settings = preset_name_to_scheme(preset, ["Linear"]).weights
    assert settings is not None
    grouped = weight.unflatten(1, (-1, settings.group_size or weight.shape[1]))
    scale, zero = calculate_qparams(grouped.amin(2), grouped.amax(2), settings)
    return fake_quantize(weight, scale, zero, settings)


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_transformers_computes_with_the_weights_that_compressed_tensors_would_make(
    name: str, kind: CompressedFormat, tmp_path: Path
) -> None:
    theirs = saved(name, tmp_path / "theirs")
    before = theirs(IDS).logits
    config, weights = hf.import_folder(tmp_path / "theirs")
    out, compression = tmp_path / "out", COMPRESSIONS[kind]
    hf.export_folder(config, weights, out, dtype=torch.float32, compression=compression)
    read, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    after = read.eval()(IDS).logits  # it unpacks weights when it first computes
    expected = {
        n: by_compressed_tensors(m.weight, compression.preset)
        for n, m in theirs.named_modules()
        if isinstance(m, torch.nn.Linear) and n != "lm_head"
    }
    for module, weight in expected.items():
        torch.testing.assert_close(read.get_submodule(module).weight, weight, rtol=1e-6, atol=1e-8)
    assert 0 < (after - before).norm() / before.norm() < MOST[kind]


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_config_json_says_the_preset(kind: CompressedFormat) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    compression = COMPRESSIONS[kind]
    said = QuantizationConfig.model_validate(json.loads(json.dumps(compression.settings(["lm_head"]))))
    scheme = said.config_groups["group_0"]
    preset = preset_name_to_scheme(compression.preset, ["Linear"])
    assert not isinstance(scheme, list)
    assert (scheme.weights, scheme.input_activations) == (preset.weights, preset.input_activations)
    assert said.ignore == ["lm_head"] and said.format == compression.format


def test_the_files_are_as_small_as_their_bits(tmp_path: Path) -> None:
    config, weights = hf.import_folder(_saved_at(tmp_path / "theirs"))
    sizes = {}
    for kind, compression in COMPRESSIONS.items():
        hf.export_folder(config, weights, tmp_path / kind, dtype=torch.bfloat16, compression=compression)
        sizes[kind] = (tmp_path / kind / "model.safetensors").stat().st_size
        assert json.loads((tmp_path / kind / "config.json").read_text())["torch_dtype"] == "bfloat16"
    linear = sum(weights[name].numel() for name in weights if weights[name].ndim == 2 and name.startswith("blocks"))
    assert sizes["fp8"] == pytest.approx(sizes["int8"], rel=0.01)
    assert sizes["int8"] - sizes["int4"] == pytest.approx(linear / 2, rel=0.05)


def _saved_at(folder: Path) -> Path:
    saved("llama", folder)
    return folder


def test_what_would_not_be_read_is_refused(tmp_path: Path) -> None:
    odd = LlamaConfig(**SIZES | {"intermediate_size": 192})
    AutoModelForCausalLM.from_config(odd).save_pretrained(tmp_path / "odd")
    config, weights = hf.import_folder(tmp_path / "odd")
    with pytest.raises(UserError, match=r"down_proj.weight has 192 inputs.*int8"):
        hf.export_folder(config, weights, tmp_path / "out", compression=COMPRESSIONS["int4"])
    experts = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    AutoModelForCausalLM.from_config(experts).save_pretrained(tmp_path / "experts")
    config, weights = hf.import_folder(tmp_path / "experts")
    with pytest.raises(UserError, match=r"model.family = qwen3_moe"):
        hf.export_folder(config, weights, tmp_path / "out", compression=COMPRESSIONS["int8"])
    assert not (tmp_path / "out").exists()
