"""The outer state, this rank's part: the weights that sites agreed on last, and the momentum of the outer optimizer.

And, while it is on its way, what the site has sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from argosy.parallel.pieces import PlacedPiece
from argosy.sync.layout import Sites
from argosy.sync.ledger import RoundLedger
from argosy.sync.wire import Flat


class OuterState:
    """The outer optimizer of one rank: it makes one step a round, the same at every site.

    With w the weights that the sites agreed on before, w_i those that site i has come to, and d the mean of w - w_i,
    weighted by the tokens that each trained on: under sync = local the new weights are w - d, the mean of all; under
    diloco, Nesterov's SGD takes d for a gradient (Douillard et al. 2023, algorithm 1):
    m = momentum m + d, w = w - lr (d + momentum m). Each site then goes on from w; or, with sync.mixing = a, from
    a w_i + (1 - a) w (Douillard et al. 2025, arXiv 2501.18512).

    With fragments, a round is about those weights alone whose turn it is. The last one is about all; where it is not
    their turn the sites take the mean: outer momentum is of steps that are H apart.
    """

    def __init__(self, sites: Sites, ledger: RoundLedger, masters: Iterable[PlacedPiece], is_diloco: bool):
        self.sites, self.ledger = sites, ledger
        config = sites.run.sync
        self._lr, self._momentum = (config.outer_lr, config.outer_momentum) if is_diloco else (1.0, 0.0)
        self._mixing = config.mixing
        self.sent_in: int | None = None
        """The round in which the site has sent what is not agreed on yet; None: there is nothing of the kind."""
        self._sent: dict[str, Tensor] = {}
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
    def begin(self, masters: Iterable[PlacedPiece]) -> None:
        """Take the weights that the run begins with for agreed on: all sites begin alike."""
        for piece in masters:
            self._weights[piece.name].copy_(piece.value)

    @torch.no_grad()
    def send(self, number: int, masters: Iterable[PlacedPiece]) -> None:
        """Take down how far the weights that round `number` is about have come: agreed on minus present."""
        shapes, self.sent_in = self.sites.flat(number).shapes, number
        self._sent = {p.name: self._weights[p.name] - p.value.float() for p in masters if p.name in shapes}

    def sent(self) -> Mapping[str, Tensor]:
        """Return what `send` took down, this rank's part of each parameter, fp32, live; empty once it is agreed on."""
        return self._sent

    def sent_before(self, number: int, masters: Iterable[PlacedPiece]) -> Mapping[str, Tensor]:
        """Return tensors to fill with what the site had sent in round `number`: they are `sent` then."""
        shapes, self.sent_in = self.sites.flat(number).shapes, number
        self._sent = {p.name: torch.zeros_like(self._weights[p.name]) for p in masters if p.name in shapes}
        return self._sent

    def forget_sent(self) -> None:
        """Let go of what was sent: it is agreed on, or another state is taken over."""
        self.sent_in, self._sent = None, {}

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of what is kept of each parameter."""
        return ("weights", "momentum") if self._keeps_momentum else ("weights",)

    @torch.no_grad()
    def adopt(self, vectors: Mapping[str, npt.NDArray[np.float32]], flat: Flat, masters: Sequence[PlacedPiece]) -> None:
        """Take another site's outer state over, of one fragment: key -> vector; the weights at hand become those."""
        self.forget_sent()
        for piece in masters:
            if piece.name in flat.shapes and piece.value.numel():
                for key, kept in self.state_of(piece.name).items():
                    part = flat.part(vectors[key], *piece.place)
                    kept.copy_(torch.from_numpy(np.array(part)))
                piece.value.copy_(self._weights[piece.name])

    @torch.no_grad()
    def apply(self, number: int, masters: Sequence[PlacedPiece]) -> None:
        """Make the outer step of a round that is in the ledger, and go on from there.

        A site that did not take part goes on from what is agreed on of all weights. It needs no other rank. Raises:
        OSError if the average is not in the site's folder.
        """
        turn, is_left_out = self.sites.turn(number), self.is_left_out(number)
        mixing = 0.0 if is_left_out or self.sites.is_last(number) else self._mixing
        self.forget_sent()
        for piece in masters if is_left_out else ():
            piece.value.copy_(self._weights[piece.name])
        for piece, mean in self.mean_of(number, masters):
            weights = self._weights[piece.name]
            if piece.name not in turn.shapes:
                weights.sub_(mean)
                piece.value.copy_(weights)
                continue
            if piece.name in self._momenta:
                momentum = self._momenta[piece.name]
                momentum.mul_(self._momentum).add_(mean)
                mean.add_(momentum, alpha=self._momentum)
            weights.sub_(mean, alpha=self._lr)
            piece.value.copy_(weights.lerp(piece.value.float(), mixing) if mixing else weights)

    def mean_of(self, number: int, pieces: Iterable[PlacedPiece]) -> Iterator[tuple[PlacedPiece, Tensor]]:
        """Yield the average of a round in the ledger, for this rank's part of each parameter that it is about, fp32.

        Raises: OSError if the average is not in the site's folder.
        """
        flat, wire, path = self.sites.flat(number), self.sites.wire_of(number), self.sites.average(number)
        blob = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        for piece in pieces:
            if piece.name in flat.shapes and piece.value.numel():
                mean = flat.read(blob, wire, *piece.place)
                yield piece, torch.from_numpy(np.array(mean)).to(piece.value.device)

    def is_left_out(self, number: int) -> bool:
        """True if the round is in the ledger, and was made without this site."""
        if len(self.ledger.lines) <= number:
            self.ledger.refresh()
        return len(self.ledger.lines) > number and self.sites.me not in self.ledger.lines[number].tokens
