"""All that a run must not lose: weights, optimizer, loss scale, step, random generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from argosy.models.layers import local
from argosy.optim.optimizer import Optimizer
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.precision.scaler import LossScaler


@dataclass
class TrainState:
    """The state of one process. What is read next follows from `step` alone."""

    model: ParallelModel
    optimizer: Optimizer
    scaler: LossScaler
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, over all processes."""

    def weights(self) -> dict[str, Any]:
        """This rank's part of the weights, by name: live tensors, to copy from or to read into."""
        return {piece.name: piece.wrap(piece.value) for piece in self.model.masters} | self.model.buffers()

    def tensors(self, world: World) -> dict[str, Any]:
        """The tensors of a checkpoint, for `restored` once they have been read into."""
        optimizer = {
            piece.name: {key: piece.wrap(part) for key, part in self.optimizer.state_of(piece).items()}
            for piece in self.model.masters
        }
        return {
            "model": self.weights(),
            "optimizer": optimizer,
            "scaler": self.scaler.state(),
            "rng": {f"rank{world.rank}": _generators(world.device)},
        }

    def restored(self, tensors: dict[str, Any], world: World) -> None:
        """Take over what a checkpoint was read into."""
        self.model.after_update()
        for piece in self.model.masters:
            state = tensors["optimizer"][piece.name]
            self.optimizer.load_state(piece, {key: local(part) for key, part in state.items()})
        self.scaler.load_state(tensors["scaler"])
        generators = tensors["rng"][f"rank{world.rank}"]
        torch.set_rng_state(generators["cpu"])
        if "device" in generators:
            torch.cuda.set_rng_state(generators["device"], world.device)


def _generators(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states
