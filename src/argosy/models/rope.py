"""Rotary position embedding (Su et al. 2021) and how it is stretched to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from argosy.config.attention import RopeScaling
from argosy.plan.layer_spec import RopeSpec, TemperatureSpec

# B batch, T tokens, H heads, E head width


def place_table(places: RopeSpec | TemperatureSpec, seq_len: int, device: torch.device | None) -> tuple[Tensor, ...]:
    """Return what attention needs of the first `seq_len` places: cosines and sines, or a factor [seq_len, 1]."""
    if isinstance(places, RopeSpec):
        return rotary_table(places, seq_len, device)
    counted = torch.arange(1, seq_len + 1, device=device, dtype=torch.float32)[:, None]
    return (1.0 + places.scale * torch.log1p(torch.floor(counted / places.floor)),)


def rotary_table(rope: RopeSpec, seq_len: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, two fp32 tensors of shape [seq_len, rope.width].

    The two halves of these numbers are the pairs (the convention of Llama's and Qwen's published weights):
    columns e and e + width/2 hold the same angle.
    """
    frequencies_F = rotary_frequencies(rope, device)
    angles_TF = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequencies_F
    angles_TE = torch.cat((angles_TF, angles_TF), dim=-1)
    scale = attention_scale(rope.scaling)
    return angles_TE.cos() * scale, angles_TE.sin() * scale


def rotate(x_BTHE: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    """Rotate each pair of `x_BTHE` by its position's angle; same shape and dtype, computed in fp32.

    What is beyond the width of cosines and sines stays as it is.
    """
    if cos_BTE.shape[-1] < x_BTHE.shape[-1]:
        rotated, rest = x_BTHE.tensor_split((cos_BTE.shape[-1],), dim=-1)
        return torch.cat((rotate(rotated, cos_BTE, sin_BTE), rest), dim=-1)
    x = x_BTHE.float()
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos_BTE[..., None, :] + turned * sin_BTE[..., None, :]).to(x_BTHE.dtype)


def rotary_frequencies(rope: RopeSpec, device: torch.device | None = None) -> Tensor:
    """Return the angle per position of each pair, [width/2], after scaling."""
    pairs = torch.arange(0, rope.width, 2, device=device, dtype=torch.float32)
    base_F = rope.theta ** (-pairs / rope.width)
    scaling = rope.scaling
    match scaling.kind:
        case "none":
            return base_F
        case "linear":
            return base_F / scaling.factor
        case "llama3":
            return _llama3(base_F, scaling)
        case "yarn":
            return _yarn(base_F, rope)
        case "longrope":
            divisors = scaling.long_divisors if rope.is_long else scaling.short_divisors
            return base_F / torch.tensor(divisors, dtype=torch.float32, device=device)
        case "proportional":
            rotated = int(scaling.rotated_share * rope.width // 2)
            return base_F * (torch.arange(len(base_F), device=device) < rotated) / scaling.factor


def _llama3(base_F: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: divide frequencies of long wavelengths by `factor`, keep short ones, blend linearly between."""
    turns_F = scaling.original_max_seq_len * base_F / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep_F = ((turns_F - low) / max(high - low, 1e-9)).clamp(0, 1)  # Llama 4 has no blend
    return keep_F * base_F + (1 - keep_F) * base_F / scaling.factor


def _yarn(base_F: Tensor, rope: RopeSpec) -> Tensor:
    """YaRN (Peng et al. 2023), section 3.2: a ramp over dimensions between the two numbers of turns."""
    scaling = rope.scaling

    def dimension_of(turns: float) -> float:
        wavelength = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return rope.width * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    index_F = torch.arange(rope.width // 2, device=base_F.device, dtype=torch.float32)
    stretch_F = ((index_F - first) / max(last - first, 1e-3)).clamp(0, 1)
    return stretch_F * base_F / scaling.factor + (1 - stretch_F) * base_F


def attention_scale(scaling: RopeScaling) -> float:
    """Return the temperature of YaRN or LongRoPE (Ding et al. 2024, as Phi-3 has it). It is applied to cosines and
    sines, so that attention itself stays as it is."""
    if scaling.kind in ("yarn", "longrope") and scaling.attention_factor:
        return scaling.attention_factor
    if scaling.kind == "longrope" and scaling.factor > 1:
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_seq_len))
    if scaling.kind == "yarn" and scaling.factor > 1:
        return 0.1 * math.log(scaling.factor) + 1.0
    return 1.0
