"""Rounding up or down at random: what one step's rounding loses, the steps keep on average (Gupta et al. 2015).

The random bits are a hash of seed, step, tensor and the element's place in the *whole* tensor, so that they are the
same on every mesh and after a resume, and no generator's state needs saving.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

Places = tuple[Tensor, ...]
"""For each dim of a local part, the int32 offsets of its indices in the whole; their broadcast sum is the place."""


def places(shape: tuple[int, ...], scatter: Callable[[Tensor], Tensor], device: torch.device) -> Places:
    """Where the elements of a local part stand in the whole of `shape`, modulo 2**32.

    `scatter` cuts a tensor of `shape` along its dims; it sees one that has no memory of its own (strides of zero).
    """
    offsets = []
    for dim, size in enumerate(shape):
        along = torch.arange(size, device=device) * math.prod(shape[dim + 1 :])
        whole = along.to(torch.int32).view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        first = [slice(None) if d == dim else slice(1) for d in range(len(shape))]
        offsets.append(scatter(whole)[tuple(first)].clone())  # a view would hold all of the local part
    return tuple(offsets) or (torch.zeros((), dtype=torch.int32, device=device),)


def noise(at: Places, bits: int, *key: object) -> Tensor:
    """Uniform int32 in [0, 2**bits) for each place; another `key` (seed, step, name, ...) gives other numbers.

    The hash is Wellons' lowbias32 (github.com/skeeto/hash-prospector), with half of the key going in midway.
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
    """`x` (fp32, finite) as one of its two bf16 neighbours, each with the chance that makes the mean `x`.

    `random` is 16 bits for each element, as from `noise`.
    """
    # bf16 is the upper half of fp32: the chance that adding 16 random bits carries into it is the fraction cut off.
    return ((x.view(torch.int32) + random) & ~0xFFFF).view(torch.float32).bfloat16()
