"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon): momentum made orthogonal, for hidden matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.optimizer import OptimizerConfig
from argosy.optim.piece import Piece, Slot, opened
from argosy.optim.rules import UpdateRule

# E experts (or none), M rows, N columns

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Jordan's quintic: in the fewest steps, singular values come to 0.7 ... 1.2, not exactly to 1."""


class Muon(UpdateRule):
    """Nesterov momentum, made orthogonal. Each rank keeps its part; a step gathers the whole and cuts it again.

    All communication comes first, in `prepare`, for all matrices that ranks share: it keeps this rank's parts of the
    directions (bf16 on a GPU, fp32 on a CPU). Then `step` changes weights and momenta without other ranks.

    The step's size is that of Liu et al. 2025 ("Muon is scalable for LLM training"): 0.2 sqrt(max(M, N)) gives it the
    root mean square of a typical AdamW step, so that both can use one learning rate and weight decay.
    """

    moments = ("momentum_buffer",)
    is_local = False

    def __init__(self, config: OptimizerConfig):
        super().__init__(config)
        self._directions: dict[str, Tensor] = {}

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Compute the directions. All ranks that share a parameter take part, also those whose part is empty."""
        self._directions = {}
        for group, batch in _rounds([slot for slot in slots if _dealt_over(slot.piece) is not None]):
            pieces = [slot.piece for slot in batch]
            directions = orthogonal(pieces, [self._momentum(slot) for slot in batch], group)
            self._directions |= {piece.name: part for piece, part in zip(pieces, directions, strict=True)}

    def step(self, slots: Sequence[Slot], lr: float, weight_decay: float) -> None:
        """Apply the directions. Matrices without one from `prepare` belong to this rank alone."""
        for slot in slots:
            direction = self._directions.pop(slot.piece.name, None)
            if direction is None:
                (direction,) = orthogonal([slot.piece], [self._momentum(slot)], None)
            with opened([slot]) as (update,):
                update.moments["momentum_buffer"].lerp_(update.gradient, 1 - self.config.momentum)
                size = 0.2 * math.sqrt(max(update.piece.shape[-2:]))
                update.weight.mul_(1 - lr * weight_decay).sub_(direction.float(), alpha=lr * size)

    def _momentum(self, slot: Slot) -> Tensor:
        """Return the matrix to make orthogonal; the momentum that the slot keeps does not change."""
        gradient = slot.gradient()
        momentum = slot.moments()["momentum_buffer"].lerp(gradient, 1 - self.config.momentum)
        return gradient.lerp(momentum, self.config.momentum)


def orthogonal(pieces: Sequence[Piece], tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Make whole matrices orthogonal and return this rank's parts of them; `tensors` are its parts of the matrices.

    Rank i of `group` works on matrix i and sends it to the others, so there are at most as many matrices as ranks.
    """
    me = group.rank() if group else 0
    mine = torch.empty(0)
    for rank, (piece, tensor) in enumerate(zip(pieces, tensors, strict=True)):
        whole = piece.gather(tensor) if _is_matrix_cut(piece) else tensor
        if rank == me:
            mine = newton_schulz(whole)
    parts = []
    for rank, (piece, tensor) in enumerate(zip(pieces, tensors, strict=True)):
        whole = mine if rank == me else tensor.new_empty(piece.shape, dtype=_working_dtype(tensor))
        if group:
            dist.broadcast(whole, group=group, group_src=rank)
        parts.append(
            piece.scatter(whole).clone() if _is_matrix_cut(piece) else whole
        )  # not a view, which would keep the whole matrix
    return parts


def newton_schulz(x_EMN: Tensor) -> Tensor:
    """Return, roughly, the nearest matrix with orthonormal rows or columns for each matrix [..., M, N].

    Computed in bf16 on a GPU, which is precise enough (Jordan 2024), and in fp32 on a CPU, where bf16 is no faster.
    """
    a, b, c = NEWTON_SCHULZ
    tall = x_EMN.shape[-2] > x_EMN.shape[-1]
    x = x_EMN.to(_working_dtype(x_EMN))
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # singular values must start at 1 or less
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).contiguous()


def _rounds(slots: Sequence[Slot]) -> Iterator[tuple[dist.ProcessGroup | None, list[Slot]]]:
    """Yield batches of one matrix for each rank, of like shape where possible, so that no rank waits."""
    alike = sorted(slots, key=lambda slot: slot.piece.shape)
    for group, same in groupby(alike, key=lambda slot: _dealt_over(slot.piece)):
        batch, size = list(same), group.size() if group else 1
        yield from ((group, batch[i : i + size]) for i in range(0, len(batch), size))


def _dealt_over(piece: Piece) -> dist.ProcessGroup | None:
    """Return the ranks that share the work on a matrix; None for a stack that is cut between its matrices."""
    return piece.group if _is_matrix_cut(piece) or not piece.cut else None


def _is_matrix_cut(piece: Piece) -> bool:
    return any(dim >= len(piece.shape) - 2 for dim in piece.cut)


def _working_dtype(tensor: Tensor) -> torch.dtype:
    return torch.bfloat16 if tensor.is_cuda else torch.float32
