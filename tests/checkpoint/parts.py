"""Parts of tensors whose numbers follow from their place."""

from __future__ import annotations

import zlib

import torch

from argosy.checkpoint.boxes import Box


def part(name: str, whole: tuple[int, ...], cuts: list[tuple[int, int]], dtype: str = "float32") -> Box:
    """The box from `cuts[dim][0]` to `cuts[dim][1]`."""
    offset, shape = tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts)
    return Box(name, dtype, whole, offset, shape)


def value(box: Box) -> torch.Tensor:
    """What the box holds: numbers that follow from the tensor's name and their place, and are exact in any dtype."""
    whole = (torch.arange(torch.Size(box.whole).numel()) * 7 + zlib.crc32(box.name.encode())) % 251
    everywhere = Box(box.name, box.dtype, box.whole, (0,) * len(box.whole), box.whole)
    return whole.view(box.whole)[box.within(everywhere)].to(getattr(torch, box.dtype))
