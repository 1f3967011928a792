"""With maximal update parametrization, what a model computes moves as far at every width."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from argosy.config.model import ModelConfig
from argosy.config.optimizer import OptimizerConfig
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.optim.optimizer import Optimizer
from argosy.optim.piece import Piece
from argosy.plan.mup import rate_factor

WIDTHS = (32, 64, 128, 256)
LR = {"adamw": 2e-2, "lion": 5e-3, "muon": 2e-2}


def config_of(width: int, is_mup: bool, **keys: Any) -> ModelConfig:
    sizes = {"width": width, "heads": width // 8, "kv_heads": width // 8, "head_width": 8, "ffn_width": 2 * width}
    base = {"mup": {"base_width": WIDTHS[0]}} if is_mup else {}
    return ModelConfig.model_validate({"layers": 2, "vocab_size": 64, "init_std": 0.1} | sizes | base | keys)


def changes(config: ModelConfig, optimizer: str, steps: int = 4) -> dict[str, float]:
    """How far a few steps on the same tokens move the outputs of modules, root mean square."""
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), seed=0)
    pieces = [Piece(name, p.data, tuple(p.shape)) for name, p in model.named_parameters()]
    settings = OptimizerConfig(kind=optimizer, lr=LR[optimizer], weight_decay=0.0)
    rule = Optimizer(pieces, settings, rate_factor=partial(rate_factor, model=config))
    found: dict[str, torch.Tensor] = {}
    watched = {"attention": model.blocks["1"].attention, "mlp": model.blocks["1"].mlp}
    for name, module in watched.items():
        module.register_forward_hook(lambda _, inputs, y, name=name: found.__setitem__(name, y.detach().clone()))
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))

    def outputs() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            logits = model(tokens[:, :-1])
        return {**found, "logits": logits}

    before = outputs()
    for _ in range(steps):
        model.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).div(64).backward()
        for piece, parameter in zip(pieces, model.parameters(), strict=True):
            piece.value.grad = parameter.grad
        rule.step()
    return {name: (y - before[name]).square().mean().sqrt().item() for name, y in outputs().items()}


def growth(is_mup: bool, optimizer: str, **keys: Any) -> dict[str, float]:
    """By which power of the width the outputs move further: the slope over all widths, in logarithms."""
    moved = [changes(config_of(width, is_mup, **keys), optimizer) for width in WIDTHS]
    x = torch.tensor([math.log(width) for width in WIDTHS])
    x = x - x.mean()
    return {name: float(x @ torch.tensor([math.log(m[name]) for m in moved]) / x.square().sum()) for name in moved[0]}


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_outputs_move_as_far_at_every_width(optimizer):
    assert all(abs(power) < 0.3 for power in growth(True, optimizer).values()), growth(True, optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_without_it_they_move_further_in_wider_models(optimizer):
    assert all(power > 0.5 for power in growth(False, optimizer).values()), growth(False, optimizer)


def test_experts_and_latents_move_as_far_at_every_width():
    moe = {"experts": 4, "expert_ffn_width": 32, "shared_experts": 1, "first_dense_layers": 1}
    latent = {"kv_rank": 16, "q_rank": 16, "rope_width": 8, "nope_width": 8, "value_width": 8}
    base = {"base_width": WIDTHS[0], "base_expert_ffn_width": 32, "base_kv_rank": 16, "base_q_rank": 16}
    found = growth(True, "adamw", moe=moe, mla=latent, mup=base)
    assert all(abs(power) < 0.3 for power in found.values()), found


def test_the_base_model_is_bit_for_bit_the_one_without():
    assert changes(config_of(WIDTHS[0], True), "adamw") == changes(config_of(WIDTHS[0], False), "adamw")
