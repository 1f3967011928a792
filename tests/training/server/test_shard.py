"""The outer optimizer of servers: PyTorch's Nesterov SGD, or that with a momentum that comes later."""

from __future__ import annotations

import torch

from argosy.optim.piece import Piece
from argosy.training.server.shard import DelayedNesterov

SHAPE = (5, 3)


def changes(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SHAPE, generator=generator) for _ in range(count)]


def made(found: list[torch.Tensor], rates: list[float], momentum: float, every: int) -> torch.Tensor:
    piece = Piece("a", torch.ones(SHAPE), SHAPE)
    rule = DelayedNesterov([piece], momentum, every)
    for update, (change, rate) in enumerate(zip(found, rates, strict=True)):
        piece.value.grad = change
        rule.step(update, rate)
    return piece.value


def test_with_a_momentum_in_each_update_it_is_nesterov_as_pytorch_has_it():
    weights = torch.nn.Parameter(torch.ones(SHAPE))
    theirs = torch.optim.SGD([weights], lr=0.7, momentum=0.9, nesterov=True)
    for change in changes(6):
        weights.grad = change
        theirs.step()
    torch.testing.assert_close(made(changes(6), [0.7] * 6, 0.9, 1), weights.data)


def test_with_a_momentum_every_third_update_it_is_the_algorithm_of_the_paper():
    """Liu et al. 2024, algorithm 3, written down line by line, with c = 0."""
    workers, lr, beta = 3, 0.7, 0.9
    weights, momentum, buffer = torch.ones(SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    for t, change in enumerate(changes(8)):
        buffer = buffer + change
        if (t + 1) % workers == 0:
            momentum = beta * momentum + buffer / workers
            weights = weights - lr * (beta * momentum + change / workers)
            buffer = torch.zeros(SHAPE)
        else:
            weights = weights - lr * change / workers
    torch.testing.assert_close(made(changes(8), [lr / workers] * 8, beta, workers), weights)


def test_without_momentum_nothing_is_kept():
    piece = Piece("a", torch.ones(SHAPE), SHAPE)
    assert DelayedNesterov([piece], 0.0, 3).state_of(piece) == {}
    torch.testing.assert_close(made(changes(2), [1.0, 0.5], 0.0, 1), 1 - changes(2)[0] - 0.5 * changes(2)[1])
