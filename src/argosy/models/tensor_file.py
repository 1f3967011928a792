"""safetensors files, read and written tensor by tensor: never more of one is in memory than was asked for.

The format: 8 bytes of length, a JSON header with each tensor's dtype, shape and place, then the numbers, without holes
(huggingface/safetensors, Format). A header comes from outside, and is checked against the file before anything is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from argosy.data.stores.model_folder import ByteSink
from argosy.files import FILE_COPY_BYTES, json_of

FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors -> those of torch that checkpoints and models have."""
FILE_CODES = {dtype: code for code, dtype in FILE_DTYPES.items()}
_BITS = {"F4": 4, "U16": 16, "U32": 32, "U64": 64, "C64": 64} | {
    c: 8 * dtype.itemsize for c, dtype in FILE_DTYPES.items()
}
MOST_TENSOR_HEADER_BYTES = 100_000_000
"""Largest header of a file, as in the reference implementation."""
METADATA = "__metadata__"

ReadInto = Callable[[int, memoryview], None]
"""Fills a buffer with a file's bytes from a place on."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose numbers are read when they are asked for."""

    file: str
    """The file as messages name it."""
    name: str
    shape: tuple[int, ...]
    code: str
    """Its dtype's name in safetensors."""
    start: int
    """Its offset in the file, in bytes."""
    read_into: ReadInto

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """Return the tensor on the CPU; with `count`, so many rows (of the first dim) from row `first` on."""
        shape = self.shape if count is None else (count, *self.shape[1:])
        tensor = torch.empty(shape, dtype=FILE_DTYPES[self.code])
        if tensor.numel():
            row_bytes = math.prod(self.shape[1:]) * tensor.itemsize
            self.read_into(self.start + first * row_bytes, bytes_of(tensor))
        return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU without gaps."""
    numbers: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


def read_header(file: str, size: int, read_into: ReadInto) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a file of `size` bytes, by name, and its metadata.

    file: its name in messages, which these tensors keep. Raises: SafetensorError if it is cut off, or no such file.
    """
    if size < 8:
        raise SafetensorError(f"it has {size} bytes, and no header")
    length = int.from_bytes(_read(read_into, 0, 8), "little")
    if length > MOST_TENSOR_HEADER_BYTES or 8 + length > size:
        raise SafetensorError(f"its header would have {length:,} bytes, and the file has {size:,}")
    try:
        header = json_of(_read(read_into, 8, length))
    except ValueError as problem:
        raise SafetensorError(f"its header is not JSON ({str(problem)[:100]})") from None
    if not isinstance(header, dict):
        raise SafetensorError("its header is not a JSON object")
    metadata = header.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SafetensorError("its metadata are not texts")
    found = {name: _stored(file, name, entry, 8 + length, read_into) for name, entry in header.items()}
    end = 8 + length
    for tensor in sorted(found.values(), key=lambda tensor: tensor.start):
        bytes_there = stored_bytes(tensor)
        if tensor.start < end and bytes_there:
            raise SafetensorError(f"{tensor.name} begins inside another tensor, or before the numbers")
        if tensor.start > end:
            raise SafetensorError(f"there is a hole before {tensor.name}")
        end = tensor.start + bytes_there
        if end > size:
            raise SafetensorError(f"it is cut off: {tensor.name} ends at byte {end:,}, and the file at {size:,}")
    if end < size:
        raise SafetensorError(f"it has {size - end:,} bytes behind its last tensor")
    return found, metadata


def stored_bytes(tensor: StoredTensor) -> int:
    """Return the bytes of a tensor's numbers."""
    return -(-math.prod(tensor.shape) * _BITS[tensor.code] // 8)


def _read(read_into: ReadInto, start: int, count: int) -> bytes:
    data = bytearray(count)
    read_into(start, memoryview(data))
    return bytes(data)


def _stored(file: str, name: str, entry: Any, begin: int, read_into: ReadInto) -> StoredTensor:
    def is_list(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise SafetensorError(f"its header says no dtype, shape and data_offsets of {name[:100]}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _BITS:
        raise SafetensorError(f"{name[:100]} has the dtype {str(code)[:20]}, which is not one of {', '.join(_BITS)}")
    if not is_list(shape) or not is_list(offsets) or len(offsets) != 2:
        raise SafetensorError(f"{name[:100]}: shape and data_offsets must be lists of whole numbers")
    tensor = StoredTensor(file, name, tuple(shape), code, begin + offsets[0], read_into)
    if offsets[1] - offsets[0] != stored_bytes(tensor):
        raise SafetensorError(f"{name[:100]} of shape {shape} and dtype {code} does not have the bytes {offsets}")
    return tensor


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of a file that is written; its numbers are computed when it is its turn."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterable[Tensor]]
    """Gives the tensor's rows in order, on the CPU, in as many parts as is best."""

    @property
    def bytes(self) -> int:
        """Bytes of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(sink: ByteSink, tensors: Mapping[str, TensorToWrite], metadata: Mapping[str, str]) -> None:
    """Write a file, one part of a tensor after the other. Raises: what `parts` and the sink do."""
    # Each lies at a multiple of its items' size.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name in order:
        tensor = tensors[name]
        end = start + tensor.bytes
        entries[name] = {"dtype": FILE_CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        written = 0
        for part in tensors[name].parts():
            data = bytes_of(part.to(tensors[name].dtype).contiguous())
            for place in range(0, len(data), FILE_COPY_BYTES):
                sink.write(data[place : place + FILE_COPY_BYTES])
            written += len(data)
        assert written == tensors[name].bytes, f"{name}: {written} of {tensors[name].bytes} bytes"
