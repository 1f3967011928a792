"""Quantised weights become the numbers that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Phi3Config, Qwen3Config, Qwen3MoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from argosy.config.model import ModelConfig
from argosy.data.stores.model_folder import CompressedFormat
from argosy.errors import ArgosyWarning, UserError
from argosy.models import hf, quantised
from argosy.models.quantised import WEIGHT_COMPRESSIONS

BLOCK = [16, 8]
GPT_OSS = {
    "family": "gpt_oss", "attention_bias": True, "activation": "clamped_swiglu", "ffn_limit": 7.0, "ffn_width": 64,
    "width": 64, "attention": {"sinks": True},
    "moe": {"experts": 3, "experts_per_token": 2, "expert_ffn_width": 64, "router_bias": True, "expert_bias": True,
            "aux_coefficient": 0.001},
}  # fmt: skip


def rewrite(folder: Path, quantization: dict[str, object] | None) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))


@pytest.fixture
def fp8(small, build, tmp_path) -> Path:
    """A Llama whose matrices are in fp8, in blocks that its width is not a multiple of in both dims."""
    folder = tmp_path / "fp8"
    hf.export_folder(small, build(small).state_dict(), folder)
    weights = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(3)
    for name in [name for name in weights if "proj" in name]:
        rows, columns = weights[name].shape
        weights[name] = (torch.randn(rows, columns, generator=draw) * 50).to(torch.float8_e4m3fn)
        grid = -(-rows // BLOCK[0]), -(-columns // BLOCK[1])
        weights[f"{name}_scale_inv"] = torch.rand(grid, generator=draw) * 0.01
    save_file(weights, folder / "model.safetensors")
    rewrite(folder, {"quant_method": "fp8", "weight_block_size": BLOCK, "fmt": "e4m3"})
    return folder


def test_fp8_blocks_become_the_numbers_of_transformers(fp8, monkeypatch):
    monkeypatch.setattr(quantised, "QUANTISE_ROWS", 7)
    with pytest.warns(ArgosyWarning, match=r"fp8: the weights are in fp8, and are dequantised to bf16"):
        _, weights = hf.import_folder(fp8)
    stored = load_file(fp8 / "model.safetensors")
    for ours, theirs in {
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "attention.q": "self_attn.q_proj",
    }.items():
        name = f"model.layers.1.{theirs}.weight"
        reference = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.bfloat16)
        assert torch.equal(weights[f"blocks.1.{ours}.weight"], reference)
        assert torch.equal(weights.part(f"blocks.1.{ours}.weight", (5, 3), (20, 9)), reference[5:25, 3:12])


def test_blocks_that_a_matrix_does_not_fill_have_its_part_of_the_scale(fp8):
    rewrite(fp8, {"quant_method": "fp8", "weight_block_size": [17, 9]})
    stored = load_file(fp8 / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for scaled in [n for n in stored if n.endswith("_scale_inv")]:
        rows, columns = stored[scaled.removesuffix("_scale_inv")].shape
        stored[scaled] = torch.rand(-(-rows // 17), -(-columns // 9))
    save_file(stored, fp8 / "model.safetensors")
    with pytest.warns(ArgosyWarning):
        _, weights = hf.import_folder(fp8)
    scales = stored[f"{name}_scale_inv"].repeat_interleave(17, 0)[:80].repeat_interleave(9, 1)[:, :48]
    assert torch.equal(weights["blocks.0.mlp.up.weight"], (stored[name].float() * scales).bfloat16())


@pytest.mark.filterwarnings("ignore::argosy.errors.ArgosyWarning")
def test_mxfp4_becomes_the_numbers_of_transformers(small, build, tmp_path):
    config = ModelConfig.model_validate(small.model_dump() | GPT_OSS)
    hf.export_folder(config, build(config).state_dict(), tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    draw, reference = torch.Generator().manual_seed(3), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = weights.pop(name).shape
        shape = (experts, columns, rows // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(110, 130, shape, dtype=torch.uint8, generator=draw)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        reference[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    save_file(weights, tmp_path / "out/model.safetensors")
    rewrite(tmp_path / "out", {"quant_method": "mxfp4"})
    _, found = hf.import_folder(tmp_path / "out")
    hf.export_folder(config, found, tmp_path / "back", dtype=None)
    back = load_file(tmp_path / "back/model.safetensors")
    assert all(torch.equal(back[name], expected) for name, expected in reference.items()) and len(reference) == 4
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    one = found.part("blocks.1.mlp.experts.up", (1, 4, 5), (2, 10, 11))
    assert torch.equal(one, reference["model.layers.1.mlp.experts.gate_up_proj"][1:, 5:16, 9:29:2].transpose(1, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq"}, 'quantization_config = "awq": only fp8 in blocks and mxfp4 .* lora.base = "nf4"'),
        ({"quant_method": "fp8"}, 'quantization_config = "fp8": weight_block_size must give'),
        ({"quant_method": "fp8", "weight_block_size": [16, 0]}, "weight_block_size must give"),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, r"proj\.weight_scale_inv = \[3, 10\]: scales of"),
        ({"quant_method": "mxfp4"}, 'weight = "F8_E4M3": quantized|no place in this model'),
    ],
)
def test_settings_that_do_not_fit_the_weights_are_refused(fp8, settings, message):
    rewrite(fp8, settings)
    with pytest.raises(UserError, match=message):
        hf.import_folder(fp8)


def test_a_weight_without_its_scales_is_named(fp8):
    weights = load_file(fp8 / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(weights, fp8 / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: model.layers.1.mlp.up_proj.weight = .*_inv are missing"):
        hf.import_folder(fp8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w["_scale_inv"].to(torch.uint16), r"_scale_inv = .U16.: scales are F32 or"),
        (lambda w: w["_scale_inv"].long(), r"_scale_inv = .I64.: scales are F32 or"),
        (lambda w: w[""].flatten(), r"proj.weight = \[\d+\]: only matrices are in fp8"),
    ],
)
def test_fp8_of_another_kind_is_refused(fp8, change, message):
    weights, name = load_file(fp8 / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    changed = change({"": weights[name], "_scale_inv": weights[f"{name}_scale_inv"]})
    weights[name if changed.dtype == torch.float8_e4m3fn else f"{name}_scale_inv"] = changed
    save_file(weights, fp8 / "model.safetensors")
    with pytest.raises(UserError, match=message):
        hf.import_folder(fp8)


@pytest.mark.filterwarnings("ignore::argosy.errors.ArgosyWarning")
def test_a_block_larger_than_any_matrix_is_one_scale(fp8):
    weights = load_file(fp8 / "model.safetensors")
    weights |= {name: torch.full((1, 1), 0.5) for name in weights if name.endswith("_scale_inv")}
    save_file(weights, fp8 / "model.safetensors")
    rewrite(fp8, {"quant_method": "fp8", "weight_block_size": [2**31 - 1, 2**31 - 1]})
    expected = (weights["model.layers.1.mlp.up_proj.weight"].float() * 0.5).bfloat16()
    assert torch.equal(hf.import_folder(fp8)[1]["blocks.1.mlp.up.weight"], expected)


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


@pytest.mark.parametrize("kind", WEIGHT_COMPRESSIONS)
@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_transformers_computes_with_the_weights_that_compressed_tensors_would_make(
    name: str, kind: CompressedFormat, tmp_path: Path
) -> None:
    theirs = saved(name, tmp_path / "theirs")
    before = theirs(IDS).logits
    config, weights = hf.import_folder(tmp_path / "theirs")
    out, compression = tmp_path / "out", WEIGHT_COMPRESSIONS[kind]
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


@pytest.mark.parametrize("kind", WEIGHT_COMPRESSIONS)
def test_config_json_says_the_preset(kind: CompressedFormat) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    compression = WEIGHT_COMPRESSIONS[kind]
    said = QuantizationConfig.model_validate(json.loads(json.dumps(compression.settings(["lm_head"]))))
    scheme = said.config_groups["group_0"]
    preset = preset_name_to_scheme(compression.preset, ["Linear"])
    assert not isinstance(scheme, list)
    assert (scheme.weights, scheme.input_activations) == (preset.weights, preset.input_activations)
    assert said.ignore == ["lm_head"] and said.format == compression.format


def test_the_files_are_as_small_as_their_bits(tmp_path: Path) -> None:
    config, weights = hf.import_folder(_saved_at(tmp_path / "theirs"))
    sizes = {}
    for kind, compression in WEIGHT_COMPRESSIONS.items():
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
        hf.export_folder(config, weights, tmp_path / "out", compression=WEIGHT_COMPRESSIONS["int4"])
    experts = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    AutoModelForCausalLM.from_config(experts).save_pretrained(tmp_path / "experts")
    config, weights = hf.import_folder(tmp_path / "experts")
    with pytest.raises(UserError, match=r"model.family = qwen3_moe"):
        hf.export_folder(config, weights, tmp_path / "out", compression=WEIGHT_COMPRESSIONS["int8"])
    assert not (tmp_path / "out").exists()
