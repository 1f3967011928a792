"""Contractions count, by the convention of `plan.flops`; all else does not."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from argosy.observe.dispatch import Watch
from argosy.observe.flops import flops_of


class Count(Watch):
    """`with Count() as counted:` ... `counted.total`"""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def saw(self, operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        self.total += flops_of(operator, args, result)


def test_a_linear_layer_takes_two_flops_a_weight_and_token_and_twice_that_in_backward():
    x, weight = torch.ones(10, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    with Count() as forward:
        y = F.silu(F.linear(x, weight))
    with Count() as backward:
        y.sum().backward()
    assert (forward.total, backward.total) == (2 * 10 * 4 * 6, 2 * 2 * 10 * 4 * 6)


def test_of_causal_attention_half_counts_and_its_backward_is_two_forwards():
    B, H, T, E = 2, 4, 16, 8
    q = torch.ones(B, H, T, E, requires_grad=True)
    totals = []
    for causal in (False, True):
        with Count() as forward:
            y = F.scaled_dot_product_attention(q, q, q, is_causal=causal)
        with Count() as backward:
            y.sum().backward()
        totals.append((forward.total, backward.total))
    whole = 4 * B * H * T * T * E
    assert totals == [(whole, 2 * whole), (whole // 2, whole)]
