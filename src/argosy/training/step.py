"""One step's arithmetic: microbatches forward and backward, gradients summed over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from argosy.models.decoder import Decoder
from argosy.observe.clock import StepClock
from argosy.parallel.data import GradientReducer
from argosy.parallel.world import World
from argosy.training.batch import Microbatch


@dataclass(frozen=True)
class Wishes:
    """What a process would like to happen after this step; granted to all if any asks."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """The step's result, the same on every process; the gradients wait in the parameters."""

    loss: float
    """Mean over the global batch's tokens, nats."""
    wishes: Wishes


def forward_backward(
    model: Decoder,
    batch: Sequence[Microbatch],
    reducer: GradientReducer,
    world: World,
    clock: StepClock,
    wishes: Wishes,
) -> StepOutcome:
    """Leave in every parameter's `grad` the gradient of the mean loss over the global batch's tokens.

    Every target counts and every process has as many, so that the sum over processes of local sums over the
    global number of tokens is the mean over tokens, not a mean of means.
    """
    tokens = sum(micro.targets_BT.numel() for micro in batch) * world.size
    total = torch.zeros((), device=world.device)
    for micro in batch:
        if micro is batch[-1]:
            reducer.arm()
        with clock.time("forward"):
            loss = model(micro.tokens_BT, micro.targets_BT, micro.documents) / tokens
        with clock.time("backward"):
            loss.backward()
        total += loss.detach()
    with clock.time("communication"):
        reducer.finish()
        # The loss and the wishes travel together: one small collective makes every decision common.
        votes = torch.stack([total, total.new_tensor(wishes.stop), total.new_tensor(wishes.save)])
        loss_sum, stop, save = world.sum(votes).tolist()
    return StepOutcome(loss_sum, Wishes(stop > 0, save > 0))
