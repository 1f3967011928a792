"""Dropout (Srivastava et al. 2014) of what adapters read: `lora.dropout`.

A mask follows from numbers alone: of the token (by seed, step, row and place), the layer, the adapter and the feature.
So it is the same however the model is laid out, after a stop, and where backward draws it again: only the tokens'
numbers are kept.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from argosy.models.quantised_weight import at_once

# B rows, T tokens, F features

BITS_31 = 2**31 - 1
"""Numbers of a draw are below 2^31, and so are factors: products stay within int64."""


def salt_of(name: str) -> int:
    """Return a number of an adapter's name."""
    return zlib.crc32(name.encode()) & BITS_31


def mask_keys(seed: int, step: int, first_row: int, rows: int, tokens: int) -> Tensor:
    """Return a number of each token of a step, int64 [rows, tokens]. `first_row`: the first of these rows among those
    of the whole batch."""
    row_B1 = _mixed(torch.arange(first_row, first_row + rows)[:, None] ^ salt_of(f"{seed} {step}"))
    return _mixed((row_B1 + torch.arange(tokens) * 0x9E3779B) & BITS_31)


def mask_keys_of_layer(keys_BT: Tensor, layer: int) -> Tensor:
    """Return the numbers of the same tokens in a layer."""
    return _mixed((keys_BT + (layer + 1) * 0x3C6EF35F) & BITS_31)


def is_kept(keys: Tensor, salt: int, features: range, share: float) -> Tensor:
    """Return what dropout leaves of these features of tokens with these numbers, bool [..., F]; `salt`: the adapter's
    number."""
    columns_F = torch.arange(features.start, features.stop, device=keys.device) * 0x9E3779B + salt
    return _mixed(keys.unsqueeze(-1) ^ (columns_F & BITS_31)) >= int(share * 2**31)


def _mixed(numbers: Tensor) -> Tensor:
    """Mix int64 numbers below 2^31, so that a change of any bit changes about half of all (as the finalizer of
    MurmurHash3 does with 32 bits)."""
    for factor, shift in ((0x2C1B3C6D, 15), (0x297A2D39, 12)):
        numbers = ((numbers ^ (numbers >> shift)) * factor) & BITS_31
    return numbers ^ (numbers >> 15)


class AdapterDropout:
    """The dropout of a block's adapters, which drops a `share` of their inputs.

    The block says which tokens it computes, and its adapters ask: all between would only hand the numbers on.
    """

    keys_BT: Tensor | None = None
    """The numbers of the block's tokens (`mask_keys_of_layer`); None: nothing is dropped."""

    def __init__(self, share: float):
        self.share = share

    def of(self, x_BTF: Tensor, salt: int, first: int) -> Tensor:
        """Return `x_BTF` with a share of zeros, and the rest as much larger. `salt`: the adapter's number; `first`: the
        first of these features among all inputs of the layer."""
        if self.keys_BT is None:
            return x_BTF
        left: Tensor = _Dropped.apply(x_BTF, self.keys_BT, salt, first, self.share)
        return left


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, salt: int, first: int, share: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.draw = salt, first, share
        return _dropped(x, keys, *ctx.draw)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        return _dropped(dy, keys, *ctx.draw), None, None, None, None


def _dropped(x: Tensor, keys: Tensor, salt: int, first: int, share: float) -> Tensor:
    features = range(first, first + x.shape[-1])
    if torch.compiler.is_compiling():  # then it is one kernel, and nothing lies between
        return torch.where(is_kept(keys, salt, features, share), x / (1 - share), 0)
    rows, keys, left = x.flatten(0, -2), keys.flatten(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    step = max(1, at_once(x) // len(features))
    for some, theirs, into in zip(rows.split(step), keys.split(step), left.flatten(0, -2).split(step), strict=True):
        into.copy_(torch.where(is_kept(theirs, salt, features, share), some / (1 - share), 0))
    return left
