"""All that a run must not lose: weights, optimizer, step, random generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from argosy.models.decoder import Decoder
from argosy.parallel.world import World
from argosy.training.optimizer import optimizer_state


@dataclass
class TrainState:
    """The state of one process. What is read next follows from `step` alone."""

    model: Decoder
    optimizer: torch.optim.AdamW
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on, over all processes."""

    def tensors(self, world: World) -> dict[str, Any]:
        """The tensors of a checkpoint: live ones, to copy from or to read into."""
        return {
            "model": dict(self.model.named_parameters()),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "rng": {f"rank{world.rank}": _generators(world.device)},
        }

    def restored(self, tensors: dict[str, Any], world: World) -> None:
        """Take back what is not a live tensor of `tensors` after a checkpoint was read into them."""
        generators = tensors["rng"][f"rank{world.rank}"]
        torch.set_rng_state(generators["cpu"])
        if "device" in generators:
            torch.cuda.set_rng_state(generators["device"], world.device)


def _generators(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states
