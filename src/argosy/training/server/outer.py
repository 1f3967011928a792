"""The outer optimizer of servers whose workers make several steps between two pushes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from argosy.optim.piece import Piece


class DelayedNesterov:
    """Nesterov's SGD on changes that come one by one, with a momentum that is updated only once in `every` updates.

    Liu et al. 2024 (arXiv 2401.09135), algorithm 3 with c = 0: a momentum that takes up each stale change as it comes
    makes asynchronous outer steps worse than synchronous ones. With d the change of a worker (the weights that it was
    given minus those that it has come to), r its rate, and b the momentum,

        sum = sum + r d;  w = w - r d, and at every N-th update: m = b m + sum, w = w - b m, sum = 0.

    The paper's r is lr / N. Here it is lr / (s + 1), s the staleness (Xie et al. 2019, arXiv 1903.03934, with a = 1):
    the same for N workers that are alike, and lr for one that is alone. With N = 1 it is PyTorch's Nesterov SGD.
    """

    def __init__(self, pieces: Sequence[Piece], momentum: float, every: int):
        self.pieces, self._momentum, self._every = list(pieces), momentum, every
        self._state = {piece.name: self._zeros(piece) for piece in pieces}

    def _zeros(self, piece: Piece) -> dict[str, Tensor]:
        keys = ("momentum", "sum") if self._momentum else ()
        return {key: torch.zeros_like(piece.value) for key in keys}

    def state_of(self, piece: Piece) -> dict[str, Tensor]:
        """Return what is kept of a piece, live."""
        return self._state[piece.name]

    @torch.no_grad()
    def step(self, update: int, rate: float) -> None:
        """Apply the change in each piece's `grad` as update `update`, from 0."""
        is_turn = (update + 1) % self._every == 0
        for piece in self.pieces:
            assert piece.value.grad is not None
            state = self._state[piece.name]
            piece.value.sub_(piece.value.grad, alpha=rate)
            if not state:
                continue
            state["sum"].add_(piece.value.grad, alpha=rate)
            if is_turn:
                state["momentum"].mul_(self._momentum).add_(state["sum"])
                piece.value.sub_(state["momentum"], alpha=self._momentum)
                state["sum"].zero_()
