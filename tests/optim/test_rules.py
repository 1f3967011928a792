"""AdamW is torch's, bit for bit; Lion is the paper's."""

from __future__ import annotations

import torch

from argosy.config.optimizer import OptimizerConfig, OptimizerGroup
from optim.pieces import normal, train, whole_pieces


def gradients(name: str, shape: tuple[int, ...], steps: int) -> list[torch.Tensor]:
    return [normal(shape, name, step) * 0.1 for step in range(steps)]


def test_adamw_is_that_of_torch():
    groups = (OptimizerGroup(match="head.*", lr_factor=0.5, weight_decay=0.3),)
    pieces = whole_pieces()
    train(pieces, OptimizerConfig(lr=1e-2, groups=groups), steps=5)
    for piece in pieces:
        reference = torch.nn.Parameter(normal(piece.shape, piece.name))
        lr, decay = (5e-3, 0.3) if piece.name == "head.weight" else (1e-2, 0.1 if reference.ndim > 1 else 0.0)
        if piece.name.endswith("bias"):
            decay = 0.0
        adam = torch.optim.AdamW([reference], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, fused=True)
        for gradient in gradients(piece.name, piece.shape, 5):
            reference.grad = gradient
            adam.step()
        assert torch.equal(piece.value, reference), piece.name


def test_lion_is_that_of_the_paper():
    pieces = whole_pieces()
    train(pieces, OptimizerConfig(kind="lion", lr=1e-2, beta1=0.9, beta2=0.99), steps=5)
    for piece in pieces:
        weight, momentum = normal(piece.shape, piece.name), torch.zeros(piece.shape)
        decay = 0.1 if len(piece.shape) > 1 else 0.0
        for gradient in gradients(piece.name, piece.shape, 5):
            step = torch.sign(0.9 * momentum + 0.1 * gradient)
            weight = weight - 1e-2 * (step + decay * weight)
            momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(piece.value, weight, rtol=1e-5, atol=1e-6)
