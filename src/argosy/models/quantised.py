"""Quantised weights of Hugging Face folders: dequantised to bf16 as they are read, compressed as they are written.

Read: fp8 in blocks (DeepSeek-V3, 2024, section 3.3.2): a matrix in E4M3 and one factor for each block of it. MXFP4 (OCP
Microscaling Formats 1.0; gpt-oss): pairs of 4-bit numbers (E2M1) in bytes, and a power of two for every 32 of them.

Written, as the compressed-tensors package stores them, which vLLM and transformers read, from the weights alone: fp8
(its preset FP8_DYNAMIC) and int8 (W8A8) have a scale for each output, and inputs are quantised token by token while the
model computes. int4 (W4A16) has a scale for each group of 128 inputs of an output, and eight numbers in 32 bits. A
scale is the largest magnitude over half the range (round-to-nearest; Frantar et al. 2022 have it beside GPTQ).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from argosy.config.model import ModelConfig
from argosy.data.stores.model_folder import CompressedFormat
from argosy.errors import UserError
from argosy.models.hf_layers import in_json, refuse
from argosy.models.hf_names import conversions_of
from argosy.models.tensor_file import StoredTensor, TensorToWrite
from argosy.plan.parameters import state_table

SCALES_FP8, BLOCKS_SUFFIX, SCALES_SUFFIX = "_scale_inv", "_blocks", "_scales"
"""Suffixes of the names of scales, and of the two halves of an MXFP4 weight."""
QUANTISE_ROWS = 4096
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of E2M1, by their bits."""
BIAS = 127
FP8_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of the scales of fp8."""


@dataclass(frozen=True)
class DequantisedTensor:
    """A tensor that is stored quantised; read as `StoredTensor` is."""

    file: str
    name: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    """Returns so many of its rows from the first of them on, in bf16."""
    code = "BF16"

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        return self.rows(first, self.shape[0] if count is None else count)


def _of_fp8(weight: StoredTensor, scale: StoredTensor, block: tuple[int, int]) -> DequantisedTensor:
    """Return the numbers of a matrix in fp8. block: rows and columns of a block."""

    def read(first: int, count: int) -> Tensor:
        scales = scale.read().float()[:, torch.arange(weight.shape[1]) // block[1]]
        out = torch.empty(count, weight.shape[1], dtype=torch.bfloat16)
        for start in range(0, count, QUANTISE_ROWS):
            end = min(start + QUANTISE_ROWS, count)
            numbers = weight.read(first + start, end - start).float()
            out[start:end] = numbers * scales[torch.arange(first + start, first + end) // block[0]]
        return out

    return DequantisedTensor(weight.file, weight.name, weight.shape, read)


def _of_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> DequantisedTensor:
    """Return the numbers of a stack of matrices in MXFP4, transposed in store.

    blocks: [E, columns, rows / 32, 16] bytes; scales: [E, columns, rows / 32] bytes, exponents.
    """
    stack, columns, many, pairs = blocks.shape
    shape = (stack, many * pairs * 2, columns)

    def read(first: int, count: int) -> Tensor:
        out = torch.empty(count, *shape[1:], dtype=torch.bfloat16)
        for i in range(count):  # one matrix at a time: the indices take four times its memory
            out[i] = _unpacked(blocks.read(first + i, 1)[0], scales.read(first + i, 1)[0]).T
        return out

    return DequantisedTensor(blocks.file, blocks.name.removesuffix(BLOCKS_SUFFIX), shape, read)


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [columns, rows] of bytes [columns, rows / 32, 16] and exponents [columns, rows / 32]."""
    table = torch.tensor(FP4, dtype=torch.bfloat16)
    out = torch.empty(*blocks.shape[:-1], 2 * blocks.shape[-1], dtype=torch.bfloat16)
    out[..., 0::2], out[..., 1::2] = table[(blocks & 15).int()], table[(blocks >> 4).int()]
    return torch.ldexp(out, scales.int()[..., None] - BIAS).flatten(1)


Stored = StoredTensor | DequantisedTensor


def check_quantization(settings: Mapping[str, Any], file: Path | str) -> None:
    """Refuse a quantization_config whose weights are not dequantised here. Raises: UserError."""
    method = settings.get("quant_method", "of an unnamed kind")
    if method == "mxfp4":
        return
    if method != "fp8":
        raise UserError(
            f"{file}: quantization_config = {in_json(method)}: only fp8 in blocks and mxfp4 are dequantised. Take the "
            'model that was quantised so; lora.base = "nf4" or "int8" quantises it here.'
        )
    block = settings.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**31 for n in block)
    if not is_pair or settings.get("fmt", "e4m3") != "e4m3":
        refuse(file, "quantization_config", method, "weight_block_size must give the rows and columns of e4m3 blocks")


def dequantised(stored: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of a model with `quantization_config = settings`, quantised ones as those of their numbers.

    Raises: UserError if a weight's scales are missing, or do not fit it.
    """
    found: dict[str, Stored] = {}
    is_fp8 = settings.get("quant_method") == "fp8"
    for name, tensor in stored.items():
        suffix, quantised = (SCALES_FP8, "") if is_fp8 else (SCALES_SUFFIX, BLOCKS_SUFFIX)
        if name.endswith(suffix) and name.removesuffix(suffix) + quantised in stored:
            continue
        if is_fp8 and tensor.code == "F8_E4M3":
            rows, columns = settings["weight_block_size"]
            if len(tensor.shape) != 2:
                refuse(tensor.file, name, list(tensor.shape), "only matrices are in fp8")
            shape = tuple(-(-n // size) for n, size in zip(tensor.shape, (rows, columns), strict=True))
            found[name] = _of_fp8(
                tensor, _scales(stored, name + SCALES_FP8, tensor, shape, FP8_SCALES), (rows, columns)
            )
        elif not is_fp8 and name.endswith(BLOCKS_SUFFIX):
            if tensor.code != "U8" or len(tensor.shape) != 4 or tensor.shape[-1] != 16:
                refuse(tensor.file, name, list(tensor.shape), "MXFP4 blocks are 16 bytes each, in four dims")
            its_scales = name.removesuffix(BLOCKS_SUFFIX) + SCALES_SUFFIX
            scales = _scales(stored, its_scales, tensor, tensor.shape[:-1], ("U8",))
            whole = _of_mxfp4(tensor, scales)
            found[whole.name] = whole
        else:
            found[name] = tensor
    return found


def _scales(
    stored: Mapping[str, StoredTensor],
    name: str,
    weight: StoredTensor,
    shape: tuple[int, ...],
    codes: Collection[str],
) -> StoredTensor:
    if name not in stored:
        refuse(weight.file, weight.name, weight.code, f"its scales {name} are missing")
    if stored[name].shape != shape:
        refuse(stored[name].file, name, list(stored[name].shape), f"scales of {list(weight.shape)} are {list(shape)}")
    if stored[name].code not in codes:
        refuse(stored[name].file, name, stored[name].code, f"scales are {' or '.join(codes)}")
    return stored[name]


FP8_DTYPE = torch.float8_e4m3fn
INT4_GROUP = 128
"""int4: inputs of an output that share a scale."""
IN_32_BITS = 8
"""int4: numbers in one int32, the first in the lowest bits."""


@dataclass(frozen=True)
class WeightCompression:
    preset: str
    """Its name in compressed-tensors."""
    format: str
    bits: int
    kind: Literal["float", "int"]
    group: int = 0
    """Inputs of an output that share a scale; 0: all."""

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and largest number."""
        if self.kind == "float":
            return -torch.finfo(FP8_DTYPE).max, torch.finfo(FP8_DTYPE).max
        return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1

    def settings(self, ignored: Collection[str]) -> dict[str, Any]:
        """Return config.json's quantization_config. ignored: linear layers, in their names, that stay as they are."""
        numbers: dict[str, Any] = {"num_bits": self.bits, "type": self.kind, "symmetric": True}
        by_group = {"strategy": "group", "group_size": self.group, "dynamic": False}
        by_output = {"strategy": "channel", "group_size": None, "dynamic": False}
        by_token = {"strategy": "token", "group_size": None, "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": numbers | (by_group if self.group else by_output),
            "input_activations": None if self.group else numbers | by_token,
            "output_activations": None,
            "format": self.format,
        }
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": self.format,
            "config_groups": {"group_0": group},
            "ignore": sorted(ignored),
            "kv_cache_scheme": None,
        }

    def scales(self, rows: Tensor) -> Tensor:
        """Return the scales of some rows [outputs, inputs] of a weight: [outputs, groups], in its dtype."""
        grouped = rows.unflatten(1, (-1, self.group or rows.shape[1]))
        lowest, highest = self.limits
        scales = grouped.float().abs().amax(2) / ((highest - lowest) / 2)
        return torch.where(scales == 0, torch.finfo(rows.dtype).eps, scales).to(rows.dtype)

    def numbers(self, rows: Tensor) -> Tensor:
        """Return some rows of a weight as they are stored."""
        scaled = rows.float() / self.scales(rows).float().repeat_interleave(self.group or rows.shape[1], 1)
        if self.kind == "float":
            return scaled.clamp(*self.limits).to(FP8_DTYPE)
        whole = scaled.round().clamp(*self.limits)
        return whole.to(torch.int8) if self.bits == 8 else _packed(whole.int())


WEIGHT_COMPRESSIONS: dict[CompressedFormat, WeightCompression] = {
    "fp8": WeightCompression("FP8_DYNAMIC", "float-quantized", 8, "float"),
    "int8": WeightCompression("W8A8", "int-quantized", 8, "int"),
    "int4": WeightCompression("W4A16", "pack-quantized", 4, "int", INT4_GROUP),
}


def _packed(whole: Tensor) -> Tensor:
    """Return numbers of 4 bits, [outputs, inputs], as int32 [outputs, inputs / 8]."""
    eights = (whole + 8).unflatten(1, (-1, IN_32_BITS))
    places = torch.arange(IN_32_BITS, dtype=torch.int32) * 4
    return (eights << places).sum(2).to(torch.int32)  # in int64; the 32 bits that are kept are the same


def compressed(
    config: ModelConfig, tensors: Mapping[str, TensorToWrite], compression: WeightCompression
) -> tuple[dict[str, TensorToWrite], dict[str, Any]]:
    """Return the tensors of a Hugging Face folder with compressed linear layers, and config.json's quantization_config.

    Raises: UserError if that is not known to be read, or a weight's rows are not whole groups.
    """
    if config.moe.experts or config.delta_net.key_heads or config.mla.kv_rank:
        raise UserError(
            f"model.family = {config.family}: --format fp8, int8 and int4 are for dense models with ordinary "
            "attention. Export with --format safetensors."
        )
    table = state_table(config)
    linear = {
        n for conversion in conversions_of(config) if table[conversion.ours[0]].is_linear for n in conversion.theirs
    }
    linear = {name for name in linear if len(tensors[name].shape) == 2}
    return dict(_compressed(tensors, linear, compression)), compression.settings(
        ["score" if config.score else "lm_head"]
    )


def _compressed(
    tensors: Mapping[str, TensorToWrite], linear: Collection[str], compression: WeightCompression
) -> Iterator[tuple[str, TensorToWrite]]:
    """Yield a folder's tensors, those weights that are in `linear` compressed, by the names of compressed-tensors.

    Raises: UserError if a weight's rows are not whole groups.
    """
    for name, tensor in tensors.items():
        if name not in linear:
            yield name, tensor
            continue
        outputs, inputs = tensor.shape
        group = compression.group or inputs
        if inputs % group:
            raise UserError(
                f"{name} has {inputs} inputs, and int4 has a scale for each {group}. Export with --format int8 or fp8."
            )
        scales = (outputs, inputs // group)
        yield f"{name}_scale", TensorToWrite(scales, tensor.dtype, partial(_each, compression.scales, tensor))
        numbers = partial(_each, compression.numbers, tensor)
        if compression.bits == 8:
            dtype = FP8_DTYPE if compression.kind == "float" else torch.int8
            yield name, TensorToWrite(tensor.shape, dtype, numbers)
        else:
            yield f"{name}_packed", TensorToWrite((outputs, inputs // IN_32_BITS), torch.int32, numbers)
            yield f"{name}_shape", TensorToWrite((2,), torch.int64, partial(_shape, tensor.shape))


def _each(function: Any, tensor: TensorToWrite) -> Iterator[Tensor]:
    return (function(part) for part in tensor.parts())


def _shape(shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.tensor(shape)]
