"""Arithmetic that is checked: fingerprints of bits, and checksums on sums over ranks.

A sum over ranks keeps checksums: the checksum of the sum is the sum of the checksums (algorithm-based fault tolerance:
Huang & Abraham 1984, "Algorithm-Based Fault Tolerance for Matrix Operations"). In floating point both are rounded, so
an error no larger than rounding cannot be seen: a flip of a low bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIGMAS = 8
"""How many standard deviations of rounding a checksum may be off."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by bytes of an element."""


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, as 64-bit integers in its elements' order, modulo 2**64; int64, no dims."""
    flat = tensor.detach().reshape(-1)
    per_word = 8 // flat.element_size()
    if flat.storage_offset() % per_word:
        flat = flat.clone()  # or its words would begin elsewhere than those of the other replicas
    in_words = flat.numel() // per_word * per_word
    rest = flat[in_words:].view(INTEGERS[flat.element_size()])
    return flat[:in_words].view(torch.int64).sum() + rest.sum(dtype=torch.int64)


def checksums(rows: Tensor) -> Tensor:
    """Return each row's sum and sum of squares, fp64 [n, 2], of `rows` [n, width]: to be summed over ranks."""
    wide = rows.double()  # at once: reductions that convert on the way are slower
    return torch.stack([wide.sum(dim=1), torch.linalg.vector_norm(wide, dim=1).square()], dim=1)


def is_sum(found: Tensor, expected: Tensor, ranks: int) -> Tensor:
    """Return True if `found` can be the sum over ranks of rows whose checksums add up to `expected` [2]; bool, no dims.

    Rows that are not finite have no checksum: they pass.
    """
    off = found.double().sum() - expected[0]
    return (off.abs() <= tolerance(expected, found.dtype, ranks)) | ~expected.isfinite().all()


def tolerance(expected: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return how far the sum of a row that was summed over ranks in `dtype` may be from `expected` [2]; fp64, no dims.

    Rounding each of the n - 1 additions of n ranks, with unit roundoff u, is off by u times a
    partial sum, which is at most sqrt(n) times the root q of the summed squares of the element; over all elements,
    errors being independent, by u n q of the whole row, at most.
    """
    return SIGMAS * torch.finfo(dtype).eps / 2 * ranks * expected[1].sqrt()
