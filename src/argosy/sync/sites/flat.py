"""A fragment of the model's parameters as one vector: the order in which all sites have its numbers, under any plan.

Fragments take turns (streaming DiLoCo, Douillard et al. 2025; `plan.cost.outer_traffic`). One has everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from argosy.plan.cost.outer_traffic import BLOCK, fragments_of
from argosy.sync.sites.wire import F32, U8, WireFormat


@dataclass(frozen=True)
class Flat:
    """The vector of some parameters: name -> shape of the whole, in order."""

    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def starts(self) -> dict[str, int]:
        """Where each parameter begins."""
        starts, at = {}, 0
        for name, shape in self.shapes.items():
            starts[name] = at
            at += prod(shape)
        return starts

    @cached_property
    def elements(self) -> int:
        """Length of the vector."""
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
        block = begin // BLOCK
        end_block = -(-(begin + rows * row) // BLOCK)
        numbers = wire.decode(blob[block * wire.block_bytes : end_block * wire.block_bytes])
        numbers = numbers[begin - block * BLOCK :][: rows * row].reshape((rows, *whole[1:]) if whole else ())
        return (
            numbers[(slice(None), *(slice(o, o + n) for o, n in zip(offset[1:], shape[1:], strict=True)))]
            if whole
            else numbers
        )


def flats_of(shapes: Mapping[str, tuple[int, ...]], fragments: int) -> list[Flat]:
    """Return the fragments, in the order of their turns."""
    return [Flat({name: shapes[name] for name in names}) for names in fragments_of(shapes, fragments)]
