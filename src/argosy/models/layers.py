"""The small parts: linear layers and norms compute in their input's dtype, whatever their weights' is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.schema import ModelConfig


class Linear(nn.Linear):
    """`nn.Linear` whose weight is read in the input's dtype: fp32 master weights, bf16 arithmetic.

    The gradient comes back through the same cast, so it accumulates in the weight's own precision.
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def side_by_side(x: Tensor, *layers: Linear) -> tuple[Tensor, ...]:
    """What each of `layers` makes of `x`, in one matmul: a wide one is quicker than several narrow ones."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    weight = torch.cat(weights).to(x.dtype)
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(biases).to(x.dtype) if biases else None
    return F.linear(x, weight, bias).split([w.shape[0] for w in weights], dim=-1)


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019, computed in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Linear(config.width, config.ffn_width, bias=False)
        self.up = Linear(config.width, config.ffn_width, bias=False)
        self.down = Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = side_by_side(x_BTD, self.gate, self.up)
        y_BTD: Tensor = self.down(F.silu(gate) * up)
        return y_BTD
