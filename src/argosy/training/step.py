"""One step's arithmetic: microbatches forward and backward, gradients and losses summed over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from argosy.models.batch import Microbatch
from argosy.observe.clock import StepClock
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World


@dataclass(frozen=True)
class Wishes:
    """What a process would like to happen after this step; granted to all if any asks."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """The step's result, the same on every process; the gradients wait in the pieces."""

    loss: float
    """Mean over the global batch's tokens, nats."""
    wishes: Wishes


def forward_backward(
    model: ParallelModel,
    batch: Sequence[Microbatch],
    loss_scale: float,
    world: World,
    clock: StepClock,
    wishes: Wishes,
) -> StepOutcome:
    """Leave in every piece's `grad` the gradient of the mean loss over the global batch's tokens, times `loss_scale`.

    Every target counts and every data-parallel rank has as many, so that the sum over ranks of local sums over the
    global number of tokens is the mean over tokens, not a mean of means.
    """
    tokens = sum(micro.targets_BT.numel() for micro in batch) * model.dp
    loss = model.forward_backward(batch, loss_scale / tokens, clock)
    with clock.time("communication"):
        model.finish_gradients()
        # The loss and the wishes travel together: one small collective makes every decision common.
        votes = torch.stack([loss / tokens, loss.new_tensor(wishes.stop), loss.new_tensor(wishes.save)])
        mean_loss, stop, save = world.sum(votes).tolist()
    return StepOutcome(mean_loss, Wishes(stop > 0, save > 0))
