"""Floating-point operations of what torch runs: the contractions, by torch's formulas and ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

Formula = Callable[..., int]
"""(operator's arguments..., out_val=its result) -> FLOPs."""


def flops_of(operator: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> int:
    """Return the FLOPs of `operator(*args)`, a multiplication and an addition being two; 0 unless it is a contraction.

    Causal attention counts the half that is not masked, and its backward as two forwards, as `plan.flops` does: that a
    fused kernel computes the scores once more does not count.
    """
    formula = _formula(operator.overloadpacket)
    return 0 if formula is None else int(formula(*args, out_val=result))


@cache
def _formula(packet: Any) -> Formula | None:
    return _ATTENTION.get(str(packet)) or flop_registry.get(packet)


def _attention(q_BHTE: Any, k_BKSE: Any, v: Any, dropout: float = 0.0, causal: bool = False, **_: Any) -> int:
    return int(4 * q_BHTE.numel() * k_BKSE.shape[2]) // (2 if causal else 1)


def _attention_backward(
    dy: Any, q_BHTE: Any, k_BKSE: Any, v: Any, y: Any, lse: Any, dropout: float, causal: bool, **_: Any
) -> int:
    return 2 * _attention(q_BHTE, k_BKSE, v, dropout, causal)


# A dispatch mode sees the private operators under F.scaled_dot_product_attention on a CPU.
_ATTENTION: dict[str, Formula] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
