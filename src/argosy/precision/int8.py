"""Optimizer moments in eight bits: a scale for each block, and a tiny float for each element; and stochastic rounding.

As in Dettmers et al. 2022 ("8-bit optimizers via block-wise quantization") blocks have 256 elements and steps are
finer near zero. The code differs in two ways. It is that of a float (3 mantissa bits), so it needs no table. And
rounding may be stochastic, up or down at random, so that errors average out over steps (Gupta et al. 2015): a second
moment with beta2 = 0.999 moves by 0.1 % in a step, which is less than half of any eight-bit step, so rounding to the
nearest would never move it. bf16 weights without an fp32 copy are rounded in the same way.

Blocks lie along rows, so that a matrix cut by rows, or at multiples of 256 columns, has the same codes as the whole.
The random bits are a hash of seed, step, tensor and the element's place in the *whole* tensor. So they are the same on
every mesh and after a resume, and no generator's state has to be saved.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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


BLOCK = 256
_CUT = 20
"""Mantissa bits of fp32 that the code leaves out: 23 - 3."""


@dataclass(frozen=True)
class Code:
    """Magnitudes in [0, 1] as the floats 2**-octaves ... 1, eight to an octave, shifted down to start at 0.

    So steps are even below 2**-octaves and grow with the magnitude above it; 0 and 1 have codes of their own.
    """

    dtype: torch.dtype
    octaves: int
    least: int
    """The smallest code in use; 1 means that no number becomes zero."""

    @property
    def offset(self) -> float:
        """The shift that is added to a magnitude."""
        return 2.0**-self.octaves

    @property
    def first(self) -> int:
        """The leading bits of the first float."""
        return (127 - self.octaves) << (23 - _CUT)


SIGNED = Code(torch.int8, octaves=15, least=0)
"""For means of gradients: quanta of 2**-18 of the block's largest magnitude near zero."""
UNSIGNED = Code(torch.uint8, octaves=31, least=1)
"""For means of squares, whose root is a divisor. None becomes zero: the least root, 2**-17 of the block's largest, is
above the quantum of `SIGNED`, so no rounding can make an Adam step explode."""


@dataclass(frozen=True)
class Quantized:
    """A tensor in eight bits. `dequantize`, then `quantize` to the nearest, gives the same codes and scales."""

    codes: Tensor
    scales: Tensor
    """fp32 [rows, blocks, 1]"""
    code: Code

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales, bytes."""
        return self.codes.nbytes + self.scales.nbytes


def quantize(x: Tensor, code: Code, random: Tensor | None = None) -> Quantized:
    """Quantize `x` (fp32, finite, not a scalar): to the nearest or, with 20 `random` bits each, without bias."""
    blocks = _blocks(x)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    magnitude = _rows(blocks / scales, x.shape).abs()
    raised = magnitude * (1 - code.offset) + code.offset
    bits = raised.view(torch.int32) + ((1 << (_CUT - 1)) if random is None else random)
    codes = ((bits >> _CUT) - code.first).clamp(min=code.least)
    return Quantized((codes * x.sign() if code.dtype.is_signed else codes).to(code.dtype), scales, code)


def dequantize(quantized: Quantized) -> Tensor:
    """Return the numbers that the codes stand for, fp32."""
    codes, code = quantized.codes, quantized.code
    bits = (codes.to(torch.int32).abs() + code.first) << _CUT
    magnitude = (bits.view(torch.float32) - code.offset) / (1 - code.offset)
    x = magnitude * codes.sign() if code.dtype.is_signed else magnitude
    return _rows(_blocks(x) * quantized.scales, codes.shape)


def _blocks(x: Tensor) -> Tensor:
    """Return [..., n] as [rows, blocks, up to BLOCK], with the last block padded with zeros."""
    rows, n = math.prod(x.shape[:-1]), x.shape[-1]
    width = min(BLOCK, max(n, 1))
    count = -(-n // width)
    return F.pad(x.reshape(rows, n), (0, count * width - n)).view(rows, count, width)


def _rows(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_blocks`."""
    return blocks.flatten(1)[:, : shape[-1]].reshape(shape)
