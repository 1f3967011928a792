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
        y_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD
