"""Weights in 8 or 4 bits as the compressed-tensors package stores them, which vLLM and transformers read: computed from
the weights alone, without data, tensor by tensor.

fp8 (its preset FP8_DYNAMIC) and int8 (W8A8): a scale for each output, and inputs are quantised token by token while
the model computes. int4 (W4A16): a scale for each group of 128 inputs of an output, eight numbers in 32 bits. A scale
is the largest magnitude over half the range (round-to-nearest; Frantar et al. 2022 have it beside GPTQ).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from argosy.config.model import ModelConfig
from argosy.data.stores.model_folder import CompressedFormat
from argosy.errors import UserError
from argosy.models.hf_names import pieces_of
from argosy.models.tensor_file import TensorToWrite
from argosy.plan.parameters import state_table

FP8 = torch.float8_e4m3fn
GROUP = 128
"""int4: inputs of an output that share a scale."""
IN_32_BITS = 8
"""int4: numbers in one int32, the first in the lowest bits."""


@dataclass(frozen=True)
class WeightCompression:
    """One of the formats."""

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
            return -torch.finfo(FP8).max, torch.finfo(FP8).max
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
            return scaled.clamp(*self.limits).to(FP8)
        whole = scaled.round().clamp(*self.limits)
        return whole.to(torch.int8) if self.bits == 8 else _packed(whole.int())


COMPRESSIONS: dict[CompressedFormat, WeightCompression] = {
    "fp8": WeightCompression("FP8_DYNAMIC", "float-quantized", 8, "float"),
    "int8": WeightCompression("W8A8", "int-quantized", 8, "int"),
    "int4": WeightCompression("W4A16", "pack-quantized", 4, "int", GROUP),
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
    linear = {n for piece in pieces_of(config) if table[piece.ours[0]].is_linear for n in piece.theirs}
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
            dtype = FP8 if compression.kind == "float" else torch.int8
            yield name, TensorToWrite(tensor.shape, dtype, numbers)
        else:
            yield f"{name}_packed", TensorToWrite((outputs, inputs // IN_32_BITS), torch.int32, numbers)
            yield f"{name}_shape", TensorToWrite((2,), torch.int64, partial(_shape, tensor.shape))


def _each(function: Any, tensor: TensorToWrite) -> Iterator[Tensor]:
    return (function(part) for part in tensor.parts())


def _shape(shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.tensor(shape)]
