"""Boxes: which part of a tensor a file, a rank or an in-memory checkpoint holds, and how parts make up a whole.

Every tier of a run's state (live replicas, in-memory checkpoints, files) offers boxes; a rank that wants some, under
any layout, takes them from whatever has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

Holder = TypeVar("Holder")
PLACES = "argosy.places"
"""Metadata key of a shard file: JSON of {key of a box: [name, shape of the whole, offset]}, for boxes that are only a
part of their tensor."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a named tensor. The shape of a scalar's is (); a box with a 0 in `shape` is empty."""

    name: str
    dtype: str
    """Spelled as in torch, without the module: float32, bfloat16, int64, ..."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Start of the box in the whole."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index in each dim of the whole."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Return the slices that take this box out of a tensor that holds `other`, which contains it."""
        return tuple(slice(o - p, o - p + n) for o, p, n in zip(self.offset, other.offset, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return what both hold; None if that is nothing."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        if any(a >= b for a, b in zip(start, end, strict=True)):
            return None
        return self._part(start, end)

    def minus(self, hole: Box) -> Iterator[Box]:
        """Yield boxes that make up this one without `hole`, which lies in it."""
        start, end = list(self.offset), list(self.end)
        for dim, (first, last) in enumerate(zip(hole.offset, hole.end, strict=True)):
            if start[dim] < first:
                yield self._part(start, [*end[:dim], first, *end[dim + 1 :]])
            if last < end[dim]:
                yield self._part([*start[:dim], last, *start[dim + 1 :]], end)
            start[dim], end[dim] = first, last

    def _part(self, start: Sequence[int], end: Sequence[int]) -> Box:
        shape = tuple(b - a for a, b in zip(start, end, strict=True))
        return Box(self.name, self.dtype, self.whole, tuple(start), shape)


@dataclass(frozen=True)
class Misfit:
    """Why a wanted box cannot be had."""

    wanted: Box
    why: str

    def __str__(self) -> str:
        return f"{self.wanted.name} {self.why}"


def taken_from(wanted: Sequence[Box], source: Box) -> tuple[list[Box], list[Box]]:
    """Return the parts of `wanted` that `source` holds, and boxes that make up the rest."""
    parts, rest = [], []
    for box in wanted:
        if (part := box.overlap(source)) is None:
            rest.append(box)
        else:
            parts.append(part)
            rest += box.minus(part)
    return parts, rest


def cover(wanted: Box, held: Sequence[tuple[Holder, Box]]) -> list[tuple[Holder, Box, Box]] | Misfit:
    """Take `wanted` from those that hold parts of it, the first in `held` before later ones.

    Returns triples (holder, its box, the part to take from it); together they are `wanted`, each element once.
    """
    if not wanted.elements:
        return []
    if not held:
        return Misfit(wanted, "is not there")
    taken: list[tuple[Holder, Box, Box]] = []
    missing = [wanted]
    for holder, box in held:
        if box.whole != wanted.whole:
            return Misfit(wanted, f"is {list(box.whole)} there and {list(wanted.whole)} here")
        parts, missing = taken_from(missing, box)
        taken += ((holder, box, part) for part in parts)
        if not missing:
            return taken
    count = sum(box.elements for box in missing)
    return Misfit(wanted, f"lacks {count:,} of its {wanted.elements:,} numbers there")
