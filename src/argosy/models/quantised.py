"""Quantised weights of Hugging Face folders, dequantised to bf16 as they are read.

fp8 in blocks (DeepSeek-V3, 2024, section 3.3.2): a matrix in E4M3 and one factor for each block of it. MXFP4 (OCP
Microscaling Formats 1.0; gpt-oss): pairs of 4-bit numbers (E2M1) in bytes, and a power of two for every 32 of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.models.hf_layers import refuse
from argosy.models.tensor_file import StoredTensor

SCALES_FP8, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
"""Suffixes of the names of scales, and of the two halves of an MXFP4 weight."""
ROWS_AT_ONCE = 4096
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of E2M1, by their bits."""
BIAS = 127


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in fp8 blocks; read as `StoredTensor` is."""

    weight: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]
    """Rows and columns of a block."""
    code = "BF16"

    @property
    def file(self) -> str:
        return self.weight.file

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        rows, columns = self.block
        count = self.shape[0] if count is None else count
        scales = self.scale.read().float().repeat_interleave(columns, 1)[:, : self.shape[1]]
        out = torch.empty(count, self.shape[1], dtype=torch.bfloat16)
        for start in range(0, count, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, count)
            numbers = self.weight.read(first + start, end - start).float()
            out[start:end] = numbers * scales[torch.arange(first + start, first + end) // rows]
        return out


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A stack of matrices in MXFP4, transposed in store; read as `StoredTensor` is."""

    blocks: StoredTensor
    """[E, columns, rows / 32, 16] bytes."""
    scales: StoredTensor
    """[E, columns, rows / 32] bytes: exponents."""
    code = "BF16"

    @property
    def file(self) -> str:
        return self.blocks.file

    @property
    def name(self) -> str:
        return self.blocks.name.removesuffix(BLOCKS)

    @property
    def shape(self) -> tuple[int, ...]:
        stack, columns, blocks, pairs = self.blocks.shape
        return (stack, blocks * pairs * 2, columns)

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        count = self.shape[0] if count is None else count
        out = torch.empty(count, *self.shape[1:], dtype=torch.bfloat16)
        for i in range(count):  # one matrix at a time: the indices take four times its memory
            out[i] = _unpacked(self.blocks.read(first + i, 1)[0], self.scales.read(first + i, 1)[0]).T
        return out


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [columns, rows] of bytes [columns, rows / 32, 16] and exponents [columns, rows / 32]."""
    table = torch.tensor(FP4, dtype=torch.bfloat16)
    out = torch.empty(*blocks.shape[:-1], 2 * blocks.shape[-1], dtype=torch.bfloat16)
    out[..., 0::2], out[..., 1::2] = table[(blocks & 15).int()], table[(blocks >> 4).int()]
    return torch.ldexp(out, scales.int()[..., None] - BIAS).flatten(1)


Stored = StoredTensor | Fp8Tensor | Mxfp4Tensor


def check_quantization(settings: Mapping[str, Any], file: Path | str) -> None:
    """Refuse a quantization_config whose weights are not dequantised here. Raises: UserError."""
    method = settings.get("quant_method", "of an unnamed kind")
    if method == "mxfp4":
        return
    if method != "fp8":
        refuse(file, "quantization_config", method, "only fp8 in blocks and mxfp4 are dequantised")
    block = settings.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not is_pair or settings.get("fmt", "e4m3") != "e4m3":
        refuse(file, "quantization_config", method, "weight_block_size must give the rows and columns of e4m3 blocks")


def dequantised(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a model with `quantization_config = settings`, quantised ones as those of their numbers.

    Raises: UserError if a weight's scales are missing, or do not fit it.
    """
    found: dict[str, Stored] = {}
    is_fp8 = settings.get("quant_method") == "fp8"
    for name, tensor in stored.items():
        if is_fp8 and name.endswith(SCALES_FP8) and name.removesuffix(SCALES_FP8) in stored:
            continue
        if not is_fp8 and name.endswith(SCALES) and f"{name.removesuffix(SCALES)}{BLOCKS}" in stored:
            continue
        if is_fp8 and tensor.code == "F8_E4M3":
            rows, columns = settings["weight_block_size"]
            shape = tuple(-(-n // size) for n, size in zip(tensor.shape, (rows, columns), strict=False))
            found[name] = Fp8Tensor(tensor, _scales(stored, name + SCALES_FP8, tensor, shape), (rows, columns))
        elif not is_fp8 and name.endswith(BLOCKS):
            if tensor.code != "U8" or len(tensor.shape) != 4 or tensor.shape[-1] != 16:
                refuse(tensor.file, name, list(tensor.shape), "MXFP4 blocks are 16 bytes each, in four dims")
            scales = _scales(stored, name.removesuffix(BLOCKS) + SCALES, tensor, tensor.shape[:-1])
            whole = Mxfp4Tensor(tensor, scales)
            found[whole.name] = whole
        else:
            found[name] = tensor
    return found


def _scales(
    stored: Mapping[str, StoredTensor], name: str, weight: StoredTensor, shape: tuple[int, ...]
) -> StoredTensor:
    if name not in stored:
        refuse(weight.file, weight.name, weight.code, f"its scales {name} are missing")
    if stored[name].shape != shape:
        refuse(stored[name].file, name, list(stored[name].shape), f"scales of {list(weight.shape)} are {list(shape)}")
    return stored[name]
