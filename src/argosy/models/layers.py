"""Linear layers, norms and embeddings. They compute in their input's dtype, whatever the dtype of their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from argosy.plan.parameters import Table

Activation = Callable[[Tensor], Tensor]
"""Computes each element from that element alone."""


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter: all of it, unless tensor or expert parallelism made it a DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Linear(nn.Linear):
    """`nn.Linear` that casts its weight to the input's dtype: fp32 master weights, bf16 arithmetic.

    The gradient goes back through the same cast, so it accumulates in the weight's own precision.
    """

    reduce: Callable[[Tensor], Tensor] | None = None
    """Sums the output over ranks, before the bias. Tensor parallelism sets it where each rank has some inputs."""

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).to(x.dtype)
        bias = None if self.bias is None else local(self.bias).to(x.dtype)
        if self.reduce is None:
            return F.linear(x, weight, bias)
        y = self.reduce(F.linear(x, weight))
        return y if bias is None else y + bias


class Embedding(nn.Embedding):
    """`nn.Embedding` that returns vectors in `dtype`, whatever the dtype of its weight."""

    def __init__(self, vocab_size: int, width: int, dtype: torch.dtype):
        super().__init__(vocab_size, width)
        self.dtype = dtype

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, local(self.weight)).to(self.dtype)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), computed in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], local(self.weight).float(), self.eps).to(x.dtype)


def linear(table: Table, name: str) -> Linear:
    """Build the linear layer `name` of `table`."""
    outputs, inputs = table[f"{name}.weight"].shape
    return Linear(inputs, outputs, bias=f"{name}.bias" in table)


def norm(table: Table, name: str, eps: float) -> RMSNorm:
    """Build the norm `name` of `table`."""
    (width,) = table[f"{name}.weight"].shape
    return RMSNorm(width, eps)


def embedding(table: Table, name: str, dtype: torch.dtype) -> Embedding:
    """Build the embedding `name` of `table`, which returns vectors in `dtype`."""
    vocab_size, width = table[f"{name}.weight"].shape
    return Embedding(vocab_size, width, dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), with the sizes of a `plan.parameters.feed_forward_table`.

    If the table has no gate, it is down(activation(up(x))). A family of the user's has an `activation` of its own.
    """

    def __init__(self, table: Table, activation: Activation = F.silu):
        super().__init__()
        self.gate = linear(table, "gate") if "gate.weight" in table else None
        self.up, self.down = linear(table, "up"), linear(table, "down")
        self.activation = activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gate is None:
            y_BTD: Tensor = self.down(self.activation(self.up(x_BTD)))
        else:
            y_BTD = self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD
