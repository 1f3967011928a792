"""Compare the weights of two runs bit for bit, without torch: numbers of any dtype are compared as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from argosy.checkpoint.boxes import PLACES
from argosy.checkpoint.store import committed

Bytes = npt.NDArray[np.uint8]


def weight_differences(one: Path, other: Path) -> Iterator[str]:
    """Yield what differs, in any bit, between the newest checkpoints of two runs, whatever their layouts."""
    newest = [saved[-1] for saved in map(committed, (one, other)) if saved]
    if len(newest) < 2:
        yield "a checkpoint is missing"
        return
    if newest[0].step != newest[1].step:
        yield f"the last checkpoints are of steps {newest[0].step} and {newest[1].step}"
        return
    ours, theirs = (_tensors(checkpoint.folder) for checkpoint in newest)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs or not np.array_equal(ours[name], theirs[name]):
            yield name


def _tensors(folder: Path) -> dict[str, Bytes]:
    """Return the tensors of a checkpoint by name, put together from its shard files; shape [*tensor, bytes of one]."""
    wholes: dict[str, Bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, whole, offset, part in _parts(path):
            if name not in wholes:
                wholes[name] = np.zeros((*whole, part.shape[-1]), np.uint8)
            places = tuple(slice(start, start + size) for start, size in zip(offset, part.shape[:-1], strict=True))
            wholes[name][places] = part
    return wholes


def _parts(path: Path) -> Iterator[tuple[str, list[int], list[int], Bytes]]:
    """Yield the name, whole shape, offset and bytes of each box of a shard file.

    The format: 8 bytes of length, a JSON header, the numbers (huggingface/safetensors, Format).
    """
    data = np.memmap(path, np.uint8, mode="r")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:begin].tobytes())
    places = json.loads(header.pop("__metadata__", {}).get(PLACES, "{}"))
    for key, entry in header.items():
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        name, whole, offset = places.get(key) or (key, shape, [0] * len(shape))
        elements = int(np.prod(shape, dtype=np.int64))
        width = (end - start) // elements if elements else 1
        yield name, whole, offset, data[begin + start : begin + end].reshape(*shape, width)
