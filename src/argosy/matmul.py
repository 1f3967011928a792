"""The products of dense layers and of experts: `F.linear`, a faster kernel for fp32 where the CPU's BLAS leaves half of
it unused, or fp8: of experts by rows, of dense layers by blocks.

torch multiplies fp32 matrices with MKL, which takes AVX2 on a CPU that is not Intel's, also where there is AVX-512.
oneDNN, which torch brings for bf16, takes what there is: on a Zen 5 it is about twice as fast (benchmarks/results).
torch reaches its fp32 kernel by a private operator alone, so there is a way without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

# N rows (tokens, in whatever dims before the last), X numbers of a row, Y outputs, G groups of rows

CPU_INFO = Path("/proc/cpuinfo")
LEAST_PRODUCT = 2**21
"""Multiplications of a product for which oneDNN is asked: small ones are faster without the operator around it."""
ROWS_MULTIPLE = 64
"""Numbers of rows of which oneDNN gets multiples. It makes a kernel of some megabytes for each shape that it meets and
keeps it: the tokens of a microbatch are always as many, those of a prompt or of an expert are not."""


def dense(x: Tensor, weight_YX: Tensor, bias_Y: Tensor | None = None) -> Tensor:
    """Return x [..., X] times the transposed weight, plus the bias: `F.linear`, maybe by another kernel.

    The choice depends on the machine and on shapes alone, so that a run repeats its numbers on machines of one kind.
    """
    if not is_for_onednn(x, weight_YX):
        return F.linear(x, weight_YX, bias_Y)
    y: Tensor = _product(x.flatten(0, -2), weight_YX).unflatten(0, x.shape[:-1])
    return y if bias_Y is None else y + bias_Y


def dense_by_group(x_NX: Tensor, weight_GYX: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply rows by their group's matrix: the next `counts[g]` of `x_NX` by `weight_GYX[g]`; `counts` adds up to N.

    One group comes after the other, those without rows too, so that all weights get a gradient. Where oneDNN is asked,
    it gets of each group the largest multiple of `ROWS_MULTIPLE`, and torch the few rows that are left.
    """
    weights: Iterable[Tensor] = weight_GYX
    if MKL_IS_SLOW and x_NX.dtype == torch.float32:
        counts = [part for count in counts for part in (count - count % ROWS_MULTIPLE, count % ROWS_MULTIPLE)]
        weights = (weight for weight in weight_GYX for _ in range(2))
    return torch.cat([dense(x, weight) for x, weight in zip(x_NX.split(list(counts)), weights, strict=True)])


def fp8_by_group(x_NX: Tensor, weight_GYX: Tensor, counts_G: Tensor) -> Tensor:
    """Multiply as `dense_by_group`, forward and backward, in fp8 (E4M3); return bf16.

    X and Y: multiples of `GROUPED_MULTIPLE`.

    Each row of either operand has a power of two for its scale, as in torchao's rowwise recipe; rows are what is summed
    over. The host does not wait for the counts. On a CPU fp8 numbers are multiplied as fp32.
    """
    y_NY: Tensor = _Fp8ByGroup.apply(x_NX, weight_GYX, counts_G)
    return y_NY


def is_for_onednn(x: Tensor, weight_YX: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight_YX.dtype != torch.float32 or not MKL_IS_SLOW:
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    return rows % ROWS_MULTIPLE == 0 and rows * weight_YX.numel() >= LEAST_PRODUCT


def mkl_is_slow() -> bool:
    """Look if fp32 products take AVX2 on this CPU, which has AVX-512, and oneDNN is there."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available():
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if not CPU_INFO.exists():
        return False
    with CPU_INFO.open(encoding="utf-8") as cores:
        return "AuthenticAMD" in cores.read(1024)  # of the first core: all of hundreds take long to list


MKL_IS_SLOW = mkl_is_slow()
"""Looked up once: the compiler cannot trace how."""


# Not `custom_op`: its calls load the compiler, which an uncompiled run need not wait for.
torch.library.define("argosy::product", "(Tensor x, Tensor weight) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


@torch.library.impl("argosy::product", "cpu")
def _product_on_cpu(x_NX: Tensor, weight_YX: Tensor) -> Tensor:
    if not (weight_YX.is_contiguous() or weight_YX.mT.is_contiguous()):
        weight_YX = weight_YX.contiguous()  # oneDNN multiplies by a part of wider rows a thousand times slower
    y_NY: Tensor = torch.ops.mkldnn._linear_pointwise(x_NX, weight_YX, None, "none", [], "")
    return y_NY


@torch.library.register_fake("argosy::product")
def _product_of_nothing(x_NX: Tensor, weight_YX: Tensor) -> Tensor:
    return x_NX.new_empty(x_NX.shape[0], weight_YX.shape[0])


def _product(x_NX: Tensor, weight_YX: Tensor) -> Tensor:
    y_NY: Tensor = torch.ops.argosy.product(x_NX, weight_YX)
    return y_NY


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy_NY: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_NX, weight_YX = ctx.saved_tensors
    of_x, of_weight = ctx.needs_input_grad
    return _product(dy_NY, weight_YX.mT) if of_x else None, _product(dy_NY.mT, x_NX.mT) if of_weight else None


torch.library.register_autograd("argosy::product", _gradients, setup_context=_keep_for_backward)


@register_flop_formula(torch.ops.argosy.product)
def _flops(x_shape: torch.Size, weight_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x_shape.numel() * weight_shape[0]


# In fp8. R rows with each group's filled up to whole blocks of B, and some to spare; b blocks

GROUPED_MULTIPLE = 16
"""The kernel takes multiples of so many numbers along a sum: for a weight's gradient, of the rows of each group."""
E4M3 = torch.float8_e4m3fn
TINY = 1e-12
"""The least magnitude that a scale is for, as in torchao."""


class _Fp8ByGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, weight_GYX: Tensor, counts_G: Tensor) -> Tensor:
        ctx.save_for_backward(x_NX, weight_GYX, counts_G)
        return _scaled_product(*in_fp8(x_NX), *in_fp8(weight_GYX), counts_G.cumsum(0, dtype=torch.int32))

    @staticmethod
    def backward(ctx: Any, dy_NY: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NX, weight_GYX, counts_G = ctx.saved_tensors
        dx_NX = dw_GYX = None
        if ctx.needs_input_grad[0]:
            ends_G = counts_G.cumsum(0, dtype=torch.int32)
            dx_NX = _scaled_product(*in_fp8(dy_NY), *in_fp8(weight_GYX.mT), ends_G).to(x_NX.dtype)
        if ctx.needs_input_grad[1]:
            filled_G = (counts_G.clamp(min=1) + (GROUPED_MULTIPLE - 1)) // GROUPED_MULTIPLE * GROUPED_MULTIPLE
            moved_G = (filled_G - counts_G).cumsum(0) - (filled_G - counts_G)
            places_N = torch.arange(len(x_NX), device=x_NX.device)
            places_N = places_N + moved_G.repeat_interleave(counts_G, output_size=len(x_NX))
            ends_G = filled_G.cumsum(0, dtype=torch.int32)
            dy, x = (_columns_in_fp8(rows, places_N, ends_G) for rows in (dy_NY, x_NX))
            dw_GYX = _scaled_product(*dy, *x, ends_G).to(weight_GYX.dtype)
        return dx_NX, dw_GYX, None


def in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., X] in fp8, contiguous, and what each row is to be multiplied by to be x again."""
    scales = _scales(torch.linalg.vector_norm(x, torch.inf, -1))
    return (x * scales.to(x.dtype)[..., None]).to(E4M3).contiguous(), scales.reciprocal()


def _columns_in_fp8(x_NX: Tensor, places_N: Tensor, ends_G: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in fp8 with its rows at their places, transposed [X, R], and factors for each group's columns [G, X]."""
    blocks = -(-len(x_NX) // GROUPED_MULTIPLE) + len(ends_G)  # no fewer, whatever the counts
    rows_RX = x_NX.new_zeros(blocks * GROUPED_MULTIPLE, x_NX.shape[1]).index_copy_(0, places_N, x_NX)
    x_bBX = rows_RX.unflatten(0, (blocks, GROUPED_MULTIPLE))
    starts_b = torch.arange(0, blocks * GROUPED_MULTIPLE, GROUPED_MULTIPLE, dtype=ends_G.dtype, device=x_NX.device)
    groups_b = torch.searchsorted(ends_G, starts_b, right=True).clamp(max=len(ends_G) - 1)  # past the last are zeros
    largest_bX = torch.linalg.vector_norm(x_bBX, torch.inf, 1).float()
    largest_GX = largest_bX.new_zeros(len(ends_G), x_NX.shape[1])
    largest_GX.scatter_reduce_(0, groups_b[:, None].expand_as(largest_bX), largest_bX, "amax")
    scales_GX = _scales(largest_GX)
    scaled_bBX = x_bBX * scales_GX.to(x_NX.dtype)[groups_b, None]
    return scaled_bBX.flatten(0, 1).to(E4M3).mT.contiguous(), scales_GX.reciprocal()


def _scales(largest: Tensor) -> Tensor:
    """Return the largest powers of two that leave such magnitudes within fp8; NaN and infinity become NaN there."""
    return (torch.finfo(E4M3).max / largest.float().clamp(min=TINY)).log2().floor().exp2()


torch.library.define(
    "argosy::fp8_by_group",
    "(Tensor a, Tensor a_factors, Tensor b, Tensor b_factors, Tensor ends) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _scaled_product(a: Tensor, a_factors: Tensor, b: Tensor, b_factors: Tensor, ends_G: Tensor) -> Tensor:
    """Return a times the transposed b, bf16: by groups of rows of a [N, X] and matrices of b [G, Y, X], [N, Y], or by
    groups of columns of a [Y, N] and b [X, N], [G, Y, X].
    """
    y: Tensor = torch.ops.argosy.fp8_by_group(a, a_factors, b, b_factors, ends_G)
    return y


@torch.library.impl("argosy::fp8_by_group", "default")
def _fp8_by_kernel(a: Tensor, a_factors: Tensor, b: Tensor, b_factors: Tensor, ends_G: Tensor) -> Tensor:
    if not a.numel():
        return _fp8_of_nothing(a, a_factors, b, b_factors, ends_G)
    if b.ndim == 2:
        a_factors, b_factors = a_factors.flatten(), b_factors.flatten()
    by_row = F.ScalingType.RowWise
    y: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        a, b.mT, a_factors, by_row, b_factors, by_row, offs=ends_G, output_dtype=torch.bfloat16, use_fast_accum=True
    )
    return y


@torch.library.impl("argosy::fp8_by_group", "cpu")
def _fp8_on_cpu(a: Tensor, a_factors: Tensor, b: Tensor, b_factors: Tensor, ends_G: Tensor) -> Tensor:
    counts = ends_G.diff(prepend=ends_G.new_zeros(1)).tolist()
    if b.ndim == 3:
        x_NX, w_GYX = a.float() * a_factors[:, None], b.float() * b_factors[..., None]
        return dense_by_group(x_NX, w_GYX, counts).bfloat16()
    a, b = (x[:, : sum(counts)].float() for x in (a, b))
    sums = [F.linear(*parts) for parts in zip(a.split(counts, 1), b.split(counts, 1), strict=True)]
    return (torch.stack(sums) * a_factors[..., None] * b_factors[:, None]).bfloat16()


@torch.library.register_fake("argosy::fp8_by_group")
def _fp8_of_nothing(a: Tensor, a_factors: Tensor, b: Tensor, b_factors: Tensor, ends_G: Tensor) -> Tensor:
    shape = (*a.shape[:-1], b.shape[-2]) if b.ndim == 3 else (len(ends_G), len(a), len(b))
    return a.new_empty(shape, dtype=torch.bfloat16)


@register_flop_formula(torch.ops.argosy.fp8_by_group)
def _fp8_flops(a_shape: torch.Size, _: Any, b_shape: torch.Size, *__: Any, **___: Any) -> int:
    return 2 * a_shape.numel() * b_shape[-2]


# In fp8 with scales for blocks. M and N are rows of two matrices, K what a product sums over, in k = K / 128 blocks

SCALED_BLOCK = 128
"""Numbers of a row that have one scale, and rows of a weight too: the kernel knows no others."""


class _Fp8ByBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, weight_YX: Tensor) -> Tensor:
        ctx.save_for_backward(x_NX, weight_YX)
        return _product_of_blocks(*rows_by_block(_whole_blocks(x_NX)), *tiles_in_fp8(weight_YX))[: len(x_NX)]

    @staticmethod
    def backward(ctx: Any, dy_NY: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_NX, weight_YX = ctx.saved_tensors
        dx_NX = dw_YX = None
        dy_MY = _whole_blocks(dy_NY)
        if ctx.needs_input_grad[0]:
            dx_NX = _product_of_blocks(*rows_by_block(dy_MY), *tiles_in_fp8(weight_YX.mT))[: len(x_NX)].to(x_NX.dtype)
        if ctx.needs_input_grad[1]:
            parts = *rows_by_block(dy_MY.mT), *rows_by_block(_whole_blocks(x_NX).mT)
            dw_YX = _product_of_blocks(*parts).to(weight_YX.dtype)
        return dx_NX, dw_YX


def fp8_by_block(x: Tensor, weight_YX: Tensor) -> Tensor:
    """Return x [..., X] times the transposed weight, in bf16, of inputs in fp8 with scales for blocks (DeepSeek-V3
    2024, section 3.3.2): one for 128 numbers of a row of x or of a gradient, one for 128 x 128 of the weight. Backward
    likewise; a weight's gradient sums blocks of 128 tokens. X and Y are multiples of 128. A CPU multiplies in fp32.
    """
    y: Tensor = _Fp8ByBlock.apply(x.flatten(0, -2), weight_YX)
    return y.unflatten(0, x.shape[:-1])


def _whole_blocks(x_NX: Tensor) -> Tensor:
    """Return the rows and zeros that fill the last block."""
    missing = -len(x_NX) % SCALED_BLOCK
    return F.pad(x_NX, (0, 0, 0, missing)) if missing else x_NX


def rows_by_block(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in fp8, and what 128 numbers of each row are to be multiplied by to be those of x again [M, k]."""
    codes, factors_Mk = in_fp8(x_MK.unflatten(1, (-1, SCALED_BLOCK)))
    return codes.flatten(1), factors_Mk


def tiles_in_fp8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in fp8, and what each 128 x 128 of it is to be multiplied by [N / 128, k]."""
    tiles = weight_NK.unflatten(1, (-1, SCALED_BLOCK)).unflatten(0, (-1, SCALED_BLOCK)).transpose(1, 2)
    codes, factors = in_fp8(tiles.flatten(2))
    return codes.view(tiles.shape).transpose(1, 2).flatten(2).flatten(0, 1), factors


torch.library.define(
    "argosy::fp8_by_block",
    "(Tensor a, Tensor a_factors, Tensor b, Tensor b_factors) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _product_of_blocks(a_MK: Tensor, a_factors: Tensor, b_NK: Tensor, b_factors: Tensor) -> Tensor:
    """Return a times the transposed b, bf16; b has a factor for 128 numbers of each row, or for each 128 x 128."""
    y_MN: Tensor = torch.ops.argosy.fp8_by_block(a_MK, a_factors, b_NK, b_factors)
    return y_MN


def blocks_by_kernel(a_MK: Tensor, a_factors: Tensor, b_NK: Tensor, b_factors: Tensor) -> Tensor:
    """Do so by torch's kernel, whose factors lie by columns, those of tiles with a multiple of four in each."""
    of_rows, of_tiles = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    by_column = a_factors.mT.contiguous().mT
    if len(b_factors) == len(b_NK):
        recipe, b_factors = of_rows, b_factors.mT.contiguous().mT
    else:
        recipe, b_factors = of_tiles, F.pad(b_factors, (0, -b_factors.shape[1] % 4)).mT
    y_MN: Tensor = F.scaled_mm(a_MK, b_NK.mT, by_column, of_rows, b_factors, recipe, output_dtype=torch.bfloat16)
    return y_MN


torch.library.impl("argosy::fp8_by_block", "default", blocks_by_kernel)


@torch.library.impl("argosy::fp8_by_block", "cpu")
def _blocks_on_cpu(a_MK: Tensor, a_factors: Tensor, b_NK: Tensor, b_factors: Tensor) -> Tensor:
    b_factors = b_factors.repeat_interleave(len(b_NK) // len(b_factors), 0)
    both = ((a_MK, a_factors), (b_NK, b_factors))
    a, b = (x.float() * factors.repeat_interleave(SCALED_BLOCK, 1) for x, factors in both)
    return F.linear(a, b).bfloat16()


@torch.library.register_fake("argosy::fp8_by_block")
def _blocks_of_nothing(a_MK: Tensor, a_factors: Tensor, b_NK: Tensor, b_factors: Tensor) -> Tensor:
    return a_MK.new_empty(len(a_MK), len(b_NK), dtype=torch.bfloat16)


@register_flop_formula(torch.ops.argosy.fp8_by_block)
def _flops_of_blocks(a_shape: torch.Size, _: Any, b_shape: torch.Size, *__: Any, **___: Any) -> int:
    return 2 * a_shape.numel() * b_shape[0]
