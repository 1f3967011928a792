"""Blocks of attention see what they should, sinks are one more score, and each kernel is chosen where it works."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from argosy.models.attention_kernels import (
    CPU_FLASH,
    CPU_PRODUCTS,
    PLAIN_KERNEL,
    SEES_ALL,
    SEES_EARLIER,
    Kernel,
    VisibleKeys,
    add_sinks,
    gradient_of_sinks,
    kernel_for,
    products_are_faster,
)

HEADS, KEYS_HEADS, WIDTH = 4, 2, 8


@pytest.mark.parametrize(
    ("seen", "queries", "keys"),
    [
        (SEES_ALL, 2, 3),
        (SEES_EARLIER, 3, 3),
        (VisibleKeys(True, first=2), 2, 4),
        (VisibleKeys(True, first=1, window=2), 3, 4),
    ],
)
def test_a_block_hides_what_is_later_or_too_long_ago(seen: VisibleKeys, queries: int, keys: int) -> None:
    hidden = seen.hidden(queries, keys, torch.device("cpu"))
    for query in range(queries):
        ahead = [key - (seen.first + query) for key in range(keys)]
        assert hidden[query].tolist() == [
            seen.causal and (place > 0 or bool(seen.window and place <= -seen.window)) for place in ahead
        ]
    assert seen.is_plain == (seen in (SEES_ALL, SEES_EARLIER))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        drawn(2, queries, HEADS, WIDTH),
        drawn(2, keys, KEYS_HEADS, WIDTH),
        drawn(2, keys + 1, KEYS_HEADS, WIDTH)[:, 1:],
    )


def by_definition(q: Tensor, k: Tensor, v: Tensor, seen: VisibleKeys) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(HEADS // KEYS_HEADS, 2) for x in (k, v))
    scores = torch.einsum("bthe,bshe->bhts", q, k) * WIDTH**-0.5
    scores = scores.masked_fill(seen.hidden(q.shape[1], k.shape[1], q.device), -torch.inf)
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN_KERNEL], ids=["flash", "plain"])
@pytest.mark.parametrize("seen", [SEES_ALL, SEES_EARLIER, VisibleKeys(True, first=2, window=3)])
def test_kernels_compute_attention_and_its_gradients(kernel: Kernel, seen: VisibleKeys) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(5, 5 + seen.first))
    expected, sums = by_definition(q, k, v, seen)
    slope = drawn(*expected.shape)
    gradients = torch.autograd.grad(expected, (q, k, v), slope)
    with torch.no_grad():
        y, lse = kernel.forward(q, k, v, seen)
        found = kernel.backward(slope, q, k, v, y, lse, seen)
    for ours, theirs in zip((y, lse, *found), (expected, sums, *gradients), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_sinks_are_one_more_score_whose_value_is_zero() -> None:
    q, k, v = inputs(4, 4)
    sinks = drawn(HEADS).requires_grad_()
    scores = torch.einsum("bthe,bshe->bhts", q, k.repeat_interleave(2, 2)) * WIDTH**-0.5
    more = torch.cat([scores, sinks[None, :, None, None].expand(2, -1, 4, 1)], -1)
    expected = torch.einsum("bhts,bshe->bthe", more.softmax(-1)[..., :-1], v.repeat_interleave(2, 2))

    y, lse = by_definition(q, k, v, SEES_ALL)
    found, whole = add_sinks(y, lse.transpose(1, 2), sinks.detach())
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(whole, more.logsumexp(-1).transpose(1, 2), atol=1e-6)

    slope = drawn(*y.shape)
    (gradient,) = torch.autograd.grad(expected, sinks, slope)
    assert torch.allclose(gradient_of_sinks(slope, found, whole, sinks.detach()), gradient, atol=1e-5)


@pytest.mark.parametrize(("by_products", "kernel"), [(False, CPU_FLASH), (True, CPU_PRODUCTS)])
def test_a_cpu_has_a_kernel_with_and_without_bands(by_products: bool, kernel: Kernel) -> None:
    q = torch.zeros(1, 1, 1, WIDTH)
    assert kernel_for(q, has_bands=True, by_products=by_products) is kernel


def test_a_device_of_another_kind_has_the_plain_kernel() -> None:
    assert kernel_for(torch.zeros(1, 1, 1, WIDTH, device="meta")) is PLAIN_KERNEL


def test_capped_scores_have_a_kernel_of_their_own() -> None:
    q, k, v = inputs(3, 3)
    y, _ = kernel_for(q, softcap=1e6).forward(q, k, v, SEES_EARLIER)
    assert torch.allclose(y, by_definition(q, k, v, SEES_EARLIER)[0], atol=1e-5)
    capped, _ = kernel_for(q, softcap=0.1).forward(q, k, v, SEES_EARLIER)
    assert not torch.allclose(capped, y, atol=1e-3)


def test_products_are_for_long_rows_in_bf16() -> None:
    assert not products_are_faster(torch.zeros(1, 4096, 1, WIDTH))
    assert not products_are_faster(torch.zeros(1, 2, 1, WIDTH, dtype=torch.bfloat16))
