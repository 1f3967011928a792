"""Number formats in training: optimizer moments in eight bits, stochastic rounding, loss scaling, matmuls in fp8.

Moments in eight bits have a scale for each block, and a tiny float for each element. As in Dettmers et al. 2022 ("8-bit
optimizers via block-wise quantization") blocks have 256 elements and steps are finer near zero. The code differs in two
ways. It is that of a float (3 mantissa bits), so it needs no table. And rounding may be stochastic, up or down at
random, so that errors average out over steps (Gupta et al. 2015): a second moment with beta2 = 0.999 moves by 0.1 % in
a step, which is less than half of any eight-bit step, so rounding to the nearest would never move it. bf16 weights
without an fp32 copy are rounded in the same way.

Blocks lie along rows, so that a matrix cut by rows, or at multiples of 256 columns, has the same codes as the whole.
The random bits are a hash of seed, step, tensor and the element's place in the *whole* tensor. So they are the same on
every mesh and after a resume, and no generator's state has to be saved.

For fp16 the loss is scaled (Micikevicius et al. 2018): gradients too small for fp16 are scaled up. Linear layers
multiply in fp8 through torchao, experts and whole blocks by torch's own products.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.accelerator import capability, device_name, is_amd_with_fp8
from argosy.compiler import compiled
from argosy.errors import UserError, missing_extra
from argosy.matmul import dense, fp8_by_block, fp8_by_group
from argosy.plan.cost.exact_state import INT8_BLOCK
from argosy.plan.plan import FP8, Precision, why_not_in_fp8

FLOAT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes of torch by the words of plans and options."""

Places = tuple[Tensor, ...]
"""For each dim of a local part, the int32 offsets of its indices in the whole. Their broadcast sum is the place."""


def places(shape: tuple[int, ...], scatter: Callable[[Tensor], Tensor], device: torch.device) -> Places:
    """Return the places of a local part's elements in the whole of `shape`, modulo 2**32.

    `scatter` cuts a tensor of `shape` along its dims; it is called with one that takes no memory (strides of zero).
    """
    offsets = []
    for dim, size in enumerate(shape):
        along = torch.arange(size, device=device) * math.prod(shape[dim + 1 :])
        whole = along.to(torch.int32).view([-1 if d == dim else 1 for d in range(len(shape))]).expand(shape)
        first = [slice(None) if d == dim else slice(1) for d in range(len(shape))]
        offsets.append(scatter(whole)[tuple(first)].clone())  # a view would keep the whole local part in memory
    return tuple(offsets) or (torch.zeros((), dtype=torch.int32, device=device),)


def noise(at: Places, bits: int, *key: object) -> Tensor:
    """Return a uniform int32 in [0, 2**bits) for each place.

    key: seed, step, name and what else is to give other numbers.
    """
    return _hashed(functools.reduce(torch.add, at), bits, *_halves(key))


def _halves(key: tuple[object, ...]) -> tuple[int, int]:
    """Return two int32 that stand for a key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def _hashed(place: Tensor, bits: int, before: int, midway: int) -> Tensor:
    """Return Wellons' lowbias32 (github.com/skeeto/hash-prospector) of each place (int32), its upper `bits`.

    Half of the key is mixed in midway.
    """
    x = place ^ before
    x ^= (x >> 16) & 0xFFFF  # masked: torch has no logical shift of int32
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x ^= midway
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return (x >> (32 - bits)) & ((1 << bits) - 1)


def round_to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """Round `x` (fp32, finite) to one of its two bf16 neighbours, with probabilities that make the mean `x`.

    `random` has 16 bits for each element, e.g. from `noise`.
    """
    # bf16 is the upper half of fp32. Adding 16 random bits to the lower half carries into the upper one with a chance
    # equal to the fraction that rounding cuts off.
    return ((x.view(torch.int32) + random) & ~0xFFFF).view(torch.float32).bfloat16()


_CUT = 20
"""Mantissa bits of fp32 that the code leaves out: 23 - 3."""


@dataclass(frozen=True)
class Code:
    """Magnitudes in [0, 1] as the floats 2**-octaves ... 1, eight to an octave, shifted down to start at 0.

    So steps are even below 2**-octaves and grow with the magnitude above it; 0 and 1 have codes of their own.
    """

    dtype: torch.dtype

    # Literals: what is a field would be a number that varies to the compiler, and its powers be computed anew for each
    # element.
    @property
    def octaves(self) -> int:
        return 15 if self.dtype.is_signed else 31

    @property
    def least(self) -> int:
        """The smallest code in use; 1 means that no number becomes zero."""
        return 0 if self.dtype.is_signed else 1

    @property
    def offset(self) -> float:
        """The shift that is added to a magnitude."""
        return 2.0**-self.octaves

    @property
    def first(self) -> int:
        """The leading bits of the first float."""
        return (127 - self.octaves) << (23 - _CUT)


SIGNED = Code(torch.int8)
"""For means of gradients: quanta of 2**-18 of the block's largest magnitude near zero."""
UNSIGNED = Code(torch.uint8)
"""For means of squares, whose root is a divisor. None becomes zero: the least root, 2**-17 of the block's largest, is
above the quantum of `SIGNED`, so no rounding can make an Adam step explode."""


@dataclass(frozen=True)
class Quantized:
    """A tensor in eight bits. `dequantize`, then `quantize` to the nearest, gives the same codes and scales."""

    codes: Tensor
    scales: Tensor
    """fp32 [rows, blocks, 1]"""
    code: Code

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales, bytes."""
        return self.codes.nbytes + self.scales.nbytes


def quantize(x: Tensor, code: Code, random: Tensor | None = None) -> Quantized:
    """Quantize `x` (fp32, finite, not a scalar): to the nearest or, with 20 `random` bits each, without bias."""
    blocks = _blocks(x)
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    magnitude = _rows(torch.where(blocks.abs() == scales, 1.0, (blocks / scales).abs().clamp(max=1.0)), x.shape)
    raised = magnitude * (1 - code.offset) + code.offset
    bits = raised.view(torch.int32) + ((1 << (_CUT - 1)) if random is None else random)
    codes = ((bits >> _CUT) - code.first).clamp(min=code.least)
    return Quantized((codes * x.sign() if code.dtype.is_signed else codes).to(code.dtype), scales, code)


def dequantize(quantized: Quantized, is_compiled: bool = False) -> Tensor:
    """Return the numbers that the codes stand for, fp32. `is_compiled`: as in `Rounding`."""
    codes, scales, code = quantized.codes, quantized.scales, quantized.code
    if is_compiled and _has_whole_blocks(codes):
        return compiled(_numbers_of_blocks)(_flat(codes), _flat(scales), code).view(codes.shape)
    return _numbers(codes, scales, code)


def _numbers(codes: Tensor, scales: Tensor, code: Code) -> Tensor:
    bits = (codes.to(torch.int32).abs() + code.first) << _CUT
    magnitude = (bits.view(torch.float32) - code.offset) / (1 - code.offset)
    x = magnitude * codes.sign() if code.dtype.is_signed else magnitude
    return _rows(_blocks(x) * scales, codes.shape)


@dataclass(frozen=True)
class Rounding:
    """Rounds the numbers of a rank's part of a tensor at random, each by its place in the whole."""

    at: Places
    is_compiled: bool
    """True to round in one compiled kernel where each row is of whole blocks, as those of large matrices are: on a CPU
    the numbers are the same."""

    def quantize(self, x: Tensor, code: Code, *key: object) -> Quantized:
        """Quantize `x` (fp32, finite, not a scalar) without bias; `key`: see `noise`."""
        if not (self.is_compiled and _has_whole_blocks(x)):
            return quantize(x, code, noise(self.at, 20, *key))
        codes, scales = compiled(_quantize_blocks)(_flat(x), self._starts(), code, *_halves(key))
        return Quantized(codes.view(x.shape), scales.view(math.prod(x.shape[:-1]), -1, 1), code)

    def to_bf16(self, x: Tensor, *key: object) -> Tensor:
        """Round `x` (fp32, finite) to bf16 without bias; `key`: see `noise`."""
        if not (self.is_compiled and _has_whole_blocks(x)):
            return round_to_bf16(x, noise(self.at, 16, *key))
        rounded = compiled(_round_blocks)(_flat(x), self._starts(), *_halves(key))
        return rounded.view(x.shape)

    def _starts(self) -> Tensor:
        """Return the place of each block's first element: a part is a box, so the others follow."""
        return _flat(functools.reduce(torch.add, (*self.at[:-1], self.at[-1][..., ::INT8_BLOCK])).contiguous())


def _has_whole_blocks(x: Tensor) -> bool:
    return x.ndim > 0 and x.numel() > 0 and x.shape[-1] % INT8_BLOCK == 0


# These three take flat tensors, so that the compiler knows the width of a row and makes one graph for all shapes.


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1).data  # which is no view of another, whose shape would count too


def _quantize_blocks(x: Tensor, start_N: Tensor, code: Code, before: int, midway: int) -> tuple[Tensor, Tensor]:
    quantized = quantize(x.view(-1, INT8_BLOCK), code, _hashed(_places_of_blocks(start_N), 20, before, midway))
    return quantized.codes, quantized.scales


def _round_blocks(x: Tensor, start_N: Tensor, before: int, midway: int) -> Tensor:
    return round_to_bf16(x.view(-1, INT8_BLOCK), _hashed(_places_of_blocks(start_N), 16, before, midway))


def _numbers_of_blocks(codes: Tensor, scales: Tensor, code: Code) -> Tensor:
    return _numbers(codes.view(-1, INT8_BLOCK), scales.view(-1, 1, 1), code)


def _places_of_blocks(start_N: Tensor) -> Tensor:
    return start_N[:, None] + torch.arange(INT8_BLOCK, dtype=torch.int32, device=start_N.device)


def _blocks(x: Tensor) -> Tensor:
    """Return [..., n] as [rows, blocks, up to INT8_BLOCK], with the last block padded with zeros."""
    rows, n = math.prod(x.shape[:-1]), x.shape[-1]
    width = min(INT8_BLOCK, max(n, 1))
    count = -(-n // width)
    return F.pad(x.reshape(rows, n), (0, count * width - n)).view(rows, count, width)


def _rows(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_blocks`."""
    return blocks.flatten(1)[:, : shape[-1]].reshape(shape)


class LossScaler:
    """Finds the largest power of two by which the loss can be multiplied without overflow of the gradients.

    Every factor is a power of two, so scaling and unscaling round nothing. The decision uses the norm of all gradients
    of all ranks, so it is the same on every rank without another collective. With `growth_steps` = 0 the scale is fixed
    and not part of the state: a run that continues in another precision starts with its own scale.
    """

    def __init__(self, scale: float = 2.0**16, growth_steps: int = 2000, floor: float = 1.0, ceiling: float = 2.0**24):
        self.scale = scale
        """The factor of the loss, and the divisor of the gradients and their norm."""
        self._growth_steps, self._floor, self._ceiling = growth_steps, floor, ceiling
        self._good_steps = 0

    def update(self, gradient_norm: float) -> bool:
        """Return True if the gradients may be applied. If not, halve the scale; after `growth_steps` good, double it.

        `gradient_norm`: global norm of the gradients, scaled or not. It matters only if it is finite.
        """
        if not math.isfinite(gradient_norm):
            self.scale = max(self.scale / 2, self._floor)
            self._good_steps = 0
            return False
        self._good_steps += 1
        if self._good_steps == self._growth_steps:
            self.scale = min(self.scale * 2, self._ceiling)
            self._good_steps = 0
        return True

    @property
    def is_at_floor(self) -> bool:
        """True if the scale cannot fall further: then the model overflows, whatever the scale."""
        return self.scale <= self._floor

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint: scalars on the CPU; nothing for a fixed scale."""
        if not self._growth_steps:
            return {}
        return {
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "good_steps": torch.tensor(self._good_steps, dtype=torch.int64),
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        if not self._growth_steps:
            return
        self.scale = min(float(state["scale"]), self._ceiling)
        self._good_steps = int(state["good_steps"])


SKIPPED = ("embedding", "head", "router")
"""Modules, by the last part of their name, that stay as they are: errors in logits and in routing cost most."""


def check_fp8(device: torch.device, precision: str = "fp8", has_experts: bool = False) -> None:
    """Raise UserError if `device` cannot multiply in fp8, or torchao is not installed."""
    able, of_amd, name = capability(device), is_amd_with_fp8(device), device_name(device)
    if (why := why_not_in_fp8(precision, able, of_amd, has_experts, name, "bf16")) is not None:
        raise UserError(why)
    if precision != "fp8_blockwise" and importlib.util.find_spec("torchao") is None:
        raise missing_extra("torchao", "fp8", f"plan.precision = {precision}")


def takes_fp8(module: nn.Module, name: str, precision: Precision = "fp8") -> bool:
    """Return True if a module can multiply in fp8: it is one of the model's linear layers (`models.layers.Linear`), but
    not of `SKIPPED`, or a layer's experts, and this rank's parts of its matrices have sizes that fit (`FP8`).
    """
    if not hasattr(module, "product") or name.rpartition(".")[2] in SKIPPED:
        return False
    parts = [matrix.to_local() if hasattr(matrix, "to_local") else matrix for matrix in matrices_of(module)]
    return all(size % FP8[precision] == 0 for part in parts for size in part.shape[-2:])


def matrices_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a layer that `takes_fp8`, without biases."""
    return [parameter for name, parameter in module.named_parameters(recurse=False) if not name.endswith("bias")]


def use_fp8(
    model: nn.Module, device: torch.device, precision: Precision = "fp8", emulate: bool = False
) -> list[nn.Module]:
    """Make linear layers and experts multiply in fp8, scaled as `precision` says; their parameters stay as they are.

    Call it once tensor parallelism has cut the weights. Scales are those of this rank's parts: each partial product has
    its own and is as wide as its inputs again before ranks sum it, so ranks agree on none, and no scale is coarser than
    that of the whole. Experts have a scale for each row. `emulate`: round to fp8 but multiply as before, which any
    device can do. Returns the layers. Raises: UserError as `check_fp8` does, or if no layer has sizes that fp8 takes.
    """
    modules = [module for name, module in model.named_modules() if takes_fp8(module, name, precision)]
    if not emulate:
        has_experts = any(
            hasattr(module, "product") and not isinstance(module, nn.Linear) for module in model.modules()
        )
        check_fp8(device, precision, has_experts)
    if not modules:
        raise UserError(
            f"plan.precision = {precision} finds no linear layer whose sizes on a rank are multiples of "
            f"{FP8[precision]}. Try precision=bf16, a smaller tp, or other model.width and model.ffn_width."
        )
    product = _product_of_layers(precision, emulate)
    for module in modules:
        module.product = product if isinstance(module, nn.Linear) else fp8_by_group
    return modules


def _product_of_layers(precision: Precision, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    if precision == "fp8_blockwise":
        return fp8_by_block
    return mxfp8_product(emulate) if precision == "mxfp8" else fp8_product(precision, emulate)


def fp8_product(precision: Precision, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product of a layer of torchao's: its layers hold whole weights and sum nothing over ranks."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = precision.partition("_")[2] or "tensorwise"
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    pattern = convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=config)
    return functools.partial(_product_in_fp8, pattern.linear_mm_config, pattern.config)


def _product_in_fp8(kernels: Any, config: Any, x: Tensor, weight_YX: Tensor) -> Tensor:
    """Return x times the transposed weight; `kernels` and `config` are those of a layer of torchao's."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    y: Tensor = matmul_with_hp_or_float8_args.apply(x, weight_YX.t(), kernels, config)
    return y


def mxfp8_product(emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return torchao's product in MXFP8; plain operations round, which need no kernel and which the compiler fuses."""
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernel = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    casts = MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH
    formats = (torch.float8_e4m3fn,) * 3
    return functools.partial(_product_in_mxfp8, (*formats, 32, kernel, *casts, ScaleCalculationMode.RCEIL, False))


def _product_in_mxfp8(settings: tuple[Any, ...], x: Tensor, weight_YX: Tensor) -> Tensor:
    """Return x times the transposed weight; in bf16 if the gradient of the weight sums over no multiple of 32 rows."""
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm

    weight_YX = weight_YX.to(x.dtype)
    if x.shape[:-1].numel() % FP8["mxfp8"]:
        return dense(x, weight_YX)
    y: Tensor = mx_mm.apply(x, weight_YX, *settings)
    return y
