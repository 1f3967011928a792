"""Shard files: boxes of tensors in the safetensors format; the metadata say where in its whole each of them lies.

A box that is a whole tensor has its plain name, so that any safetensors library reads it; the name of another one has
its place too, as in "model.head.weight[0:64,32:64]".
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from pydantic import NonNegativeInt, TypeAdapter, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from argosy.checkpoint.boxes import PLACES, Box
from argosy.errors import first_error
from argosy.files import RegularFile, open_regular
from argosy.models.tensor_file import FILE_CODES, FILE_DTYPES, read_header

Place = tuple[str, tuple[NonNegativeInt, ...], tuple[NonNegativeInt, ...]]
"""A box's place: the name of its tensor, the shape of that, and where in it the box begins."""
_PLACES = TypeAdapter(dict[str, Place])


def part_box(name: str, part: Tensor, whole: Iterable[int], offset: Iterable[int]) -> Box:
    """Return the box of `part`, which lies at `offset` of a tensor `name` of shape `whole`."""
    return Box(name, _word(part.dtype), tuple(whole), tuple(offset), tuple(part.shape))


def wholes(tensors: Mapping[str, Tensor], prefix: str = "") -> dict[Box, Tensor]:
    """Return the boxes of whole tensors, with `prefix` before their names."""
    return {part_box(prefix + name, t, t.shape, (0,) * t.ndim): t.detach() for name, t in tensors.items()}


def box_bytes(box: Box) -> int:
    """Return the bytes of the box's elements."""
    return box.elements * _itemsize(box)


def cut(box: Box, most_bytes: int) -> Iterator[Box]:
    """Yield boxes of at most `most_bytes` that make up `box`: runs of rows, or parts of rows if one is too large."""
    dim = next((dim for dim, length in enumerate(box.shape) if length > 1), None)
    if box_bytes(box) <= most_bytes or dim is None:
        yield box
        return
    length = box.shape[dim]
    at_once = max(1, most_bytes * length // box_bytes(box))
    for first in range(0, length, at_once):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += first
        shape[dim] = min(at_once, length - first)
        yield from cut(replace(box, offset=tuple(offset), shape=tuple(shape)), most_bytes)


class TensorsToSave(Mapping[Box, Tensor]):
    """Tensors to read; what is there as a function is made when it is looked up, and only the last one is kept."""

    def __init__(self, *some: Mapping[Box, Tensor | Callable[[], Tensor]] | Mapping[Box, Tensor]):
        """Take the tensors of all mappings; of a box that several have, the last one's."""
        self._of: dict[Box, Tensor | Callable[[], Tensor]] = {}
        for tensors in some:
            self._of |= tensors._of if isinstance(tensors, TensorsToSave) else tensors
        self._last: tuple[Box, Tensor] | None = None

    def __getitem__(self, box: Box) -> Tensor:
        tensor = self._of[box]
        if isinstance(tensor, Tensor):
            return tensor
        if self._last is None or self._last[0] != box:
            self._last = None
            self._last = box, tensor()
        return self._last[1]

    def __iter__(self) -> Iterator[Box]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


def write_shard(
    memory: int, parts: Mapping[Box, Tensor], about: Mapping[str, str], boxes: Iterable[Box] | None = None
) -> int:
    """Write `parts` as a shard file to the descriptor `memory`, of a file that must be in memory (memfd, tmpfs).

    Each tensor is copied once, straight into the file's pages. boxes: those to write; None: all. Returns the file's
    size, bytes. Raises: OSError if memory is short.
    """
    some = parts if boxes is None else boxes
    order = sorted(some, key=lambda box: -_itemsize(box))  # so that each lies at a multiple of its items' size
    header = _header(order, about)
    size = len(header) + sum(box_bytes(box) for box in order)
    os.ftruncate(memory, size)
    os.posix_fallocate(memory, 0, size)  # an error here: storing to a page that cannot be had would be a SIGBUS
    # All pages at once: their faults one by one would take as long as the copying.
    pages = torch.frombuffer(mmap.mmap(memory, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
    pages[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    start = len(header)
    for box in order:
        end = start + box_bytes(box)
        if end > start:
            pages[start:end].view(_dtype(box)).view(box.shape).copy_(parts[box].detach())
        start = end
    return size


class ShardFile:
    """A shard file, mapped into memory: only what is asked for is read, and copied. A context manager."""

    def __init__(self, path: Path):
        """Raises: OSError, SafetensorError if it is not a whole shard file."""
        self.path = path
        self._file = RegularFile(path)
        try:
            self._tensors, metadata = read_header(str(path), self._file.size, self._file.read_into)
            self._read_places(metadata)
        except BaseException:
            self._file.close()
            raise

    def _read_places(self, metadata: dict[str, str]) -> None:
        try:
            places = _PLACES.validate_json(metadata.pop(PLACES, "{}"), strict=True)
        except ValidationError as problem:
            raise SafetensorError(f"its metadata {PLACES} cannot be used: {first_error(problem)}") from None
        self.about = metadata
        """The metadata that `write_shard` was given."""
        self._keys = {self._box(key, places.get(key)): key for key in self._tensors}

    @property
    def boxes(self) -> list[Box]:
        return list(self._keys)

    def read(self, box: Box, part: Box) -> Tensor:
        """Return `part`, which lies in `box`, one of `boxes`, as a tensor on the CPU. Only its pages are read."""
        tensor = self._tensors[self._keys[box]]
        if part.shape == box.shape:
            return tensor.read()
        rows, *rest = part.within(box)
        some = tensor.read(rows.start, rows.stop - rows.start)
        return some[(slice(None), *rest)]

    def mapped(self) -> dict[Box, Tensor]:
        """Return the tensors as views of the file's pages, of which no copy is made unless one is written to.

        For files in memory. Raises: OSError.
        """
        with open_regular(self.path) as file:
            pages = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        return {
            box: pages[tensor.start : tensor.start + box_bytes(box)].view(_dtype(box)).view(box.shape)
            for box, tensor in ((box, self._tensors[key]) for box, key in self._keys.items())
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def _box(self, key: str, place: Place | None) -> Box:
        shape, code = self._tensors[key].shape, self._tensors[key].code
        if code not in FILE_DTYPES:
            raise SafetensorError(f"{key} has the dtype {code}, which is not one of {', '.join(FILE_DTYPES)}")
        name, whole, offset = place or (key, shape, (0,) * len(shape))
        fits = len(whole) == len(offset) == len(shape)
        if not fits or any(o + n > w for o, n, w in zip(offset, shape, whole, strict=True)):
            raise SafetensorError(
                f"its metadata {PLACES} put {key} of shape {list(shape)} at {list(offset)} of {name} of {list(whole)}"
            )
        return Box(name, _word(FILE_DTYPES[code]), whole, offset, shape)


def _header(order: list[Box], about: Mapping[str, str]) -> bytes:
    """Return the header: 8 bytes of length, JSON, blanks up to a multiple of 8 (huggingface/safetensors, Format)."""
    entries: dict[str, Any] = {}
    places: dict[str, Any] = {}
    start = 0
    for box in order:
        key = _key(box)
        end = start + box_bytes(box)
        entries[key] = {"dtype": FILE_CODES[_dtype(box)], "shape": box.shape, "data_offsets": (start, end)}
        if key != box.name:
            places[key] = (box.name, box.whole, box.offset)
        start = end
    assert len(entries) == len(order), "a tensor of two shapes or dtypes"
    metadata = {**about, PLACES: json.dumps(places, separators=(",", ":"))}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _key(box: Box) -> str:
    if box.shape == box.whole:
        return box.name
    return f"{box.name}[{','.join(f'{a}:{b}' for a, b in zip(box.offset, box.end, strict=True))}]"


def _dtype(box: Box) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, box.dtype)
    return dtype


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _itemsize(box: Box) -> int:
    return _dtype(box).itemsize
