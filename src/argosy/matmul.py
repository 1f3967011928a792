"""The products of dense layers: `F.linear`, or a faster kernel for fp32 where the CPU's BLAS leaves half of it unused.

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
LEAST = 2**21
"""Multiplications of a product for which oneDNN is asked: small ones are faster without the operator around it."""
ROWS = 64
"""Numbers of rows of which oneDNN gets multiples. It makes a kernel of some megabytes for each shape that it meets and
keeps it: the tokens of a microbatch are always as many, those of a prompt or of an expert are not."""


def dense(x: Tensor, weight_YX: Tensor, bias_Y: Tensor | None = None) -> Tensor:
    """Return x [..., X] times the transposed weight, plus the bias: `F.linear`, maybe by another kernel.

    The choice depends on the machine and on shapes alone, so that a run repeats its numbers on machines of one kind.
    """
    if not _is_for_onednn(x, weight_YX):
        return F.linear(x, weight_YX, bias_Y)
    y: Tensor = _product(x.flatten(0, -2), weight_YX).unflatten(0, x.shape[:-1])
    return y if bias_Y is None else y + bias_Y


def dense_by_group(x_NX: Tensor, weight_GYX: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply rows by their group's matrix: the next `counts[g]` of `x_NX` by `weight_GYX[g]`; `counts` adds up to N.

    One group comes after the other, those without rows too, so that all weights get a gradient. Where oneDNN is asked,
    it gets of each group the largest multiple of `ROWS`, and torch the few rows that are left.
    """
    weights: Iterable[Tensor] = weight_GYX
    if MKL_IS_SLOW and x_NX.dtype == torch.float32:
        counts = [part for count in counts for part in (count - count % ROWS, count % ROWS)]
        weights = (weight for weight in weight_GYX for _ in range(2))
    return torch.cat([dense(x, weight) for x, weight in zip(x_NX.split(list(counts)), weights, strict=True)])


def _is_for_onednn(x: Tensor, weight_YX: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight_YX.dtype != torch.float32 or not MKL_IS_SLOW:
        return False
    rows = x.numel() // max(x.shape[-1], 1)
    return rows % ROWS == 0 and rows * weight_YX.numel() >= LEAST


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
