"""An adapter in PEFT's folder: what it computes there, how it comes back, and what could be none of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from argosy.config.model import ModelConfig
from argosy.config.train import LoraConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.models.adapters import merged
from argosy.models.hf import folded_weight
from argosy.models.peft_adapter import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    PEFT_PREFIX,
    export_adapter,
    import_adapter,
    peft_modules,
)
from argosy.plan.parameters import adapter_of, parameter_table
from tiny import model_config

RANK, ALPHA = 2, 6.0
LAYER = f"{PEFT_PREFIX}model.layers.0."


def lora(kind: str = "lora") -> LoraConfig:
    return LoraConfig.model_validate({"rank": RANK, "alpha": ALPHA, "kind": kind})


def adapter_for(model: ModelConfig, *ends: str) -> dict[str, Tensor]:
    """An adapter of random numbers on the weights whose names end so."""
    numbers, found = torch.Generator().manual_seed(1), {}
    for name, parameter in parameter_table(model).items():
        if parameter.is_linear and name.endswith(ends):
            *stack, rows, columns = parameter.shape
            found[f"{adapter_of(name)}.a"] = torch.randn(*stack, RANK, columns, generator=numbers)
            found[f"{adapter_of(name)}.b"] = torch.randn(*stack, rows, RANK, generator=numbers)
    return found


def exported(folder: Path, model: ModelConfig, adapter: dict[str, Tensor], kind: str = "lora") -> dict[str, Any]:
    """Export it, and return its adapter_config.json."""
    export_adapter(model, lora(kind), adapter, weights_of(model), folder)
    found: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text())
    return found


def weights_of(model: ModelConfig) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=numbers) for name, p in parameter_table(model).items()}


def test_a_plain_adapter_has_our_matrices_by_their_names(tmp_path: Path) -> None:
    model = model_config()
    adapter = adapter_for(model, "attention.q.weight", "mlp.down.weight")
    said = exported(tmp_path / "out", model, adapter)
    stored = load_file(tmp_path / "out" / ADAPTER_TENSORS)
    inner = adapter[f"{adapter_of('blocks.0.mlp.down.weight')}.a"]
    assert torch.equal(stored[f"{LAYER}mlp.down_proj.lora_A.weight"], inner)
    assert len(stored) == 2 * 2 * model.layers
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (RANK, ALPHA, ["down_proj", "q_proj"])
    assert (said["rank_pattern"], said["use_rslora"], said["use_dora"]) == ({}, False, False)


def test_a_url_is_a_place_to_export_to(tmp_path: Path) -> None:
    model = model_config()
    (tmp_path / "out").mkdir()  # a store's folder
    where = f"file://{tmp_path}/out"
    export_adapter(model, lora(), adapter_for(model, "attention.q.weight"), weights_of(model), where)
    assert import_adapter(tmp_path / "out", model, weights_of(model))[0].targets == ("q",)


def test_a_target_of_some_layers_alone_is_named_whole(tmp_path: Path) -> None:
    adapter = adapter_for(model_config(), "blocks.1.attention.o.weight")
    said = exported(tmp_path / "out", model_config(), adapter)
    assert said["target_modules"] == ["model.layers.1.self_attn.o_proj"]
    said |= {
        "target_modules": ["o_proj"],
        "layers_to_transform": [1],
        "exclude_modules": "lm_head",
    }  # as PEFT also says it
    (tmp_path / "out" / ADAPTER_CONFIG).write_text(json.dumps(said))
    found, _ = import_adapter(tmp_path / "out", model_config(), weights_of(model_config()))
    assert found.targets == ("blocks.1.attention.o",)


@pytest.mark.parametrize(("kind", "alpha"), [("lora", 2 * ALPHA), ("rslora", 2**0.5 * ALPHA)])
def test_fused_matrices_get_a_block_for_each_of_ours(tmp_path: Path, kind: str, alpha: float) -> None:
    """phi3 has gate and up in one: its product is that of both adapters, at the same factor."""
    model = model_config(family="phi3")
    gate, up = (adapter_of(f"blocks.0.mlp.{name}.weight") for name in ("gate", "up"))
    adapter = adapter_for(model, "mlp.gate.weight", "mlp.up.weight")
    said = exported(tmp_path / "out", model, adapter, kind)
    name = "model.layers.0.mlp.gate_up_proj"
    assert said["rank_pattern"][name] == 2 * RANK and said["alpha_pattern"][name] == pytest.approx(alpha)
    scale = said["alpha_pattern"][name] / (said["rank_pattern"][name] ** (0.5 if kind == "rslora" else 1.0))
    assert scale == pytest.approx(lora(kind).scale)
    stored = load_file(tmp_path / "out" / ADAPTER_TENSORS)
    product = stored[f"{PEFT_PREFIX}{name}.lora_B.weight"] @ stored[f"{PEFT_PREFIX}{name}.lora_A.weight"]
    both = [adapter[f"{part}.b"] @ adapter[f"{part}.a"] for part in (gate, up)]
    torch.testing.assert_close(product, torch.cat(both))
    again, tensors = import_adapter(tmp_path / "out", model, weights_of(model))
    assert again == lora(kind).model_copy(update={"targets": ("gate", "up")})
    assert tensors.keys() == adapter.keys() and all(torch.equal(tensors[n], adapter[n]) for n in tensors)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", [("q", "v"), ("q", "k"), ("k", "v"), ("q", "k", "v")])
def test_an_adapter_on_some_of_what_is_fused_comes_back(tmp_path: Path, kind: str, targets: tuple[str, ...]) -> None:
    model = model_config(family="phi3")
    adapter = adapter_for(model, *(f"attention.{name}.weight" for name in targets))
    if kind == "dora":
        outer = [(name, tensor) for name, tensor in adapter.items() if name.endswith(".b")]
        adapter |= {f"{name.removesuffix('.b')}.magnitude": torch.full((len(tensor),), 0.5) for name, tensor in outer}
    exported(tmp_path / "out", model, adapter, kind)
    again, tensors = import_adapter(tmp_path / "out", model, weights_of(model))
    assert set(again.targets) == set(targets) and tensors.keys() == adapter.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, adapter[name])


def test_lengths_of_dora_are_whole_there_and_what_was_added_here(tmp_path: Path) -> None:
    model, name = model_config(), "blocks.0.attention.q.weight"
    weights = weights_of(model)
    adapter = adapter_for(model, name) | {f"{adapter_of(name)}.magnitude": torch.full((32,), 0.5)}
    export_adapter(model, lora("dora"), adapter, weights, tmp_path / "out")
    stored = load_file(tmp_path / "out" / ADAPTER_TENSORS)[f"{LAYER}self_attn.q_proj.lora_magnitude_vector"]
    torch.testing.assert_close(stored, weights[name].norm(dim=-1) + 0.5)
    _, tensors = import_adapter(tmp_path / "out", model, weights)
    torch.testing.assert_close(tensors[f"{adapter_of(name)}.magnitude"], torch.full((32,), 0.5))


def test_an_adapter_beside_multipliers_of_mup_has_them_as_the_exported_weights_do(tmp_path: Path) -> None:
    model, name = model_config(mup={"base_width": 16, "base_head_width": 2}), "blocks.0.attention.q.weight"
    weights, adapter = weights_of(model), adapter_for(model_config(), name)
    a, b = (adapter[f"{adapter_of(name)}.{part}"] for part in "ab")
    adapter[f"{adapter_of(name)}.magnitude"] = grown = torch.full((32,), 0.5)
    exported(tmp_path / "out", model, adapter, "dora")
    stored = load_file(tmp_path / "out" / ADAPTER_TENSORS)
    parts = [stored[f"{LAYER}self_attn.q_proj.{part}"] for part in ("lora_A.weight", "lora_B.weight")]
    theirs, magnitude = (
        folded_weight(name, weights[name], model, torch.float32),
        f"{LAYER}self_attn.q_proj.lora_magnitude_vector",
    )
    found = merged(theirs, *parts, stored[magnitude] - theirs.norm(dim=-1), lora().scale)
    ours = merged(weights[name], a, b, grown, lora().scale)
    torch.testing.assert_close(found, folded_weight(name, ours, model, torch.float32))
    _, tensors = import_adapter(tmp_path / "out", model, weights)
    torch.testing.assert_close(tensors, adapter)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A sound folder, of which tests change something."""
    exported(tmp_path / "peft", model_config(), adapter_for(model_config(), "attention.q.weight"))
    return tmp_path / "peft"


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    stored = load_file(folder / ADAPTER_TENSORS)
    stored |= {} if tensor is None else {f"{LAYER}{name}": tensor}
    if tensor is None:
        del stored[f"{LAYER}{name}"]
    save_file(stored, folder / ADAPTER_TENSORS)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("self_attn.q_proj.lora_B.weight", None, "model.layers.0.self_attn.q_proj has lora_A.weight, and needs"),
        ("self_attn.q_proj.lora_A.weight", torch.zeros(RANK, 31), "shape [2, 31] and [32, 2], and rank 2 beside this"),
        ("self_attn.q_proj.lora_A.weight", torch.zeros(3, 32), "asks for [2, 32] and [32, 2]. Name the weights"),
        ("self_attn.q_proj.lora_A.weight", torch.zeros(0, 32), "shape [0, 32] and [32, 2], and rank 2 beside this"),
        ("self_attn.q_proj.lora_A.weight", torch.tensor(1.0), "shape [] and [32, 2], and rank 2 beside this"),
        ("self_attn.x_proj.lora_A.weight", torch.zeros(1), "x_proj.lora_A.weight has no place in this model (llama)"),
        ("embed_tokens.weight", torch.zeros(1), "or merge it with PEFT if that saved embedding or head too"),
    ],
)  # fmt: skip
def test_tensors_of_another_model_are_refused(there: Path, name: str, tensor: Tensor | None, said: str) -> None:
    change(there, name, tensor)
    with pytest.raises(UserError) as refused:
        import_adapter(there, model_config(), weights_of(model_config()))
    assert f"{there / ADAPTER_TENSORS}: " in str(refused.value) and said in str(refused.value)


@pytest.mark.parametrize("root", [1.0, 0.5], ids=["lora", "rslora"])
def test_modules_may_have_ranks_and_factors_of_their_own(there: Path, root: float) -> None:
    said = json.loads((there / ADAPTER_CONFIG).read_text()) | {"use_rslora": root == 0.5}
    said |= {"rank_pattern": {r".*\.1\..*q_proj": 3}, "alpha_pattern": {"layers.1.self_attn.q_proj": 8.0, "q_proj": 2}}
    (there / ADAPTER_CONFIG).write_text(json.dumps(said))
    numbers = [(torch.randn(rank, 32), torch.randn(32, rank)) for rank in (RANK, 3)]
    names = [f"{PEFT_PREFIX}model.layers.{n}.self_attn.q_proj.lora" for n in range(2)]
    parts = zip(names, numbers, strict=True)
    save_file(
        {f"{name}_{n}.weight": t for name, ab in parts for n, t in zip("AB", ab, strict=True)}, there / ADAPTER_TENSORS
    )
    model = model_config()
    found, tensors = import_adapter(there, model, weights_of(model))
    assert found.rank == 3
    for number, ((inner, outer), scale) in enumerate(zip(numbers, (2 / RANK**root, 8 / 3**root), strict=True)):
        name = adapter_of(f"blocks.{number}.attention.q.weight")
        ours = found.scale * tensors[f"{name}.b"] @ tensors[f"{name}.a"]
        torch.testing.assert_close(ours, scale * outer @ inner)


@pytest.mark.parametrize(
    "pattern", [{"q_proj": 0}, {"q_proj": "8"}, {"(q_proj": 8}, {"(.+)+x": 8}, {".*.*.*.*x": 8}, [8]], ids=str
)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_says_no_number_is_refused(there: Path, key: str, pattern: object) -> None:
    said = json.loads((there / ADAPTER_CONFIG).read_text())
    (there / ADAPTER_CONFIG).write_text(json.dumps(said | {key: pattern}))
    with pytest.raises(UserError, match=rf"{key} = .*it must give positive numbers to names"):
        import_adapter(there, model_config(), weights_of(model_config()))


@pytest.mark.parametrize("shape", [(1,), (31,), (32, 1)])
def test_lengths_of_another_model_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model, name = model_config(), "blocks.0.attention.q.weight"
    adapter = adapter_for(model, name) | {f"{adapter_of(name)}.magnitude": torch.full((32,), 0.5)}
    export_adapter(model, lora("dora"), adapter, weights_of(model), tmp_path / "out")
    change(tmp_path / "out", "self_attn.q_proj.lora_magnitude_vector", torch.zeros(shape))
    with pytest.raises(UserError, match=r"q_proj\.lora_magnitude_vector has shape .* ask for \[32\]"):
        import_adapter(tmp_path / "out", model, weights_of(model))


def test_what_is_no_folder_of_peft_or_no_safetensors_is_refused(there: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no adapter in PEFT's format there\. Give a folder with adapter_config\.json"):
        import_adapter(tmp_path, model_config(), {})
    (there / ADAPTER_TENSORS).write_bytes(b"no tensors")
    with pytest.raises(
        UserError, match=r"adapter_model\.safetensors is not safetensors: .*Download or export it again"
    ):
        import_adapter(there, model_config(), {})


def test_nothing_is_written_over(there: Path) -> None:
    with pytest.raises(UserError, match=r"exists already\. Choose another folder, or remove it"):
        export_adapter(model_config(), lora(), {}, {}, there)


def test_every_linear_layer_of_blocks_has_a_module() -> None:
    names = [module.name for module in peft_modules(model_config(layers=1))]
    attention = [f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"]
    assert sorted(names) == sorted([*attention, *(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down"))])


def test_rslora_of_experts_is_plain_lora_of_the_same_scale_there(tmp_path: Path) -> None:
    model = model_config(family="mixtral", moe={"experts": 4, "expert_ffn_width": 16})
    said = exported(tmp_path / "out", model, adapter_for(model, "experts.down"), "rslora")
    assert (said["use_rslora"], said["lora_alpha"] / said["r"]) == (False, pytest.approx(lora("rslora").scale))


def test_adapters_that_peft_takes_for_those_of_experts_are_told(tmp_path: Path) -> None:
    moe = {"experts": 4, "expert_ffn_width": 16, "shared_experts": 1, "shared_gate": True}
    model = model_config(family="qwen2_moe", moe=moe)
    with pytest.warns(ArgosyWarning, match=r"PEFT leaves out the adapters of \S*shared_expert.down_proj and 1 more"):
        exported(tmp_path / "out", model, adapter_for(model, "experts.down", "shared.down.weight"))
    exported(tmp_path / "experts", model, adapter_for(model, "experts.down"))


def test_experts_that_are_one_tensor_there_have_no_adapters() -> None:
    moe = {"experts": 4, "expert_ffn_width": 16, "router_bias": True, "expert_bias": True}
    model = model_config(
        family="gpt_oss", moe=moe, activation="clamped_swiglu", ffn_limit=7.0, attention={"sinks": True}
    )
    with pytest.raises(
        UserError, match=r"gpt_oss models of transformers keep all experts in one tensor.*checkpoint merge"
    ):
        list(peft_modules(model))
