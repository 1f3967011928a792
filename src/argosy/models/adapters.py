"""Low-rank adapters (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024): beside the frozen weights of linear layers and of
experts, by the table of parameters (`plan.parameters.adapter_table`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.train import LoraConfig
from argosy.models.layers import local
from argosy.models.packed import Packed, Product, multiply
from argosy.plan.parameters import Table, adapter_of, inside

# M inputs, N outputs, r rank; experts have one more dim in front. B rows, T tokens

PARTS = ("a", "b", "magnitude")
"""The parts of an adapter, by their names in the table: inner and outer matrix, and what only DoRA has."""
Spread = Callable[[Tensor], Tensor]
"""Numbers of each output [N], or of each expert's [e, N] -> what the rows are multiplied by."""


def itself(x: Tensor) -> Tensor:
    return x


BITS_31 = 2**31 - 1
"""Numbers of a draw are below 2^31, and so are factors: products stay within int64."""


def _mixed(numbers: Tensor) -> Tensor:
    """Mix int64 numbers below 2^31, so that a change of any bit changes about half of all (the finalizer of
    MurmurHash3 on 31 bits)."""
    for factor, shift in ((0x45D9F3B, 15), (0x2C1B3C6D, 12), (0x297A2D39, 15)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & BITS_31
    return numbers ^ (numbers >> 15)


def mask_keys(seed: int, step: int, first_row: int, rows: int, tokens: int) -> Tensor:
    """Return a number of each token of a step, int64 [rows, tokens], from which `lora.dropout` draws. `first_row`: the
    first of these rows among those of the whole batch."""
    step_key = zlib.crc32(f"{seed} {step}".encode()) & BITS_31
    row_B1 = _mixed(torch.arange(first_row, first_row + rows)[:, None] ^ step_key)
    return _mixed((row_B1 + torch.arange(tokens) * 0x9E3779B) & BITS_31)


def mask_keys_of_layer(keys_BT: Tensor, layer: int) -> Tensor:
    """Return the numbers from which a layer draws."""
    return _mixed((keys_BT + (layer + 1) * 0x3C6EF35F) & BITS_31)


def is_kept(keys: Tensor, salt: int, features: range, dropout: float) -> Tensor:
    """Return what dropout leaves of these features of each token: bool [..., features]; `salt` is the adapter's."""
    columns = torch.arange(features.start, features.stop, device=keys.device)
    columns = _mixed((columns * 0x9E3779B + salt) & BITS_31)
    return _mixed(keys.unsqueeze(-1) ^ columns) >= int(dropout * 2**31)


class _Dropout(torch.autograd.Function):
    """Dropout (Srivastava et al. 2014) whose backward draws the mask again: only the tokens' numbers are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, salt: int, features: range, dropout: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.draw = salt, features, dropout
        return _Dropout.of(x, keys, *ctx.draw)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _Dropout.of(dy, keys, *ctx.draw), None, None, None, None

    @staticmethod
    def of(x: Tensor, keys: Tensor, salt: int, features: range, dropout: float) -> Tensor:
        return torch.where(is_kept(keys, salt, features, dropout), x / (1 - dropout), 0)


class MaskKeys:
    """The numbers of the tokens that a block computes at the moment (`mask_keys`), None where nothing is dropped.

    The block says them, and its adapters read them: they are far apart, and all between would only pass them on.
    """

    of_block: Tensor | None = None


MASKS = MaskKeys()


class LowRank(nn.Module):
    """The adapter of one weight: W x + scale B A x, with DoRA times the lengths that it has trained.

    DoRA's output is W' x (m / |W'|) with W' = W + scale B A, by output; |W'| counts as a constant in backward (Liu et
    al. 2024, section 4.3). The table's `magnitude` is m - |W|.
    """

    sum_squares: Callable[[Tensor], Tensor] | None = None
    """Sums over ranks. Tensor parallelism sets it where each rank has some of the inputs."""
    first_input: int = 0
    """The first of the inputs that this rank has."""

    def __init__(self, table: Table, scale: float, dropout: float = 0.0, salt: int = 0):
        """`dropout`: the share of inputs that are dropped; `salt`: tells the adapters of a block apart."""
        super().__init__()
        self.a = nn.Parameter(torch.empty(table["a"].shape))
        self.b = nn.Parameter(torch.empty(table["b"].shape))
        self.magnitude = nn.Parameter(torch.empty(table["magnitude"].shape)) if "magnitude" in table else None
        self.scale, self.dropout, self.salt = scale, dropout, salt

    def forward(self, x: Tensor, weight: Tensor | Packed, product: Product = F.linear, each: Spread = itself) -> Tensor:
        """Return what the layer computes, without a bias; `weight` is this rank's part. Of experts, `each` gives every
        row what its expert has."""
        a, b = local(self.a), local(self.b)
        kept = self._dropped(x)
        plain, added = multiply(x, weight, product), product(product(kept, a.to(x.dtype)), b.to(x.dtype)) * self.scale
        if self.magnitude is None:
            return plain + added
        with torch.no_grad():
            length, begun = lengths(weight, a, b, self.scale, self.sum_squares)
        growth = (begun + local(self.magnitude).float()) / length
        factor = each(growth.to(x.dtype))
        if kept is x:
            return (plain + added) * factor
        # As PEFT: what the lengths add is computed from the inputs that are left, what was there before from all.
        return plain + multiply(kept, weight, product) * (factor - 1) + added * factor

    def _dropped(self, x: Tensor) -> Tensor:
        keys = MASKS.of_block
        if keys is None or not self.dropout or not torch.is_grad_enabled():
            return x
        features = range(self.first_input, self.first_input + x.shape[-1])
        dropped: Tensor = _Dropout.apply(x, keys.view(x.shape[:-1]), self.salt, features, self.dropout)
        return dropped


def lengths(
    weight: Tensor | Packed, a: Tensor, b: Tensor, scale: float, sum_squares: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the lengths of the rows of W + scale B A, and of W; fp32 [N], without making the sum.

    |w + s b A|^2 = |w|^2 + 2 s (w A^T) b + s^2 b (A A^T) b: two narrow products in place of a matrix as large as W.
    """
    w, a, b = weight.float(), a.float(), b.float()
    squares = w.square().sum(-1)
    crossed = ((w @ a.mT) * b).sum(-1)
    added = ((b @ (a @ a.mT)) * b).sum(-1)
    both = torch.stack((squares + 2 * scale * crossed + scale**2 * added, squares))
    if sum_squares is not None:
        both = sum_squares(both)
    grown, begun = both.sqrt().unbind()
    return grown, begun


def merged(weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None, scale: float) -> Tensor:
    """Return the weight that computes the same without the adapter, in the weight's dtype: W + scale B A, and with
    DoRA's `magnitude` (m - |W|) each row as long as m."""
    wide = weight.float()
    whole = wide + scale * (b.float() @ a.float())
    if magnitude is not None:
        grown = (wide.norm(dim=-1) + magnitude.float()) / whole.norm(dim=-1)
        whole = whole * grown.unsqueeze(-1)
    return whole.to(weight.dtype)


def add_adapters(model: nn.Module, table: Table, lora: LoraConfig) -> None:
    """Give the weights of `model` (on the meta device) the adapters that `table` has of them, in place."""
    for name in table:
        adapter = adapter_of(name)
        if f"{adapter}.a" not in table:
            continue
        owner, _, last = adapter.rpartition(".")
        salt = zlib.crc32(adapter.partition(".")[2].partition(".")[2].encode()) & BITS_31  # alike in all blocks
        with torch.device("meta"):
            model.get_submodule(owner).add_module(last, LowRank(inside(table, adapter), lora.scale, lora.dropout, salt))
