"""Linear layers, norms and embeddings. They compute in their input's dtype, whatever the dtype of their weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelConfig
from argosy.matmul import dense
from argosy.models.quantised_weight import Product, QuantisationScheme, QuantisedWeight, multiply
from argosy.plan.parameters import Table

Activation = Callable[[Tensor], Tensor]
"""Computes each element from that element alone."""


def itself(x: Tensor) -> Tensor:
    return x


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter: all of it, unless tensor or expert parallelism made it a DTensor."""
    # Not `isinstance`: importing DTensor takes half a second, which a run that splits nothing need not wait for.
    # And of the class: the compiler finds no such attribute in a DTensor itself.
    part: Tensor = parameter.to_local() if hasattr(type(parameter), "to_local") else parameter  # type: ignore[attr-defined]
    return part


def held(parameter: Tensor, scheme: QuantisationScheme | None, dtype: torch.dtype) -> Tensor | QuantisedWeight:
    """Return this rank's part of a weight in `dtype`, or as it is quantised, to be multiplied."""
    return local(parameter).to(dtype) if scheme is None else QuantisedWeight(local(parameter), scheme)


class Linear(nn.Linear):
    """`nn.Linear` that casts its weight to the input's dtype: fp32 master weights, bf16 arithmetic.

    The gradient goes back through the same cast, so it accumulates in the weight's own precision.
    """

    reduce: Callable[[Tensor], Tensor] | None = None
    """Sums the output over ranks, before the bias. Tensor parallelism sets it where each rank has some inputs."""

    product: Product | None = None
    """Multiplies by the weight as it is stored: in a narrower format (`precision.use_fp8`), or between messages
    (`parallel.async_tensor`, where the input may be the product already)."""

    lora: nn.Module | None
    """The weight's adapter, if it has one (`models.adapters`)."""
    scheme: QuantisationScheme | None = None
    """The way the weight is quantised, if it is (`models.adapters`)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__(inputs, outputs, bias)
        self.register_module("lora", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is not None:
            y = self.product(x, local(self.weight))
        else:
            weight = held(self.weight, self.scheme, x.dtype)
            if self.reduce is None and self.lora is None and isinstance(weight, Tensor):
                return dense(x, weight, None if self.bias is None else local(self.bias).to(x.dtype))
            y = multiply(x, weight) if self.lora is None else self.lora(x, weight)
        if self.reduce is not None:
            y = self.reduce(y)
        return y if self.bias is None else y + local(self.bias).to(y.dtype)


class Embedding(nn.Embedding):
    """`nn.Embedding` that returns vectors in `dtype`, whatever the dtype of its weight."""

    def __init__(self, vocab_size: int, width: int, dtype: torch.dtype):
        super().__init__(vocab_size, width)
        self.dtype = dtype

    def reset_parameters(self) -> None:
        """Do nothing: `materialize` gives weights. On the meta device torch's own loads the compiler."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, local(self.weight)).to(self.dtype)


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019), computed in fp32. zero_centered: the factor is one plus the weight."""

    reduce: Callable[[Tensor], Tensor] | None = None
    """Sums over ranks. Tensor parallelism sets it where each rank has some of the numbers of a norm."""

    def __init__(self, width: int, eps: float, zero_centered: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.width, self.eps, self.zero_centered = width, eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).float()
        if self.zero_centered:
            weight = weight + 1.0
        if self.reduce is None:
            return F.rms_norm(x.float(), x.shape[-1:], weight, self.eps).to(x.dtype)
        wide = x.float()
        mean_square = self.reduce(wide.square().sum(-1, keepdim=True)) / self.width
        return (wide * (mean_square + self.eps).rsqrt() * weight).to(x.dtype)


def plain_rms_norm(x: Tensor, eps: float) -> Tensor:
    """Return RMSNorm without weights over the last dim, computed in fp32."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class LayerNorm(nn.Module):
    """LayerNorm (Ba et al. 2016), computed in fp32. zero_centered: the factor is one plus the weight."""

    reduce: Callable[[Tensor], Tensor] | None = None
    """As of `RMSNorm`."""

    def __init__(self, width: int, eps: float, bias: bool, zero_centered: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.width, self.eps, self.zero_centered = width, eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.weight).float()
        if self.zero_centered:
            weight = weight + 1.0
        bias = None if self.bias is None else local(self.bias).float()
        if self.reduce is None:
            return F.layer_norm(x.float(), x.shape[-1:], weight, bias, self.eps).to(x.dtype)
        centred = x.float() - self.reduce(x.float().sum(-1, keepdim=True)) / self.width
        variance = self.reduce(centred.square().sum(-1, keepdim=True)) / self.width
        y = centred * (variance + self.eps).rsqrt() * weight
        return (y if bias is None else y + bias).to(x.dtype)


Norm = RMSNorm | LayerNorm


def linear(table: Table, name: str) -> Linear:
    """Build the linear layer `name` of `table`."""
    outputs, inputs = table[f"{name}.weight"].shape
    return Linear(inputs, outputs, bias=f"{name}.bias" in table)


def norm(table: Table, name: str, config: ModelConfig) -> Norm:
    """Build the norm `name` of `table`, of the kind that the model has."""
    (width,), norms = table[f"{name}.weight"].shape, config.norms
    if norms.kind == "layer":
        return LayerNorm(width, config.norm_eps, norms.bias, norms.zero_centered)
    return RMSNorm(width, config.norm_eps, norms.zero_centered)


def rms_norm(table: Table, name: str, eps: float) -> RMSNorm:
    """Build the RMSNorm `name` of `table`."""
    (width,) = table[f"{name}.weight"].shape
    return RMSNorm(width, eps)


def embedding(table: Table, name: str, dtype: torch.dtype) -> Embedding:
    """Build the embedding `name` of `table`, which returns vectors in `dtype`."""
    vocab_size, width = table[f"{name}.weight"].shape
    return Embedding(vocab_size, width, dtype)


def relu_squared(x: Tensor) -> Tensor:
    """Return the square of what is positive (So et al. 2021, "Primer")."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": relu_squared,
}


def gated(gate: Tensor, up: Tensor, activation: Activation, limit: float) -> Tensor:
    """Return activation(gate) * up; with `limit`, (up + 1) * gate * sigmoid(1.702 gate) of clamped values (gpt-oss)."""
    if not limit:
        return activation(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), by default SwiGLU (Shazeer 2020), with the sizes of a
    `plan.parameters.feed_forward_table`; see `gated` for `limit`.

    If the table has no gate, it is down(activation(up(x))). A family of the user's has an `activation` of its own.
    """

    def __init__(self, table: Table, activation: Activation = F.silu, limit: float = 0.0):
        super().__init__()
        self.gate = linear(table, "gate") if "gate.weight" in table else None
        self.up, self.down = linear(table, "up"), linear(table, "down")
        self.activation, self.limit = activation, limit

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gate is None:
            y_BTD: Tensor = self.down(self.activation(self.up(x_BTD)))
        else:
            y_BTD = self.down(gated(self.gate(x_BTD), self.up(x_BTD), self.activation, self.limit))
        return y_BTD
