"""A model's weights in and out of checkpoints tensor by tensor, so that no more of a model is in memory than of one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from argosy.checkpoint import fence, store
from argosy.checkpoint.boxes import Box, Misfit, cover
from argosy.checkpoint.checksums import FileSum, shard_name
from argosy.checkpoint.load import TENSOR_PIECE_BYTES, Held, check_all_there, opened
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.store import Checkpoint
from argosy.data.stores.store import spelled
from argosy.errors import UserError
from argosy.files import make_folder, sync
from argosy.models.hf import import_folder
from argosy.models.lazy_weights import LazyWeights
from argosy.models.quantised_weight import QuantisedWeight
from argosy.models.tensor_file import TensorToWrite, write_tensors

MODEL_PREFIX = "model."
"""Prefix of the names of weights in checkpoints."""
SCORE = "score.weight"
"""The head of a reward model, which begins with initial values if the weights are those of a model without one."""
WEIGHTS_FILE_BYTES = 4 * 10**9
"""About how many bytes go into one file of a checkpoint that is written here."""


class CheckpointWeights(LazyWeights):
    """The weights in the open files of a checkpoint, by their names in the model."""

    def __init__(self, checkpoint: Checkpoint, held: Held, shapes: Mapping[str, tuple[int, ...]]):
        """Raises: UserError if one is missing, or has another shape."""
        super().__init__(shapes)
        self._held = held
        wholes = [self._wanted(name, (0,) * len(shape), shape) for name, shape in shapes.items()]
        check_all_there(wholes, checkpoint, held)

    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        box = self._wanted(name, offset, shape)
        way = cover(box, self._held[box.name])
        assert not isinstance(way, Misfit)
        if len(way) == 1:
            file, source, part = way[0]
            return file.read(source, part)
        out = torch.empty(tuple(shape), dtype=self.dtype(name))
        for file, source, part in way:
            out[part.within(box)] = file.read(source, part)
        return out

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._held[MODEL_PREFIX + name][0][1].dtype)
        return dtype

    def _wanted(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Box:
        return Box(MODEL_PREFIX + name, "", self.shape(name), tuple(offset), tuple(shape))


def folder_weights(place: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> LazyWeights:
    """Open the weights of a Hugging Face folder or its URL, which are read on demand.

    Raises: UserError if one of `shapes`, but for `SCORE`, is not there, or one has another shape.
    """
    named = "model.weights = "
    _, weights = import_folder(place, named)
    for name, shape in shapes.items():
        if (name not in weights and name != SCORE) or (name in weights and weights.shape(name) != shape):
            found = f"is {list(weights.shape(name))} there and {list(shape)} here" if name in weights else "is missing"
            raise UserError(
                f"{named}{spelled(place)} is of another model: {name} {found}.\n  Leave out the sizes in the model "
                "section: those of model.weights are taken then."
            )
    return weights


def fill_from_folder(
    parts: Mapping[Box, Tensor | QuantisedWeight], place: str | Path, before_each: Callable[[], None] = lambda: None
) -> None:
    """Fill this rank's parts of the weights from a Hugging Face folder or its URL, of which no more is read.

    Raises: UserError, before any is filled, if one is not there or has another shape.
    """
    fill(parts, folder_weights(place, {box.name.removeprefix(MODEL_PREFIX): box.whole for box in parts}), before_each)


def fill_from_checkpoint(
    parts: Mapping[Box, Tensor | QuantisedWeight], checkpoint: Checkpoint, before_each: Callable[[], None]
) -> None:
    """Fill them from a checkpoint. Raises: UserError, before any is filled, if one is missing or has another shape."""
    with opened(checkpoint) as held:
        shapes = {box.name.removeprefix(MODEL_PREFIX): box.whole for box in parts}
        fill(parts, CheckpointWeights(checkpoint, held, shapes), before_each)


@torch.no_grad()
def fill(
    parts: Mapping[Box, Tensor | QuantisedWeight], weights: LazyWeights, before_each: Callable[[], None] = lambda: None
) -> None:
    """Fill this rank's parts of the weights in place, whatever their dtypes, and read no more than these, some rows at
    a time. before_each: is called before each part."""
    for box, part in parts.items():
        before_each()
        name = box.name.removeprefix(MODEL_PREFIX)
        if not math.prod(box.shape) or name not in weights:
            continue
        if isinstance(part, QuantisedWeight):
            part.read(partial(_rows, weights, name, box))
        elif not box.shape or not weights.has_rows(name):
            part.copy_(weights.part(name, box.offset, box.shape))
        else:
            at_once = max(1, TENSOR_PIECE_BYTES // (math.prod(box.shape[1:]) * weights.dtype(name).itemsize))
            for first in range(0, box.shape[0], at_once):
                rows = part[first : first + at_once]
                rows.copy_(_rows(weights, name, box, first, len(rows)))


def _rows(weights: LazyWeights, name: str, box: Box, first: int, count: int) -> Tensor:
    return weights.part(name, (box.offset[0] + first, *box.offset[1:]), (count, *box.shape[1:]))


def write_weights(run_dir: Path, manifest: CheckpointManifest, weights: LazyWeights) -> Checkpoint:
    """Write a checkpoint of weights alone, in the dtypes that they are stored in, and commit it. Raises: OSError."""
    partial_folder = fence.partial_folder(run_dir, manifest.step, manifest.generation)
    make_folder(partial_folder.parent)
    partial_folder.mkdir()
    files: dict[str, FileSum] = {}
    try:
        for names in _by_file(weights):
            tensors = {MODEL_PREFIX + name: _to_write(weights, name) for name in names}
            file = shard_name(len(files))
            with (partial_folder / file).open("xb") as opened:
                sink = _Summed(opened)
                write_tensors(sink, tensors, {"step": str(manifest.step)})
                sync(opened)
            files[file] = FileSum(sink.bytes, sink.digest.hexdigest())
        return store.commit(partial_folder, replace(manifest, files=files))
    finally:
        store.discard(partial_folder)


def _to_write(weights: LazyWeights, name: str) -> TensorToWrite:
    return TensorToWrite(weights.shape(name), weights.dtype(name), partial(weights.in_parts, name))


def _by_file(weights: LazyWeights) -> list[list[str]]:
    files: list[list[str]] = [[]]
    room = WEIGHTS_FILE_BYTES
    for name in weights:
        size = _to_write(weights, name).bytes
        if size > room and files[-1]:
            files.append([])
            room = WEIGHTS_FILE_BYTES
        files[-1].append(name)
        room -= size
    return files


class _Summed:
    """Passes what is written on to a file, and sums it up."""

    def __init__(self, file: BinaryIO):
        self._file, self.bytes, self.digest = file, 0, hashlib.sha256()

    def write(self, data: memoryview | bytes) -> None:
        self.digest.update(data)
        self._file.write(data)
        self.bytes += len(data)
