"""Layers compute in the input's dtype and keep their weights' own."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from argosy.models.layers import FeedForward, Linear, RMSNorm


def test_linear_in_bf16_leaves_weight_and_gradient_in_fp32():
    layer = Linear(8, 4)
    y = layer(torch.randn(3, 8, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_rmsnorm_divides_by_the_root_mean_square():
    norm = RMSNorm(8, eps=1e-2)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_rmsnorm_of_bf16_is_computed_in_fp32_and_rounded_once():
    norm = RMSNorm(64, eps=1e-5)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(norm(x), norm(x.float()).bfloat16())


def test_feed_forward_is_swiglu(small):
    mlp = FeedForward(small)
    x = torch.randn(2, 3, small.width)
    gate, up, down = (layer.weight for layer in (mlp.gate, mlp.up, mlp.down))
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
