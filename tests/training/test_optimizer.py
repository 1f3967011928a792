"""AdamW over two groups, and the global gradient norm."""

from __future__ import annotations

import pytest
import torch

from argosy.config.schema import OptimizerConfig
from argosy.models.decoder import Decoder
from argosy.training.optimizer import build_optimizer, clip_gradients, optimizer_state
from tiny import decoder

BIASED = {"attention_bias": True, "qk_norm": True}


def give_gradients(model: Decoder, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).normal_(std=size, generator=generator)


def gradients(model: Decoder) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_weight_decay_shrinks_matrices_and_nothing_else():
    model = decoder(**BIASED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.1)).step()
    for name, parameter in model.named_parameters():
        expected = 0.95 if parameter.ndim == 2 else 1.0
        assert torch.all(parameter == expected), name


def test_every_parameter_is_trained():
    model = decoder(**BIASED)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    give_gradients(model, 1.0)
    build_optimizer(model, OptimizerConfig()).step()
    assert not [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


@pytest.mark.parametrize("max_norm", [0.5, 1e6, 0.0])
def test_clipping_is_that_of_torch(max_norm):
    ours, theirs = decoder(), decoder()
    give_gradients(ours, 0.1)
    give_gradients(theirs, 0.1)
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or float("inf"))
    assert clip_gradients(ours, max_norm) == norm
    torch.testing.assert_close(gradients(ours), gradients(theirs))


def test_gradients_longer_than_the_limit_come_down_to_it():
    model = decoder()
    give_gradients(model, 0.1)
    assert clip_gradients(model, 0.5) > 0.5
    assert gradients(model).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_state_made_ahead_of_the_first_step_is_what_adamw_makes_itself():
    ours, theirs = decoder(), decoder()
    our_adam, their_adam = (build_optimizer(model, OptimizerConfig()) for model in (ours, theirs))
    made = optimizer_state(ours, our_adam)
    for model, adam in ((ours, our_adam), (theirs, their_adam)):
        give_gradients(model, 1.0)
        adam.step()
    own = optimizer_state(theirs, their_adam)
    assert made.keys() == own.keys() == dict(ours.named_parameters()).keys()
    torch.testing.assert_close(optimizer_state(ours, our_adam), own, rtol=0, atol=0)
    assert all(made[n][k].dtype == own[n][k].dtype and made[n].keys() == own[n].keys() for n in own for k in own[n])
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=0, atol=0)
