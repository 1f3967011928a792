"""Number formats of changes and gradients on the wire, and the vector that they are of.

Formats have blocks of 256 numbers, the short ones with a scale each. All parts of a run have the same order of a
fragment's numbers, as one vector, under any plan.

Streaming DiLoCo found 4 bits to cost no loss (Douillard et al. 2025, section 3.3). What was rounded away is not sent
later: the next change is measured from the weights that all sites agreed on, so it contains what was lost. Fragments
take turns (`plan.sync`). One has everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.plan.sync import WIRE_BLOCK, WIRE_BLOCK_BYTES, fragments_of

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
LEVELS = {"int8": 127.0, "int4": 7.0}


@dataclass(frozen=True)
class WireFormat:
    """One of fp32, bf16, int8, int4."""

    name: str

    @property
    def block_bytes(self) -> int:
        return WIRE_BLOCK_BYTES[self.name]

    def blocks(self, elements: int) -> int:
        """Return how many blocks `elements` numbers take; the last one is filled up with zeros."""
        return -(-elements // WIRE_BLOCK)

    def encode(self, numbers: F32) -> U8:
        """Return the bytes of `numbers`. Numbers that are not finite make all of their block not finite."""
        blocks = self.blocks(len(numbers))
        padded: F32 = np.pad(numbers, (0, missing)) if (missing := blocks * WIRE_BLOCK - len(numbers)) else numbers
        padded = padded.reshape(blocks, WIRE_BLOCK)
        if self.name == "fp32":
            return padded.reshape(-1).view(np.uint8)
        if self.name == "bf16":
            return _rounded_to_bf16(padded).reshape(-1).view(np.uint8)
        out: Any = np.zeros((blocks, self.block_bytes), np.uint8)
        scales = (np.abs(padded).max(axis=1) / np.float32(LEVELS[self.name])).astype(np.float32)
        out[:, :4] = scales.astype("<f4")[:, None].view(np.uint8)
        with np.errstate(divide="ignore", invalid="ignore"):
            levels = np.where(scales[:, None] > 0, np.rint(padded / scales[:, None]), 0)
        whole = np.nan_to_num(levels).astype(np.int8)
        if self.name == "int8":
            out[:, 4:] = whole.view(np.uint8)
        else:
            shifted = (whole + 8).astype(np.uint8)
            out[:, 4:] = shifted[:, 0::2] | (shifted[:, 1::2] << 4)
        flat: U8 = out.reshape(-1)
        return flat

    def decode(self, data: U8) -> F32:
        """Return the numbers of whole blocks."""
        if self.name == "fp32":
            return data.view("<f4").astype(np.float32, copy=False)
        if self.name == "bf16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        rows = data.reshape(-1, self.block_bytes)
        scales = np.ascontiguousarray(rows[:, :4]).view("<f4")
        if self.name == "int8":
            return (rows[:, 4:].view(np.int8) * scales).astype(np.float32).reshape(-1)
        numbers: F32 = np.empty((len(rows), WIRE_BLOCK), np.float32)
        numbers[:, 0::2] = (rows[:, 4:] & 15).astype(np.int8) - 8
        numbers[:, 1::2] = (rows[:, 4:] >> 4).astype(np.int8) - 8
        return (numbers * scales).reshape(-1)


def _rounded_to_bf16(numbers: F32) -> npt.NDArray[np.uint16]:
    """Round to the nearest, ties to even, as torch does; what is not a number stays so."""
    bits = numbers.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


@dataclass(frozen=True)
class Flat:
    """The vector of some parameters: name -> shape of the whole, in order."""

    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def starts(self) -> dict[str, int]:
        """The first element of each parameter."""
        starts, at = {}, 0
        for name, shape in self.shapes.items():
            starts[name] = at
            at += prod(shape)
        return starts

    @cached_property
    def elements(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def identity(self) -> str:
        """Sixteen hexadecimal digits that differ for another model."""
        return hashlib.sha256(repr(list(self.shapes.items())).encode()).hexdigest()[:16]

    def part(self, vector: F32, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> F32:
        """Return the view of `vector` that is the box of `shape` at `offset` of a parameter."""
        whole = self.shapes[name]
        view = vector[self.starts[name] : self.starts[name] + prod(whole)].reshape(whole)
        return view[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    def read(self, blob: U8, wire: WireFormat, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> F32:
        """Return that box of the vector that `blob` encodes; only the rows that it lies in are decoded."""
        whole, start = self.shapes[name], self.starts[name]
        row = prod(whole[1:])
        first, rows = (offset[0], shape[0]) if whole else (0, 1)
        begin = start + first * row
        block = begin // WIRE_BLOCK
        end_block = -(-(begin + rows * row) // WIRE_BLOCK)
        numbers = wire.decode(blob[block * wire.block_bytes : end_block * wire.block_bytes])
        numbers = numbers[begin - block * WIRE_BLOCK :][: rows * row].reshape((rows, *whole[1:]) if whole else ())
        return (
            numbers[(slice(None), *(slice(o, o + n) for o, n in zip(offset[1:], shape[1:], strict=True)))]
            if whole
            else numbers
        )


def flats_of(shapes: Mapping[str, tuple[int, ...]], fragments: int) -> list[Flat]:
    """Return the fragments, in the order of their turns."""
    return [Flat({name: shapes[name] for name in names}) for names in fragments_of(shapes, fragments)]
