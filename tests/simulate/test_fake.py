"""Live memory is counted to the byte, in forward, backward, and inside operators of our own.

Contractions count, by the convention of `plan.workload`; all else does not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.observe.wire import OperatorWatch
from argosy.simulate.fake import answer_alike
from argosy.simulate.record import LiveBytes, flops_of

KIB = 1024


def numbers(kib: int) -> Tensor:
    return torch.ones(kib * 256)


def test_what_is_made_counts_until_it_is_gone():
    before = numbers(64)
    with LiveBytes() as live:
        a = numbers(8)
        b = a + 1
        assert live.now == 16 * KIB
        del b
        view = a[:4].view(2, 2)
        del a
        assert live.now == 8 * KIB, "a view keeps all of it"
        before.add_(1)
        del view
    assert (live.now, live.most) == (0, 16 * KIB)


def test_what_is_kept_for_backward_counts():
    x = numbers(4).requires_grad_()
    with LiveBytes() as live:
        y = x.exp().sin().sum()  # exp keeps its output, sin its input: the same 4 KiB
        kept = live.now
        y.backward()
        del y
    assert kept == pytest.approx(4 * KIB, abs=8)
    assert live.most >= 8 * KIB
    assert live.now == 4 * KIB, "the gradient"


@torch.library.custom_op("argosy::test_live_scratch", mutates_args=())
def scratch(x: Tensor) -> Tensor:
    return (x.repeat(8) + 1)[: len(x)].clone()


def test_an_operator_of_ours_is_seen_from_inside():
    x = numbers(4)
    with LiveBytes() as live:
        y = scratch(x)
    assert torch.equal(y, x + 1)
    assert (live.now, live.most) == (4 * KIB, 64 * KIB), "what it repeats, and the sum"


def test_memory_that_changes_its_size_counts_as_it_is():
    with LiveBytes() as live:
        gathered = numbers(8)
        gathered.untyped_storage().resize_(0)
        assert live.now == 0
        gathered.untyped_storage().resize_(8 * KIB)
        assert live.now == 8 * KIB
    gathered.untyped_storage().resize_(0)
    assert live.most == 8 * KIB, "no one watches any more"


def test_the_meta_device_has_no_memory():
    with LiveBytes() as live:
        shape = torch.empty(1000, device="meta") + 1
    assert (live.most, shape.device.type) == (0, "meta")


class Count(OperatorWatch):
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


def test_a_rank_may_send_a_part_of_what_it_gathers_into():
    """FSDP2 does: with `fp8_gather` it sends bytes, which are real here."""
    gathered = torch.tensor([1, 2, 0, 0], dtype=torch.uint8)
    answer_alike("c10d::_allgather_base_", (gathered, gathered[:2], None, False))
    assert gathered.tolist() == [1, 2, 1, 2]
