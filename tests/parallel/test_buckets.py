"""Checksums of gradients and of their sums: errors are seen, and rounding is none."""

from __future__ import annotations

import pytest
import torch

from argosy.parallel.buckets import checksums, is_sum, sum_of_bits
from tiny import flip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 7, 8, 64, 1001])
def test_every_flipped_bit_changes_the_sum(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    before = int(sum_of_bits(tensor))
    for index in {0, size // 2, size - 1}:
        for bit in range(8 * tensor.element_size()):
            flip(tensor, index, bit)
            assert int(sum_of_bits(tensor)) != before
            flip(tensor, index, bit)
    assert int(sum_of_bits(tensor)) == before


def test_the_sum_depends_neither_on_where_a_tensor_lies_nor_on_its_strides():
    tensor = torch.randn(6, 5)
    shifted = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(6, 5)
    assert shifted.storage_offset() == 1
    assert sum_of_bits(tensor) == sum_of_bits(shifted) == sum_of_bits(tensor.T.contiguous().T)


def test_an_empty_tensor_has_a_sum():
    assert int(sum_of_bits(torch.empty(0, 3))) == 0


def summed(ranks: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over ranks of gradients of various sizes, in `dtype`, and the sum of their checksums."""
    random = torch.Generator().manual_seed(seed)
    parts = torch.randn(ranks, 4096, generator=random) * torch.logspace(-8, 0, 4096)
    parts = parts.to(dtype)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total, checksums(parts).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_rounding_is_never_taken_for_a_fault(ranks, dtype):
    assert all(is_sum(*summed(ranks, dtype, seed), ranks) for seed in range(200))


def test_a_high_bit_is_seen_and_one_below_rounding_is_not():
    total, expected = summed(4, torch.float32)
    flip(total, 4095, 28)
    assert not is_sum(total, expected, 4)
    flip(total, 4095, 28)
    flip(total, 4095, 0)
    assert is_sum(total, expected, 4)


def test_what_arrives_not_finite_is_a_fault_and_what_was_sent_so_is_none():
    total, expected = summed(4, torch.float32)
    assert is_sum(total * torch.inf, expected * torch.inf, 4)
    total[7] = torch.inf
    assert not is_sum(total, expected, 4)
    total[7] = torch.nan
    assert not is_sum(total, expected, 4)
