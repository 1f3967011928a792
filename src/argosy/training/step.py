"""One step's arithmetic: microbatches forward and backward, gradients summed over ranks, one exchange of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from argosy.models.batch import Microbatch
from argosy.observe.clock import StepClock
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World

LIMBS, LIMB_BITS = 4, 16
"""A 64-bit fingerprint travels as so many numbers of so many bits: fp64 adds these up exactly, whatever the world."""


@dataclass(frozen=True)
class Wishes:
    """What a process would like to happen after this step; granted to all if any asks."""

    stop: bool = False
    save: bool = False
    quarantine: bool = False
    """It could not read its samples: the step is to be done again without the shard that they are in."""
    retry: bool = False
    """What it received of the gradients' sums cannot be right: the step is to be done again."""
    copy: bool = False
    """The state is to be copied to host memory."""
    hold: bool = False
    """Likewise, and then all stand still: this world is to end, in order."""


@dataclass(frozen=True)
class Share:
    """What one rank brings to the exchange of a step."""

    loss: Tensor
    """Over all ranks the shares add up to the mean over the global batch's tokens, nats; no dims."""
    squares: Tensor
    """Likewise to the square of the gradient's norm (`parallel.gradients.square_share`)."""
    loads: Tensor | None = None
    """Likewise to what the experts were sent (`parallel.expert.loads_of`)."""
    fingerprint: Tensor | None = None
    """Likewise to 0, modulo 2**64, if all copies of the state are equal (`training.fingerprint`); int64, no dims."""
    wishes: Wishes = Wishes()


@dataclass(frozen=True)
class StepOutcome:
    """The step's result, the same on every process; the gradients wait in the pieces."""

    loss: float
    """Mean over the global batch's tokens, nats."""
    gradient_norm: float
    """Global, before clipping."""
    replicas_differ: bool
    """Ranks that should hold the same weights or optimizer state do not."""
    wishes: Wishes
    loads: Tensor | None
    """In host memory."""


def forward_backward(model: ParallelModel, batch: Sequence[Microbatch], loss_scale: float, clock: StepClock) -> Tensor:
    """Leave in every piece's `grad` the gradient of the mean loss over the global batch's tokens, times `loss_scale`.

    Returns this rank's share of that mean. Every target counts and every data-parallel rank has as many, so that the
    sum over ranks of local sums over the global number of tokens is the mean over tokens, not a mean of means.
    """
    tokens = sum(micro.targets_BT.numel() for micro in batch) * model.dp
    loss = model.forward_backward(batch, loss_scale / tokens, clock)
    with clock.time("communication"):
        model.finish_gradients()
    return loss / tokens


def exchange(share: Share, world: World) -> StepOutcome:
    """Tell all ranks what each of them brings: one small all-reduce, from which every decision follows alike on all.

    It is the one place of a step where all ranks meet, and the one time that the host waits for the device. A rank
    enters it once its gradient is whole; what comes after it may rely on that for all ranks.
    """
    wishes = share.loss.new_tensor([*astuple(share.wishes)], dtype=torch.float64)
    parts = [share.loss.double().view(1), share.squares.view(1), limbs_of(share.fingerprint, share.loss.device), wishes]
    if share.loads is not None:
        parts.append(share.loads.flatten())
    sums = world.sum(torch.cat(parts)).cpu()
    head = 2 + LIMBS + len(wishes)
    loss, squares, *rest = sums[:head].tolist()
    return StepOutcome(
        loss=loss,
        gradient_norm=math.sqrt(squares),
        replicas_differ=is_nonzero(rest[:LIMBS]),
        wishes=Wishes(*(votes > 0 for votes in rest[LIMBS:])),
        loads=None if share.loads is None else sums[head:].view_as(share.loads),
    )


def limbs_of(number: Tensor | None, device: torch.device) -> Tensor:
    """A 64-bit integer (int64, no dims; None is 0) in a form that can be summed over ranks modulo 2**64; fp64."""
    if number is None:
        return torch.zeros(LIMBS, dtype=torch.float64, device=device)
    parts = [(number >> LIMB_BITS * place) & (2**LIMB_BITS - 1) for place in range(LIMBS)]
    return torch.stack(parts).double().to(device)


def is_nonzero(limbs: Sequence[float]) -> bool:
    """Whether the integers whose limbs were summed add up to anything but 0 modulo 2**64."""
    total = sum(int(limb) << LIMB_BITS * place for place, limb in enumerate(limbs))
    return total % 2 ** (LIMBS * LIMB_BITS) != 0
