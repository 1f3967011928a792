"""Async tensor parallelism: a matrix product hides the exchange of its tokens (Wang et al. 2023, "Overlap Communication
with Dependent Computation via Decomposition in Large Deep Learning Models").

On a CUDA device torch's operators of symmetric memory cut a product by ranks: one rank's tokens are multiplied while
those of the next travel. Elsewhere the exchange comes before or after the product, as without it. Both give the same
numbers, and send the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from argosy.accelerator import NVIDIA
from argosy.errors import UserError
from argosy.matmul import dense
from argosy.models.attention import Attention
from argosy.models.delta_net import GatedDeltaNet
from argosy.models.layers import FeedForward, Linear, local
from argosy.models.mla import LatentAttention
from argosy.parallel.tensor import SequenceParallel, all_gather_tokens, reduce_scatter_tokens
from argosy.parallel.world import World, processes_here

# B batch, t tokens of this rank, T tokens of all ranks of the group, X inputs of a matrix, Y outputs

FIRST_INPUT_READERS: dict[type[nn.Module], tuple[str, ...]] = {
    Attention: ("q", "k", "v", "out_gate"),
    LatentAttention: ("q", "q_down", "kv_down"),
    GatedDeltaNet: ("q_in", "k_in", "v_in", "gate_in", "beta_in", "decay_in"),
    FeedForward: ("gate", "up"),
}
"""Class of a module -> its linear layers that read its first input, and all that reads it."""


def check_reach(world: World, ranks: int) -> None:
    """Raise UserError if tensor-parallel ranks on GPUs are on several machines."""
    here = processes_here(world.size)
    if world.device.type == NVIDIA and here % ranks:
        raise UserError(
            f"plan.async_tp = true with plan.tp = {ranks}: its ranks read each other's memory, and this machine has "
            f"{here} of them. Try async_tp=false, or a tp that divides the GPUs of each machine."
        )


class AsyncSequenceParallel(SequenceParallel):
    """As `SequenceParallel`, but the tokens of linear layers travel under their products."""

    def feed(self, module: nn.Module) -> None:
        """Let the module compute from this rank's tokens: the layers that read its input take their products."""
        names = next(names for kind, names in FIRST_INPUT_READERS.items() if isinstance(module, kind))
        layers = {name: layer for name in names if isinstance(layer := getattr(module, name, None), Linear)}
        for name, layer in layers.items():
            layer.product = partial(_taken, name)

        def multiply(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x_BtX: Tensor = inputs[0]
            weights = [local(layer.weight).to(x_BtX.dtype) for layer in layers.values()]
            products = _GatherAndMultiply.apply(x_BtX, self._group, *weights)
            return dict(zip(layers, products, strict=True)), *inputs[1:]

        module.register_forward_pre_hook(multiply)

    def collect(self, linear: Linear) -> None:
        """Let the layer sum its outputs over ranks as it computes them."""
        linear.product = partial(_multiply_and_sum, self._group)


def _taken(name: str, products: Mapping[str, Tensor], weight_YX: Tensor) -> Tensor:
    """Stands in for the product of the layer `name`, whose input is what `feed` has computed."""
    return products[name]


def _multiply_and_sum(group: dist.ProcessGroup, x_BTX: Tensor, weight_YX: Tensor) -> Tensor:
    y_BtY: Tensor = _MultiplyAndScatter.apply(x_BTX, weight_YX.to(x_BTX.dtype), group)
    return y_BtY


class _GatherAndMultiply(torch.autograd.Function):
    """All ranks' tokens times each matrix. In backward the sum of all ranks' gradients is scattered to the tokens'."""

    @staticmethod
    def forward(ctx: Any, x_BtX: Tensor, group: dist.ProcessGroup, *weights_YX: Tensor) -> tuple[Tensor, ...]:
        x_BTX, products = gather_and_multiply(x_BtX, weights_YX, group)
        ctx.save_for_backward(x_BTX, *weights_YX)
        ctx.group = group
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads_BTY: Tensor) -> tuple[Tensor | None, ...]:
        x_BTX, *weights_YX = ctx.saved_tensors
        of_x, _, *of_weights = ctx.needs_input_grad
        dx_BtX = None
        if of_x:  # the sum over the matrices is one product, which needs one exchange
            dx_BtX = multiply_and_scatter(torch.cat(grads_BTY, -1), torch.cat(weights_YX).mT, ctx.group)
        grads = zip(of_weights, grads_BTY, strict=True)
        return dx_BtX, None, *(_of_weight(grad, x_BTX) if is_needed else None for is_needed, grad in grads)


class _MultiplyAndScatter(torch.autograd.Function):
    """The product, summed over ranks and left split by tokens. In backward all ranks get all gradients."""

    @staticmethod
    def forward(ctx: Any, x_BTX: Tensor, weight_YX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x_BTX, weight_YX)
        ctx.group = group
        return multiply_and_scatter(x_BTX, weight_YX, group)

    @staticmethod
    def backward(ctx: Any, grad_BtY: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_BTX, weight_YX = ctx.saved_tensors
        grad_BTY, (dx_BTX,) = gather_and_multiply(grad_BtY, [weight_YX.mT], ctx.group)
        return dx_BTX, _of_weight(grad_BTY, x_BTX) if ctx.needs_input_grad[1] else None, None


def _of_weight(grad_BTY: Tensor, x_BTX: Tensor) -> Tensor:
    """Return a matrix's gradient; the fused operators leave the tokens of all rows side by side, so they come first."""
    grad_NY, x_NX = (x.transpose(0, 1).flatten(0, 1) for x in (grad_BTY, x_BTX))
    return grad_NY.mT @ x_NX


def gather_and_multiply(
    x_BtX: Tensor, weights_YX: Sequence[Tensor], group: dist.ProcessGroup
) -> tuple[Tensor, list[Tensor]]:
    """Return the tokens of all ranks, [B, T, X], and their products with each transposed matrix."""
    if not is_fused(x_BtX):
        x_BTX = all_gather_tokens(x_BtX, group)
        return x_BTX, [dense(x_BTX, weight) for weight in weights_YX]
    by_token = x_BtX.transpose(0, 1).contiguous().transpose(0, 1)  # as the operator reads it: it copies any other
    matrices = [weight.mT for weight in weights_YX]
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(by_token, matrices, 1, group.group_name)
    return gathered, list(products)


def multiply_and_scatter(x_BTX: Tensor, weight_YX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's tokens, [B, t, Y], of the products with the transposed matrix, summed over ranks."""
    if not is_fused(x_BTX):
        return reduce_scatter_tokens(dense(x_BTX, weight_YX), group)
    y_BtY: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x_BTX, weight_YX.mT, "sum", 1, group.group_name)
    return y_BtY


def is_fused(x: Tensor) -> bool:
    """Return True if torch has the fused operators for the tensor's device."""
    return x.is_cuda
