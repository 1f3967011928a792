"""Layers compute in the input's dtype and keep their weights' own."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from argosy.models.layers import Embedding, FeedForward, Linear, RMSNorm, local
from argosy.plan.parameters import feed_forward_table


def test_linear_in_bf16_leaves_weight_and_gradient_in_fp32():
    layer = Linear(8, 4)
    y = layer(torch.randn(3, 8, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


def test_linear_adds_its_bias_once_after_the_parts_of_its_sum():
    """Two ranks with half of the inputs each: what one of them gives once both were added up."""
    layer, halves = Linear(8, 4), [Linear(4, 4), Linear(4, 4)]
    x = torch.randn(3, 8)
    for half, weight in zip(halves, layer.weight.split(4, dim=1), strict=True):
        half.weight.data, half.bias.data = weight.data, layer.bias.data
    halves[0].reduce = lambda y: y + F.linear(x[:, 4:], halves[1].weight)
    torch.testing.assert_close(halves[0](x[:, :4]), layer(x))


def test_an_embedding_gives_vectors_in_its_dtype_and_keeps_its_gradient_in_fp32():
    embedding = Embedding(10, 4, torch.bfloat16)
    torch.nn.init.normal_(embedding.weight)  # its memory may hold NaN, which equals nothing
    y = embedding(torch.tensor([[3, 3, 7]]))
    assert torch.equal(y, embedding.weight[[3, 3, 7]][None].bfloat16())
    y.sum().backward()
    assert embedding.weight.grad.dtype == torch.float32
    assert embedding.weight.grad.sum(1).tolist() == [0, 0, 0, 8, 0, 0, 0, 4, 0, 0]


def test_a_plain_parameter_is_its_own_local_part():
    weight = Linear(2, 2).weight
    assert local(weight) is weight


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
    mlp = FeedForward(feed_forward_table(small.width, small.ffn_width))
    x = torch.randn(2, 3, small.width)
    gate, up, down = (layer.weight for layer in (mlp.gate, mlp.up, mlp.down))
    torch.testing.assert_close(mlp(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)
