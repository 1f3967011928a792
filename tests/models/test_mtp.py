"""Multi-token prediction: its loss is that of a plain implementation, and its weights come through Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from argosy.config.model import MoEConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.models import hf
from argosy.models.decoder import Block, Decoder
from argosy.models.microbatch import document_positions
from argosy.models.mtp import PredictionModule, further_tokens
from tiny import decoder

END, WEIGHT = 2, 0.3
EXPERTS = MoEConfig(experts=4, experts_per_token=2, expert_ffn_width=16, first_dense_layers=1, aux_coefficient=0.0)
DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v3", "kv_heads": 4, "norm_eps": 1e-6,
    "mla": {"kv_rank": 16, "q_rank": 24, "rope_width": 8, "nope_width": 16, "value_width": 16},
    "moe": EXPERTS.model_copy(update={"shared_experts": 1, "router": "sigmoid", "balance": "bias"}).model_dump(),
}  # fmt: skip


def rows() -> Tensor:
    """Two rows of three documents, one of them shorter than what the modules read ahead."""
    found = torch.randint(3, 400, (2, 33), generator=torch.Generator().manual_seed(3))
    found[0, [9, 11]], found[1, [1, 20]] = END, END
    return found


def plain_loss(model: Decoder, row: Tensor) -> Tensor:
    """The loss of one row by the paper's equations 21 to 25, document by document, without anything beyond its end."""
    starts = [0, *(row[:-1] == END).nonzero().flatten().tolist()]
    total = torch.zeros(())
    for start, end in zip(starts, [*starts[1:], len(row) - 1], strict=True):
        if start == end:
            continue
        tokens, targets = row[None, start:end], row[None, start + 1 : end + 1]
        cos, sin = next(iter(model.places_to(64, torch.device("cpu")).values()))
        blocks = [block for block in model.blocks.values() if isinstance(block, Block)]
        x = model.embedding(tokens)  # type: ignore[misc]
        for block in blocks[: model.config.layers]:
            x = block(x, (cos[None, : x.shape[1]], sin[None, : x.shape[1]]), None)
        x = model.norm(x)  # type: ignore[misc]
        total = total + F.cross_entropy((x @ model.head_weight.T)[0], targets[0], reduction="sum")
        modules = list(model.mtp.values())
        for ahead, (module, block) in enumerate(zip(modules, blocks[model.config.layers :], strict=True), start=1):
            assert isinstance(module, PredictionModule)
            if tokens.shape[1] <= ahead:
                break
            both = (module.embedding_norm(model.embedding(tokens[:, ahead:])), module.hidden_norm(x[:, :-1]))  # type: ignore[misc]
            x = torch.cat(both, -1) @ module.projection.weight.T
            x = module.norm(block(x, (cos[None, : x.shape[1]], sin[None, : x.shape[1]]), None))
            loss = F.cross_entropy((x @ model.head_weight.T)[0], targets[0, ahead:], reduction="sum")
            total = total + WEIGHT / len(modules) * loss
    return total


@pytest.mark.parametrize(
    "keys",
    [{"mtp": {"modules": 1}}, {"mtp": {"modules": 2}, "tie_embeddings": True}, {"mtp": {"modules": 2}, **DEEPSEEK}],
)
def test_it_adds_the_gradient_of_a_plain_implementation(keys: dict[str, Any]) -> None:
    model, data = decoder(**keys), rows()
    sum(plain_loss(model, row) for row in data).backward()  # type: ignore[union-attr]
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any(name.startswith("mtp.") for name in expected)
    model.zero_grad()
    tokens, targets = data[:, :-1], data[:, 1:]
    positions = document_positions(tokens, END)
    further = further_tokens(tokens, targets, positions, model.config.mtp.modules)
    loss = model(tokens, targets, positions, further_BTn2=further)
    assert loss == model(tokens, targets, positions)  # the value is that of the next token alone
    loss.backward()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-6 * largest, msg=name)


def exported(out: Path, **keys: Any) -> Decoder:
    model = decoder(**{"mtp": {"modules": 1}, **DEEPSEEK, **keys})
    hf.export_folder(model.config, model.state_dict(), out, dtype=torch.float32)
    return model


@pytest.mark.parametrize("keys", [{}, {"tie_embeddings": True}], ids=str)
def test_its_weights_go_out_under_the_published_names_and_come_back_bit_for_bit(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    model = exported(tmp_path / "out", **keys)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    layer = f"model.layers.{model.config.layers}"
    theirs = {"enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens", "self_attn", "mlp"}
    assert {name.split(".")[3] for name in stored if name.startswith(layer)} >= theirs
    assert torch.equal(stored[f"{layer}.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    assert (f"{layer}.shared_head.head.weight" in stored) != model.config.tie_embeddings
    config, weights = hf.import_folder(tmp_path / "out")
    assert config.mtp == model.config.mtp
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_a_copy_that_is_another_embedding_is_refused(tmp_path: Path) -> None:
    exported(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.2.embed_tokens.weight"] = stored["model.layers.2.embed_tokens.weight"] + 1
    save_file(stored, file)
    with pytest.raises(UserError, match=r"model\.layers\.2\.embed_tokens\.weight is not model\.embed_tokens\.weight"):
        dict(hf.import_folder(tmp_path / "out")[1])


def test_a_folder_without_its_weights_is_a_model_without_it(tmp_path: Path) -> None:
    exported(tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    save_file({n: w for n, w in load_file(file).items() if not n.startswith("model.layers.2.")}, file)
    with pytest.warns(ArgosyWarning, match="num_nextn_predict_layers = 1"):
        config, _ = hf.import_folder(tmp_path / "out")
    assert config.mtp.modules == 0


def test_a_class_without_it_is_not_exported_to(tmp_path: Path) -> None:
    model = decoder(mtp={"modules": 1})
    with pytest.raises(UserError, match=r"model\.mtp\.modules = 1"):
        hf.export_folder(model.config, model.state_dict(), tmp_path / "out")
