"""A model's weights by our names, of which no more is in memory than is asked for: those of a Hugging Face folder."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from argosy.errors import UserError
from argosy.models.hf_names import Conversion
from argosy.models.initialize import box_of
from argosy.models.quantised import Stored
from argosy.models.tensor_file import FILE_DTYPES

TENSOR_READ_BYTES = 32 * 2**20
"""About how much of a large tensor is read at once, where its rows can be read by themselves."""
TIED_ROWS = 16
"""Rows of a head that are compared with the embedding's: training would change each of them."""


class LazyWeights(Mapping[str, Tensor]):
    """Weights by our names, which are read when they are asked for, whole or in part."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]):
        self._shapes = shapes

    @abstractmethod
    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of a weight that begins at `offset`, on the CPU, in its stored dtype."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a weight is stored in."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape."""
        return self._shapes[name]

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Return rows of a weight, of its first dim."""
        shape = self.shape(name)
        return self.part(name, (first, *(0 for _ in shape[1:])), (count, *shape[1:]))

    def in_parts(self, name: str) -> Iterator[Tensor]:
        """Yield a weight's rows in order, some at a time."""
        shape = self.shape(name)
        if not shape or not self.has_rows(name):
            yield self[name]
            return
        at_once = max(1, TENSOR_READ_BYTES // max(1, math.prod(shape[1:]) * self.dtype(name).itemsize))
        for first in range(0, shape[0], at_once):
            yield self.rows(name, first, min(at_once, shape[0] - first))

    def has_rows(self, name: str) -> bool:
        """Return True if reading some rows of a weight costs no more than these."""
        return True

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.part(name, (0,) * len(shape), shape)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # Mapping's own would read the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class HeldWeights(LazyWeights):
    """Weights that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        self._tensors = tensors

    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        return box_of(self._tensors[name].detach(), offset, shape).cpu()

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype


class FolderWeights(LazyWeights):
    """The weights of a Hugging Face folder. What was fused with a weight is kept until something else is asked for."""

    def __init__(
        self, conversions: Sequence[Conversion], stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]
    ):
        super().__init__(shapes)
        self._conversions = {name: conversion for conversion in conversions for name in conversion.ours}
        self._stored = stored
        self._last: tuple[Conversion, dict[str, Tensor]] | None = None

    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        conversion = self._conversions[name]
        if not offset:
            return self._together(conversion, name)
        first, count = offset[0], shape[0]
        if conversion.rows == "together":
            return box_of(self._together(conversion, name), offset, shape)
        if conversion.rows == "alone":
            ours = conversion.to_ours([self._stored[conversion.theirs[0]].read(first, count)])
            return box_of(ours[conversion.ours.index(name)], (0, *offset[1:]), shape)
        out = torch.empty(tuple(shape), dtype=self.dtype(name))
        for row, theirs in zip(out, conversion.theirs[first : first + count], strict=True):
            row.copy_(box_of(self._stored[theirs].read(offset[1], shape[1]), (0, *offset[2:]), shape[1:]))
        return out

    def dtype(self, name: str) -> torch.dtype:
        return FILE_DTYPES[self._stored[self._conversions[name].theirs[0]].code]

    def has_rows(self, name: str) -> bool:
        return self._conversions[name].rows != "together"

    def _together(self, conversion: Conversion, name: str) -> Tensor:
        if self._last is None or self._last[0] is not conversion:
            self._last = None  # before the next is read: only one is in memory
            ours = conversion.to_ours([self._stored[theirs].read() for theirs in conversion.theirs])
            self._last = conversion, dict(zip(conversion.ours, ours, strict=True))
        tensor = self._last[1].pop(name, None)
        if not self._last[1]:
            self._last = None
        return self._together(conversion, name) if tensor is None else tensor


def check_sizes(shapes: Mapping[str, tuple[int, ...]], stored: Iterable[Stored], file: str) -> None:
    """Raise UserError if a weight has more numbers, according to `file`, than are stored in all: a size there is wrong,
    and may be too large to compute with."""
    held = sum(math.prod(tensor.shape) for tensor in stored)
    for name, shape in shapes.items():
        if math.prod(shape) > held:
            raise UserError(
                f"{file}: {name} would have the shape {list(shape)}, and all weights together have {held:,} numbers. "
                "Check the config against the weights."
            )


def check_tied(embedding: Stored, head: Stored, file: str) -> None:
    """Raise UserError if a stored head differs from the embedding that it is tied to, according to `file`: transformers
    5 computes with the head then, older ones and vLLM with the embedding."""
    rows = range(0, embedding.shape[0], max(1, embedding.shape[0] // TIED_ROWS))
    if embedding.shape != head.shape or any((embedding.read(n, 1) != head.read(n, 1)).any() for n in rows):
        raise UserError(
            f"{file}: tie_word_embeddings = true, and lm_head.weight differs from model.embed_tokens.weight. Set it to "
            "false to take both, or take lm_head.weight out of the weights."
        )
