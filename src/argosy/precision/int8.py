"""Optimizer moments in eight bits: a scale for each block, and a tiny float for each element.

As in Dettmers et al. 2022 ("8-bit optimizers via block-wise quantization") blocks have 256 elements and steps are
finer near zero. The code differs in two ways. It is that of a float (3 mantissa bits), so it needs no table. And
rounding may be stochastic: a second moment with beta2 = 0.999 moves by 0.1 % in a step, which is less than half of any
eight-bit step, so rounding to the nearest would never move it.

Blocks lie along rows, so that a matrix cut by rows, or at multiples of 256 columns, has the same codes as the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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
