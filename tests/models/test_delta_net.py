"""Gated delta-net: in chunks as token by token, whatever documents are in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from argosy import compiler
from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.models import hf
from argosy.models.decoder import Decoder
from argosy.models.delta_net import chunked_delta_rule, delta_scan, delta_step, places_in, short_convolution
from argosy.models.hf_config import config_to_json
from argosy.models.initialize import materialize

ROWS, LENGTH, KEY_HEADS, HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 150, 2, 4, 8, 12
STARTS = {"whole rows": [0, 150], "documents": [0, 13, 64, 100, 150, 151, 290]}  # at chunks' bounds, and beside them
NET = {"key_heads": 2, "value_heads": 4, "key_width": 8, "value_width": 12}
SMALL: dict[str, Any] = {
    "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_width": 8, "ffn_width": 48, "vocab_size": 101,
    "attention": {"layers": ["linear", "full"]}, "delta_net": NET,
}  # fmt: skip


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    q, k = (F.normalize(torch.randn(ROWS, LENGTH, KEY_HEADS, KEY_WIDTH), dim=-1) for _ in range(2))
    v, beta = torch.randn(ROWS, LENGTH, HEADS, VALUE_WIDTH), torch.rand(ROWS, LENGTH, HEADS)
    log_decay = -2 * torch.rand(ROWS, LENGTH, HEADS)
    return [x.requires_grad_() for x in (q, k, v, beta, log_decay)]


def token_by_token(inputs: list[Tensor], places_BT: Tensor) -> tuple[Tensor, Tensor]:
    state, found = torch.zeros(ROWS, HEADS, KEY_WIDTH, VALUE_WIDTH, dtype=torch.float64), []
    for t in range(LENGTH):
        state = state * (places_BT[:, t] > 0)[:, None, None, None]
        y, state = delta_step(*(x.double()[:, t : t + 1] for x in inputs), state)
        found.append(y)
    return torch.cat(found, 1), state


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
def test_chunks_give_what_one_token_after_the_other_gives(starts: list[int]) -> None:
    inputs, places_BT = operands(), places_in(torch.tensor([*starts, 300], dtype=torch.int32), ROWS, LENGTH)
    found, last = chunked_delta_rule(*inputs, places_BT if len(starts) > 2 else None)
    expected, state = token_by_token(inputs, places_BT)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    if len(starts) == 2:
        torch.testing.assert_close(last.double(), state, rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(found)
    gradients = torch.autograd.grad(found, inputs, gradient)
    for one, other in zip(gradients, torch.autograd.grad(expected, inputs, gradient.double()), strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_the_scan_has_the_gradients_of_finite_differences() -> None:
    torch.manual_seed(0)
    shapes = [(3, 2, 5, 4), (3, 2, 5, 3), (3, 2, 5, 4), (3, 2), (2, 4, 3)]
    inputs = [(torch.randn(shape, dtype=torch.float64) * 0.5).requires_grad_() for shape in shapes]
    torch.autograd.gradcheck(delta_scan, inputs)
    torch.library.opcheck(delta_scan, [x.detach() for x in inputs])


def test_a_convolution_sees_nothing_of_the_document_before() -> None:
    torch.manual_seed(0)
    x_BTP, kernel = torch.randn(1, 20, 6), torch.randn(6, 1, 4)
    places_BT = places_in(torch.tensor([0, 7, 9, 20], dtype=torch.int32), 1, 20)
    alone = torch.cat([short_convolution(part, kernel) for part in x_BTP.split([7, 2, 11], 1)], 1)
    torch.testing.assert_close(short_convolution(x_BTP, kernel, places_BT), alone)
    reference = F.silu(F.conv1d(x_BTP.mT, kernel, padding=3, groups=6)[..., :20]).mT
    torch.testing.assert_close(short_convolution(x_BTP, kernel), reference)


def step_of(config: ModelConfig, recomputes: bool, compiled: bool = False) -> dict[str, Tensor]:
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), 0)
    if compiled:
        compiler.load()
    for block in model.blocks.values():
        block.attention.recomputes = recomputes
        if compiled:
            block.compile()
    tokens = torch.randint(config.vocab_size, (2, 90), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in (17, 73, 90)]).view(2, 90)
    model(tokens, tokens.roll(-1, 1), positions).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_what_is_computed_again_in_backward_changes_no_bit() -> None:
    config = ModelConfig.model_validate(SMALL)
    once, again = (step_of(config, recomputes) for recomputes in (False, True))
    assert len(once) == len(Decoder(config).state_dict())
    assert all(torch.equal(gradient, again[name]) for name, gradient in once.items())


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_blocks_compute_the_same(recomputes: bool) -> None:
    config = ModelConfig.model_validate(SMALL)
    expected, found = (step_of(config, recomputes, compiled) for compiled in (False, True))
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) < 1e-6 * largest, name


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"delta_net": {}}, "delta_net.key_heads = 0 and attention.layers"),
        ({"attention": {}}, "delta_net.key_heads = 2 and attention.layers"),
        ({"delta_net": NET | {"value_heads": 3}}, "value_heads = 3 is no multiple of key_heads = 2; try 2"),
        ({"delta_net": {"value_heads": 4}}, "value_heads = 4 with key_heads = 0"),
        ({"mtp": {"modules": 1}}, "mtp.modules = 1 with delta_net.key_heads = 2"),
    ],
)
def test_sizes_and_parts_that_do_not_fit_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said.replace(".", r"\.")):
        ModelConfig.model_validate(SMALL | keys)


def test_modules_that_predict_further_tokens_are_left_out_on_import(tmp_path: Path) -> None:
    qwen = {"family": "qwen3_5_text", "qk_norm": True, "norms": {"zero_centered": True}, "norm_eps": 1e-6}
    config = ModelConfig.model_validate(SMALL | qwen | {"attention": SMALL["attention"] | {"gate": True}})
    weights = {name: torch.randn(p.shape) for name, p in Decoder(config).state_dict().items()}
    hf.export_folder(config, weights, tmp_path / "out", dtype=torch.float32)
    file = tmp_path / "out/model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(2, 2)}, file)
    imported, found = hf.import_folder(tmp_path / "out")
    assert imported.mtp.modules == 0
    assert {name: weight.shape for name, weight in found.items()} == {n: w.shape for n, w in weights.items()}


def test_a_class_without_linear_layers_cannot_say_them() -> None:
    with pytest.raises(UserError, match=r"has linear ones and model\.family = llama"):
        config_to_json(ModelConfig.model_validate(SMALL), dtype=torch.float32, eod_id=None)
