"""Pieces, gradients and cuts that several tests share."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.config.optimizer import OptimizerConfig
from argosy.optim.optimizer import Optimizer
from argosy.optim.piece import Piece

SHAPES = {
    "embedding.weight": (300, 64),
    "blocks.0.attention_norm.weight": (64,),
    "blocks.0.attention.q.weight": (64, 96),
    "blocks.0.attention.q.bias": (64,),
    "blocks.0.mlp.experts.up": (4, 80, 32),
    "head.weight": (300, 64),
}


def normal(shape: tuple[int, ...], *key: object) -> Tensor:
    """Normal numbers that depend on the shape and the key alone, in every process."""
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(zlib.crc32(repr(key).encode())))


def whole_pieces(dtype: torch.dtype = torch.float32) -> list[Piece]:
    """The parameters of SHAPES, whole."""
    return [Piece(name, normal(shape, name).to(dtype), shape) for name, shape in SHAPES.items()]


def part_of(piece: Piece, dim: int, rank: int, size: int, **keys: object) -> Piece:
    """One of `size` parts of a whole piece along `dim`, of which some may be empty, as FSDP2 cuts."""

    def scatter(whole: Tensor) -> Tensor:
        rows = -(-whole.shape[dim] // size)
        start = min(rank * rows, whole.shape[dim])
        return whole.narrow(dim, start, min(rows, whole.shape[dim] - start))

    return Piece(piece.name, scatter(piece.value).clone(), piece.shape, frozenset({dim}), scatter=scatter, **keys)


def gather_over(group: dist.ProcessGroup, dim: int) -> Callable[[Tensor], Tensor]:
    """The collective that makes a tensor cut along `dim` whole."""

    def gather(part: Tensor) -> Tensor:
        parts: list[Tensor] = [part] * group.size()
        dist.all_gather_object(parts, part, group=group)
        return torch.cat(parts, dim)

    return gather


def train(
    pieces: Sequence[Piece], config: OptimizerConfig, steps: int = 5, optimizer: Optimizer | None = None
) -> Optimizer:
    """Steps with gradients that depend on parameter and step alone; each piece takes its part of them."""
    optimizer = optimizer or Optimizer(pieces, config, seed=3)
    for _ in range(steps):
        done = int(optimizer.state_of(pieces[0])["step"])
        for piece in pieces:
            gradient = normal(piece.shape, piece.name, done) * 0.1
            piece.value.grad = piece.scatter(gradient).to(piece.value).clone()
        optimizer.step()
    return optimizer
