"""Services that only measure: norms of weights, gradients and updates, by layer, in steps that are due; and how well
the model tells preferred answers from others.

For norms each rank adds up the squares of what it holds, divided by the number of ranks that hold the same; one small
all-reduce after the update makes sums of them. What is trained does not change by a bit: the optimizer does the same,
parameter by parameter, so that only one of them is copied at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from argosy.accelerator import sent_to, sent_to_host
from argosy.config.schema import RunConfig
from argosy.models.preference import STATISTICS
from argosy.observe.records import NORM_KINDS
from argosy.optim.piece import Piece
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.plan.parameters import parameter_table
from argosy.training.parts import Parts
from argosy.training.services.service import Service
from argosy.training.step import StepOutcome


def layer_of(name: str) -> str:
    """Return the layer of a parameter: the number of its block, or what is outside of the blocks by its own name."""
    first, second, *_ = name.split(".")
    return second if first == "blocks" else first


class LayerNorms(Service):
    """Measures the norms of one rank's share, as an `UpdateObserver` of the steps that are due."""

    @classmethod
    def of(cls, parts: Parts) -> LayerNorms:
        return cls(parts.run, parts.state.model, parts.world)

    def __init__(self, run: RunConfig, model: ParallelModel, world: World):
        self._every, self._world = run.observe.norms_every_steps, world
        self.layers = list(dict.fromkeys(layer_of(name) for name in parameter_table(run.model)))
        """The same on all ranks, whichever of them a rank holds."""
        places = {layer: place for place, layer in enumerate(self.layers)}
        self._pieces, self._frozen = model.pieces, model.frozen
        held = (*model.pieces, *model.frozen)
        self._place = {piece.name: (places[layer_of(piece.name)], piece.replicas) for piece in held}
        self._squares: dict[torch.device, Tensor] = {}
        """[kinds, layers], fp64, by the device that the squares are of."""
        self._step = -1
        self._newest: Tensor | None = None
        """[kinds, layers], in host memory."""

    def observer(self, step: int) -> LayerNorms | None:
        return self if self._every and (step + 1) % self._every == 0 else None

    @torch.no_grad()
    def before_update(self) -> None:
        """Take the squares of gradients, and of weights that no update comes to."""
        self._squares = {}
        for piece in self._frozen:
            self._add("weight", piece, piece.numbers)
        for piece in self._pieces:
            if piece.value.grad is not None:
                self._add("gradient", piece, piece.value.grad)

    def updated(self, piece: Piece, before: Tensor) -> None:
        """Take the squares of a parameter's update. before: is overwritten."""
        self._add("weight", piece, before)
        change = before.sub_(piece.value) if before.dtype == torch.float32 else piece.value.float() - before.float()
        self._add("update", piece, change)

    def after_update(self, step: int) -> None:
        """Add up the squares of all ranks."""
        shape, device = (len(NORM_KINDS), len(self.layers)), self._world.device
        total = torch.zeros(shape, dtype=torch.float64, device=device)
        for squares in self._squares.values():
            total += sent_to(device, squares)
        self._newest = sent_to_host(self._world.sum(total).sqrt())
        self._step = step

    def line(self, step: int) -> Mapping[str, Any]:
        """Return the norms of a step that was due. The step's clock has waited for the device by now."""
        if step != self._step or self._newest is None:
            return {}
        of_layers = zip(self.layers, self._newest.T.tolist(), strict=True)
        return {"norms": {layer: dict(zip(NORM_KINDS, norms, strict=True)) for layer, norms in of_layers}}

    def _add(self, kind: str, piece: Piece, tensor: Tensor) -> None:
        place, replicas = self._place[piece.name]
        if tensor.device not in self._squares:
            shape = (len(NORM_KINDS), len(self.layers))
            self._squares[tensor.device] = torch.zeros(shape, dtype=torch.float64, device=tensor.device)
        # In fp32: the norm of a bf16 tensor would be rounded to bf16.
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
        self._squares[tensor.device][NORM_KINDS.index(kind), place] += norm.double().square() / replicas


class Preferences(Service):
    """Sums rewards over ranks: beta times the log-probability of an answer, or its ratio to the reference."""

    @classmethod
    def of(cls, parts: Parts) -> Preferences:
        return cls(parts.state.model)

    def __init__(self, model: ParallelModel):
        self._model = model
        self._line: dict[str, Any] = {}

    def measure(self) -> Sequence[float] | Tensor:
        """Return this rank's share of the sums that `STATISTICS` names; nothing if no preferences are learned."""
        preferences = self._model.preferences
        if not preferences:
            return ()
        found = [preference.take_statistics() for preference in preferences]
        taken = [statistics for statistics in found if statistics is not None]
        is_first = self._model.meshes.rank("tp") == 0  # all ranks of a tp group have the same
        nothing = torch.zeros(len(STATISTICS), dtype=torch.float64, device=self._model.device)
        return torch.stack(taken).sum(0) if taken and is_first else nothing

    def after_exchange(self, outcome: StepOutcome, sums: Sequence[float]) -> None:
        if not sums:
            return
        of = dict(zip(STATISTICS, sums, strict=True))
        chosen, rejected = max(of["chosen"], 1.0), max(of["rejected"], 1.0)
        self._line = {
            "chosen_reward": of["chosen_reward"] / chosen,
            "rejected_reward": of["rejected_reward"] / rejected,
        }
        if self._model.preferences[0].compares_pairs:
            self._line["reward_accuracy"] = of["right"] / chosen

    def line(self, step: int) -> Mapping[str, Any]:
        return self._line
