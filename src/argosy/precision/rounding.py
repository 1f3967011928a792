"""Stochastic rounding, up or down at random, so that rounding errors average out over steps (Gupta et al. 2015).

The random bits are a hash of seed, step, tensor and the element's place in the *whole* tensor. So they are the same on
every mesh and after a resume, and no generator's state has to be saved.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

Places = tuple[Tensor, ...]
"""For each dim of a local part, the int32 offsets of its indices in the whole. Their broadcast sum is the place."""


def places(shape: tuple[int, ...], scatter: Callable[[Tensor], Tensor], device: torch.device) -> Places:
    """Return the places of a local part's elements in the whole of `shape`, modulo 2**32.

    `scatter` cuts a tensor of `shape` along its dims; it is called with one that takes no memory (strides of zero).
    """
    offsets = []
    for dim, size in enumerate(shape):
        along = torch.arange(size, device=device) * math.prod(shape[dim + 1 :])
        whole = along.to(torch.int32).view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        first = [slice(None) if d == dim else slice(1) for d in range(len(shape))]
        offsets.append(scatter(whole)[tuple(first)].clone())  # a view would keep the whole local part in memory
    return tuple(offsets) or (torch.zeros((), dtype=torch.int32, device=device),)


def noise(at: Places, bits: int, *key: object) -> Tensor:
    """Return a uniform int32 in [0, 2**bits) for each place; another `key` (seed, step, name, ...) gives other numbers.

    The hash is Wellons' lowbias32 (github.com/skeeto/hash-prospector); half of the key is mixed in midway.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    before, midway = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    x = functools.reduce(torch.add, at) ^ before
    x ^= (x >> 16) & 0xFFFF  # masked: torch has no logical shift of int32
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x ^= midway
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return (x >> (32 - bits)) & ((1 << bits) - 1)


def round_to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """Round `x` (fp32, finite) to one of its two bf16 neighbours, with probabilities that make the mean `x`.

    `random` has 16 bits for each element, e.g. from `noise`.
    """
    # bf16 is the upper half of fp32. Adding 16 random bits to the lower half carries into the upper one with a chance
    # equal to the fraction that rounding cuts off.
    return ((x.view(torch.int32) + random) & ~0xFFFF).view(torch.float32).bfloat16()
