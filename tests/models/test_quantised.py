"""Quantised weights become the numbers that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from argosy.config.model import ModelConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.models import hf, quantised

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
    monkeypatch.setattr(quantised, "ROWS_AT_ONCE", 7)
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
        ({"quant_method": "awq"}, 'quantization_config = "awq": only fp8 in blocks and mxfp4'),
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
