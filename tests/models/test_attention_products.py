"""Attention out of matrix products is causal attention, as exact as torch's kernel for bf16."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy import compiler
from argosy.models import attention_products as products
from argosy.models.attention import packed_attention
from argosy.models.attention_kernels import PLAIN_KERNEL, SEES_EARLIER
from argosy.models.banded_attention import banded_attention

ROUNDED = 6e-3
"""Norm of the error over that of the result, if what goes into products is rounded to bf16."""


def inputs(rows: int, tokens: int, heads: int, kv_heads: int, size: float = 1.0) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, tokens, n, 16) for n in (heads, kv_heads, kv_heads, heads)]
    q, *others = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return [q * size, *others]


def errors(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> Iterator[float]:
    for x, y in zip(ours, exact, strict=True):
        yield ((x.float() - y).norm() / y.norm()).item()


@pytest.mark.parametrize("tokens", [64, 200, 330])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("size", "bar"), [(1.0, ROUNDED), (30.0, 2 * ROUNDED)], ids=["usual", "scores of hundreds"])
def test_results_and_gradients_are_those_of_exact_arithmetic(tokens, kv_heads, size, bar, monkeypatch):
    monkeypatch.setattr(products, "compiled", lambda function: function)
    monkeypatch.setattr(products, "TILE_QUERIES", 128)  # several parts, of several heads each
    monkeypatch.setattr(products, "SCORES", 3 * 128 * 384)
    q, k, v, dy = inputs(2, tokens, 4, kv_heads, size)
    exact = PLAIN_KERNEL.forward(*(x.float() for x in (q, k, v)), SEES_EARLIER)
    found = products.causal_forward(q, k, v)
    assert max(errors(found, exact)) < ROUNDED
    of_exact = PLAIN_KERNEL.backward(*(x.float() for x in (dy, q, k, v)), *exact, SEES_EARLIER)
    gradients = products.causal_backward(dy, q, k, v, *found)
    assert max(errors(gradients, of_exact)) < bar


@pytest.fixture
def lengths(monkeypatch) -> list[int]:
    """Those of the rows or documents that are computed so, now that this CPU is said to be faster for it."""
    found: list[int] = []
    forward = products.causal_forward
    monkeypatch.setattr(products, "IS_FASTER", True)
    monkeypatch.setattr(products, "LEAST_TOKENS", 64)
    monkeypatch.setattr(products, "causal_forward", lambda *given: found.append(given[0].shape[1]) or forward(*given))
    return found


def test_compiled_code_computes_rows_so(lengths):
    compiler.load()
    q, k, v, dy = inputs(2, 96, 2, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    eager = packed_attention(q, k, v, None)
    assert not lengths
    compiled = torch.compile(packed_attention)(q, k, v, None)
    assert lengths == [96]
    torch.testing.assert_close(compiled, eager, rtol=0.02, atol=0.01)
    ours, exact = (torch.autograd.grad(y, leaves, dy) for y in (compiled, eager))
    assert max(errors(ours, tuple(x.float() for x in exact))) < 2 * ROUNDED


def test_each_document_is_computed_by_itself_and_short_ones_by_the_usual_kernel(lengths, monkeypatch):
    monkeypatch.setattr(products, "compiled", lambda function: function)
    q, k, v, _ = (x.flatten(0, 1) for x in inputs(2, 96, 2, 2))
    starts = torch.tensor([0, 70, 96, 192], dtype=torch.int32)
    y, other = (banded_attention(q, k, v, starts, starts, by_products=chosen) for chosen in (True, False))
    assert lengths == [70, 96]
    torch.testing.assert_close(y, other, rtol=0.02, atol=0.01)


def test_fp32_is_not_cut_into_products(monkeypatch):
    monkeypatch.setattr(products, "IS_FASTER", True)
    monkeypatch.setattr(products, "LEAST_TOKENS", 64)
    monkeypatch.setattr(products, "causal_forward", None)
    q, k, v, _ = (x.float() for x in inputs(1, 64, 2, 2))
    y = torch.compile(packed_attention, backend="eager")(q, k, v, None)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(y, expected)
