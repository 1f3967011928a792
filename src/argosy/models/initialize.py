"""Initial weights. Each element depends on the seed, its parameter's name and its place alone.

So every layout starts from the same weights, and a rank computes only those that it holds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from argosy.config.model import ModelConfig
from argosy.models.decoder import Decoder
from argosy.models.layers import local
from argosy.models.quantised_weight import QuantisationScheme, QuantisedWeight
from argosy.plan.mup import initial_factor
from argosy.plan.parameters import Parameter

Draw = Callable[[Tensor, int], Tensor]
"""Indices (int64) and a parameter's key -> a random number (fp32) for each."""
ELEMENTS_AT_ONCE = 2**20
"""Elements computed at once: few enough that the temporary integers stay in a CPU's caches."""


def materialize(model: Decoder, config: ModelConfig, device: torch.device, seed: int, is_read: bool = False) -> None:
    """Give `model` (on the meta device) memory on `device` and its initial weights, in place.

    Parameters may be DTensors; each rank computes its own part. is_read: what lies beside an adapter will be read, and
    is left at zero: to draw a billion numbers and quantise them takes a core a minute.
    """
    _give_memory(model, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole, offset, scheme = model.table[name], offset_of(parameter), model.schemes.get(name)
            if is_read and not whole.is_adapter:
                local(parameter).zero_()
            elif scheme is None:
                fill_initial(local(parameter), name, whole, offset, config, seed)
            else:
                part = partial(_initial_rows, name, whole, offset, scheme, local(parameter).shape, config, seed)
                QuantisedWeight(local(parameter), scheme).read(part)
        for buffer in model.buffers():
            buffer.zero_()


def _initial_rows(
    name: str,
    whole: Parameter,
    offset: Sequence[int],
    scheme: QuantisationScheme,
    shape: Sequence[int],
    config: ModelConfig,
    seed: int,
    first: int,
    count: int,
) -> Tensor:
    """Return rows of a quantised parameter's initial values; offset, shape: of its bytes."""
    rows = torch.empty(count, *shape[1:-1], scheme.columns)
    fill_initial(rows, name, whole, (offset[0] + first, *offset[1:-1], scheme.first), config, seed)
    return rows


def _give_memory(model: Decoder, device: torch.device) -> None:
    """Do what `model.to_empty` does. Without DTensors that loads sympy, which takes a quarter of a second."""
    if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        model.to_empty(device=device)
        return
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            new = torch.empty(old.shape, dtype=old.dtype, device=device)
            module.register_parameter(name, nn.Parameter(new, old.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def box_of(whole: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the part of a tensor of this shape that begins at `offset`, without copying it."""
    for dim, (start, size) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def offset_of(parameter: Tensor) -> tuple[int, ...]:
    """Return where this rank's part of `parameter` begins in the whole, for each dim.

    If several mesh axes split one dim, the last axis split it first: the axes of FSDP2 come before those of tensor and
    expert parallelism, and FSDP2 splits the part that these left.
    """
    offset, shape = [0] * parameter.ndim, list(parameter.shape)
    placements, mesh = getattr(parameter, "placements", ()), getattr(parameter, "device_mesh", None)
    for axis, placement in reversed(list(enumerate(placements))):
        dim = getattr(placement, "dim", None)
        if dim is not None and mesh is not None:
            chunk = -(-shape[dim] // mesh.size(axis))
            start = min(chunk * mesh.get_local_rank(axis), shape[dim])
            offset[dim] += start
            shape[dim] = min(chunk, shape[dim] - start)
    assert tuple(shape) == local(parameter).shape, (shape, local(parameter).shape)
    return tuple(offset)


def fill_initial(
    part: Tensor, name: str, whole: Parameter, offset: Sequence[int], config: ModelConfig, seed: int
) -> None:
    """Fill `part`, which begins at `offset` of the parameter `whole` called `name`, with its initial values."""
    if whole.initial == "ones":
        part.fill_(1.0)
    elif whole.initial == "zeros":
        part.zero_()
    else:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        strides = [math.prod(whole.shape[dim + 1 :]) for dim in range(len(whole.shape))]
        first = sum(place * stride for place, stride in zip(offset, strides, strict=True))
        draw, size = _distribution(name, whole, config)
        _fill(part, strides, first, int.from_bytes(digest, "little"), draw, size)


def _distribution(name: str, whole: Parameter, config: ModelConfig) -> tuple[Draw, float]:
    """Return how a parameter's values are drawn, and the factor on them."""
    if whole.initial == "uniform":
        return _uniform, whole.shape[-1] ** -0.5
    if whole.initial == "log_rates":
        return _log_rate, 1.0
    if whole.initial == "gaussian":
        return _normal, 1 / whole.shape[-2]
    std = config.init_std / (2 * config.layers) ** 0.5 if whole.initial == "into_residual" else config.init_std
    return _normal, std * initial_factor(name, config)


def _fill(part: Tensor, strides: Sequence[int], first: int, key: int, draw: Draw, size: float) -> None:
    """Fill `part`, a box of a whole with `strides`; its first element is number `first` of the whole."""
    if part.numel() == 0:
        return
    rows = ELEMENTS_AT_ONCE // part[0].numel()
    if rows == 0:  # a stack of matrices (experts) that are each larger than ELEMENTS_AT_ONCE
        for i, matrix in enumerate(part):
            _fill(matrix, strides[1:], first + i * strides[0], key, draw, size)
        return
    for start in range(0, part.shape[0], rows):
        some = part[start : start + rows]
        index = torch.full((), first + start * strides[0], device=part.device)
        for dim, (length, stride) in enumerate(zip(some.shape, strides, strict=True)):
            along = torch.arange(length, device=part.device) * stride
            index = index + along.view(-1, *[1] * (part.ndim - dim - 1))
        some.copy_(draw(index, key) * size)


def _normal(index: Tensor, key: int) -> Tensor:
    """Return a standard normal number (fp32) for each index (int64): Box & Muller 1958 on the halves of its hash."""
    bits = _hash(index, key)
    uniform_1 = ((bits >> 32 & 0xFFFFFFFF).float() + 0.5) * 2.0**-32  # never 0; 1 is harmless, since log(1) = 0
    uniform_2 = (bits & 0xFFFFFFFF).float() * 2.0**-32
    return (uniform_1.log() * -2).sqrt() * (uniform_2 * (2 * math.pi)).cos()


def _uniform(index: Tensor, key: int) -> Tensor:
    """Return a number between -1 and 1 (fp32) for each index (int64), from the high half of its hash."""
    return (_hash(index, key) >> 32 & 0xFFFFFFFF).float() * 2.0**-31 - 1


def _log_rate(index: Tensor, key: int) -> Tensor:
    """Return the logarithm (fp32) of a number between 0.01 and 16 for each index (int64)."""
    return (0.01 + (16 - 0.01) / 2 * (_uniform(index, key) + 1)).log()


def _hash(index: Tensor, key: int) -> Tensor:
    """Return output number `index` of SplitMix64 from state `key` (Steele, Lea & Flood 2014); int64 wraps as uint64."""
    z = (index + 1) * _signed(0x9E3779B97F4A7C15) + _signed(key)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return z ^ (z >> 31 & (1 << 33) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
