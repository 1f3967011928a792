"""Frozen matrices in four or eight bits (`lora.base`), which are dequantised wherever they are multiplied.

NF4 is that of QLoRA (Dettmers et al. 2023, section 3 and appendix E): the nearest of sixteen quantiles of the normal
distribution, times the largest magnitude of a block of 64 numbers. int8 has 255 even steps in their place. Scales are
fp32, not quantised a second time: blocks of scales would cross rows.

A row of a matrix is a row of bytes, its scales and then its codes. So whatever cuts rows, as ZeRO does, cuts bytes
alike, and a matrix cut by rows or at multiples of 64 columns has the same numbers as the whole. It is plain PyTorch, so
that it runs and compiles on any device, and torch's own tools see what it computes; bitsandbytes and torchao, which
give the same codes, quantise neither by rows nor for DTensors of every axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.config.train import BASE_BITS, BASE_BLOCK, LoraConfig
from argosy.matmul import dense

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of NF4 by their codes (Dettmers et al. 2023, appendix E)."""
INT8_STEPS = 127
"""int8's codes reach from -INT8_STEPS to INT8_STEPS."""
DEQUANTISE_BYTES = {"cpu": 2**18}
"""Bytes that are computed at once, by device: what lies between stays in a core's caches, and is small beside the
matrix."""
ELSEWHERE_AT_ONCE = 2**22
"""On other devices, where each call takes time."""
Product = Callable[[Tensor, Tensor], Tensor]
"""Inputs and a weight -> outputs: `dense`, or of each expert its own rows."""


class QuantisationScheme:
    """The way one matrix or a stack of matrices is quantised: [..., rows, columns] as uint8 [..., rows, bytes]."""

    def __init__(self, lora: LoraConfig, columns: int, first: int, whole: int, ranks: int = 1):
        """columns: those that this rank has, from the column `first` of the `whole`; ranks: those that share a row."""
        self.columns, self.first, self.whole = columns, first, whole
        self.bits = BASE_BITS[lora.base]
        #: The same on all ranks: it is that of the rank with most columns.
        self.row_bytes = lora.row_bytes(-(-whole // ranks))
        #: NF4's numbers of both halves of a byte, fp32 [256, 2]; `to` makes them.
        self.pairs: Tensor | None = None
        #: int32 [1]: or'ed with it, bytes become indices.
        self.zero: Tensor | None = None

    def to(self, device: torch.device) -> None:
        """Make on `device` what dequantising needs there."""
        if self.bits == 4:
            levels = torch.tensor(NF4, device=device)
            self.pairs = torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1)
        self.zero = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.row_bytes // (4 + BASE_BLOCK * self.bits // 8)

    def quantise(self, numbers: Tensor) -> Tensor:
        """Return [..., rows, columns] quantised, to the nearest; a block of zeros has zeros for its codes."""
        rows = numbers.flatten(0, -2)
        quantised = torch.empty(len(rows), self.row_bytes, dtype=torch.uint8, device=numbers.device)
        for start in range(0, len(rows), step := max(1, at_once(rows) // self.row_bytes)):
            some = F.pad(rows[start : start + step].float(), (0, self.blocks * BASE_BLOCK - self.columns))
            blocks = some.view(-1, self.blocks, BASE_BLOCK)
            scales = blocks.abs().amax(-1)
            unit = blocks / scales.where(scales > 0, 1.0).unsqueeze(-1)
            into = quantised[start : start + step]
            into[:, : 4 * self.blocks] = scales.view(torch.uint8)
            into[:, 4 * self.blocks :] = self._codes(unit.flatten(1))
        return quantised.view(*numbers.shape[:-1], self.row_bytes)

    def _codes(self, unit: Tensor) -> Tensor:
        """Return the bytes of numbers between -1 and 1."""
        if self.bits == 8:
            return (unit * INT8_STEPS).round().to(torch.int8).view(torch.uint8)
        levels = torch.tensor(NF4, dtype=torch.float64, device=unit.device)
        between = ((levels[1:] + levels[:-1]) / 2).float()
        codes = torch.bucketize(unit, between, out_int32=True).to(torch.uint8)
        return codes[:, 0::2] << 4 | codes[:, 1::2]

    def dequantise(self, quantised: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
        """Return the numbers, [..., rows, columns], computed in fp32 and rounded to `dtype`; compiled, not before
        there is `after`."""
        rows = quantised.flatten(0, -2)
        if torch.compiler.is_compiling():  # then it is one kernel, and nothing lies between
            return self._numbers(rows, after).to(dtype).view(*quantised.shape[:-1], self.columns)
        numbers = torch.empty(len(rows), self.columns, dtype=dtype, device=quantised.device)
        for start in range(0, len(rows), step := max(1, at_once(rows) // self.row_bytes)):
            numbers[start : start + step] = self._numbers(rows[start : start + step])
        return numbers.view(*quantised.shape[:-1], self.columns)

    def _numbers(self, rows: Tensor, after: Tensor | None = None) -> Tensor:
        """Return the numbers of rows [R, bytes], fp32 [R, columns]."""
        scales, codes = rows[:, : 4 * self.blocks].view(torch.float32), rows[:, 4 * self.blocks :]
        zero = self.zero
        if after is not None:  # nothing is above infinity, but the compiler cannot know
            zero = (after[(0,) * after.ndim] > torch.inf).to(torch.int32).view(1)
        assert zero is not None
        if self.bits == 4:
            assert self.pairs is not None
            unit = F.embedding(codes | zero, self.pairs).view(-1, self.blocks, BASE_BLOCK)
        else:
            unit = (codes.view(torch.int8) | zero).view(-1, self.blocks, BASE_BLOCK) / INT8_STEPS
        return (unit * scales.unsqueeze(-1)).flatten(1)[:, : self.columns]


def at_once(numbers: Tensor) -> int:
    """Return how many bytes, or numbers, are computed at once on the device of these."""
    return DEQUANTISE_BYTES.get(numbers.device.type, ELSEWHERE_AT_ONCE)


@dataclass(frozen=True)
class QuantisedWeight:
    """Quantised numbers, and how they are quantised: what stands for a weight where it is multiplied or filled."""

    data: Tensor
    scheme: QuantisationScheme

    def float(self) -> Tensor:
        """Return the numbers, fp32."""
        return self.scheme.dequantise(self.data, torch.float32)

    def times(self, x: Tensor, product: Product) -> Tensor:
        """Return product(x, weight) in the dtype of `x`. Autograd keeps the quantised weight alone, and has no gradient
        of it."""
        y: Tensor = _Times.apply(x, self.data, self.scheme, product)
        return y

    def read(self, part: Callable[[int, int], Tensor]) -> None:
        """Fill it: `part` gives so many rows (of a stack: matrices) from the first, which are quantised one after the
        other."""
        each = max(1, self.scheme.columns * self.data[:1, ..., 0].numel())
        for start in range(0, len(self.data), step := max(1, 4 * at_once(self.data) // each)):
            count = min(step, len(self.data) - start)
            numbers = part(start, count).to(self.data.device)
            self.data[start : start + count] = self.scheme.quantise(numbers)


class _Times(torch.autograd.Function):
    """product(x, weight), where a product with the transposed weight gives the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, data: Tensor, scheme: QuantisationScheme, product: Product) -> Tensor:
        ctx.save_for_backward(data)
        ctx.scheme, ctx.product = scheme, product
        return product(x, scheme.dequantise(data, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (data,) = ctx.saved_tensors
        # Compiled, forward and backward are one graph: without `after` it would keep forward's numbers for backward.
        return ctx.product(grad, ctx.scheme.dequantise(data, grad.dtype, after=grad).mT), None, None, None


def multiply(x: Tensor, weight: Tensor | QuantisedWeight, product: Product = dense) -> Tensor:
    """Return product(x, weight), whether the weight is quantised or not."""
    return weight.times(x, product) if isinstance(weight, QuantisedWeight) else product(x, weight)
