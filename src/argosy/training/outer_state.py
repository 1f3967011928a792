"""What the sites of a run agreed on last, this rank's part of it: weights, and the momentum of the outer optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from argosy.parallel.pieces import Held
from argosy.sync.sites.flat import Flat
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Ledger


class OuterState:
    """The outer optimizer of one rank: it makes one step a round, the same at every site.

    With w the weights that the sites agreed on before, w_i those that site i has come to, and d the mean of w - w_i,
    weighted by the tokens that each trained on: under sync = local the new weights are w - d, the mean of all; under
    diloco, Nesterov's SGD takes d for a gradient (Douillard et al. 2023, algorithm 1):
    m = momentum m + d, w = w - lr (d + momentum m). Each site then goes on from w.
    """

    def __init__(self, sites: Sites, ledger: Ledger, masters: Iterable[Held], is_diloco: bool):
        self.sites, self.ledger = sites, ledger
        config = sites.run.sync
        self._lr, self._momentum = (config.outer_lr, config.outer_momentum) if is_diloco else (1.0, 0.0)
        self.adopted_chain = ""
        """The chain of the ledger of the state that was taken over last from another site."""
        self._weights = {p.name: torch.zeros(p.value.shape, device=p.value.device) for p in masters}
        self._keeps_momentum = keeps_momentum = is_diloco and self._momentum > 0
        self._momenta = {n: torch.zeros_like(w) for n, w in self._weights.items()} if keeps_momentum else {}

    def state_of(self, name: str) -> Mapping[str, Tensor]:
        """Return what is kept of a parameter, live."""
        momentum = {"momentum": self._momenta[name]} if name in self._momenta else {}
        return {"weights": self._weights[name], **momentum}

    @torch.no_grad()
    def begin(self, masters: Iterable[Held]) -> None:
        """Take the weights that the run begins with for agreed on: all sites begin alike."""
        for piece in masters:
            self._weights[piece.name].copy_(piece.value)

    @torch.no_grad()
    def change(self, piece: Held) -> Tensor:
        """Return how far this rank's part of a parameter has come, fp32 in host memory: agreed on minus present."""
        return (self._weights[piece.name] - piece.value.float()).cpu()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of what is kept of each parameter."""
        return ("weights", "momentum") if self._keeps_momentum else ("weights",)

    @torch.no_grad()
    def adopt(self, vectors: Mapping[str, npt.NDArray[np.float32]], flat: Flat, masters: Sequence[Held]) -> None:
        """Take another site's outer state over, of one fragment: key -> vector; the weights at hand become those."""
        for piece in masters:
            if piece.name in flat.shapes and piece.value.numel():
                for key, kept in self.state_of(piece.name).items():
                    part = flat.part(vectors[key], piece.name, tuple(piece.offset), tuple(piece.value.shape))
                    kept.copy_(torch.from_numpy(np.array(part)))
                piece.value.copy_(self._weights[piece.name])

    @torch.no_grad()
    def apply(self, number: int, masters: Sequence[Held]) -> None:
        """Make the outer step of a round that is in the ledger, and begin the next round from there.

        It needs no other rank. Raises: OSError if the average is not in the site's folder.
        """
        flat, wire = self.sites.flat(number), self.sites.wire
        path = self.sites.average(number)
        blob = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        for piece in masters:
            if piece.name not in flat.shapes or not piece.value.numel():
                continue
            weights = self._weights[piece.name]
            mean = flat.read(blob, wire, piece.name, tuple(piece.offset), tuple(piece.value.shape))
            gradient = torch.from_numpy(np.array(mean)).to(weights.device)
            if piece.name in self._momenta:
                momentum = self._momenta[piece.name]
                momentum.mul_(self._momentum).add_(gradient)
                gradient = gradient.add_(momentum, alpha=self._momentum)
            weights.sub_(gradient, alpha=self._lr)
            piece.value.copy_(weights)
