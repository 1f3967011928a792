"""Every matrix multiplication of a model, and what binds it on a device: arithmetic, or memory.

A multiplication of m x k by k x n takes 2mkn FLOPs and moves at least (mk + kn + mn) e bytes; with a cache of C bytes
at least 2mkn e / sqrt(C/e) of them, however it is blocked (Hong and Kung 1981). The longer of both at the rates that a
device reaches binds it (roofline: Williams et al. 2009). The shapes are those that `plan.cost.layer_time` and
`plan.cost.inference` compute with; times of whole steps and passes come from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.plan.design.points import BYTES, Floats, Points
from argosy.plan.workload import Workload


@dataclass(frozen=True)
class ModelMatmul:
    """One matrix multiplication of a pass, [m, k] x [k, n], done so many times."""

    name: str
    times: float
    m: float
    k: float
    n: float
    is_weight: bool = True
    """False for attention, whose operands are activations or the cache, in 16 bits."""

    @property
    def flops(self) -> float:
        return self.times * 2 * self.m * self.k * self.n


def matmuls_of(work: Workload, tokens: float, logits: float, tp: float = 1) -> list[ModelMatmul]:
    """Return the multiplications with weights in a forward pass of `tokens`, of which `logits` go through the head."""
    numbers = {name: value for name, value in vars(work).items() if name != "kv_groups"}
    w: dict[str, float] = {name: float(np.asarray(value)) for name, value in numbers.items()}
    layers, width = w["layers"], w["width"]
    queries, values = w["heads"] * w["key_width"] / tp, w["heads"] * w["value_width"] / tp
    found: list[ModelMatmul] = []
    if w["kv_rank"]:
        unrotated = w["key_width"] - w["rope_width"]
        if w["q_rank"]:
            found.append(ModelMatmul("queries down", layers, tokens, width, w["q_rank"]))
        found += [
            ModelMatmul("queries", layers, tokens, w["q_rank"] or width, queries),
            ModelMatmul("latent down", layers, tokens, width, w["kv_rank"] + w["rope_width"]),
            ModelMatmul("latent up", layers, tokens, w["kv_rank"], w["heads"] / tp * (unrotated + w["value_width"])),
        ]
    else:
        kv = float(np.asarray(work.kv_heads_on(tp))) * (w["kv_width"] - w["unprojected"] / w["kv_heads"])
        found.append(ModelMatmul("queries, keys, values", layers, tokens, width, queries + w["gates"] * values + kv))
    found.append(ModelMatmul("attention out", layers, tokens, values, width))
    up = w["ffn_matrices"] - 1
    if dense := layers - w["moe_layers"]:
        found += [
            ModelMatmul("feed-forward up", dense, tokens, width, up * w["ffn_width"] / tp),
            ModelMatmul("feed-forward down", dense, tokens, w["ffn_width"] / tp, width),
        ]
    if moe := w["moe_layers"]:
        share = w["experts_per_token"] / w["experts"]
        hit = 1 - (1 - share) ** tokens  # of the experts, those that any token chose
        each, hidden = tokens * share / hit, w["expert_ffn_width"] / tp
        found += [
            ModelMatmul("router", moe, tokens, width, w["experts"] + w["shared_gate"]),
            ModelMatmul("experts up", moe * w["experts"] * hit, each, width, up * hidden),
            ModelMatmul("experts down", moe * w["experts"] * hit, each, hidden, width),
        ]
        if shared := w["shared_ffn_width"] / tp:
            found += [
                ModelMatmul("shared experts up", moe, tokens, width, up * shared),
                ModelMatmul("shared experts down", moe, tokens, shared, width),
            ]
    return [*found, ModelMatmul("head", 1, logits, width, w["vocab_size"] / tp)]


def attention_of(work: Workload, sequences: float, new: float, seen: float, tp: float = 1) -> list[ModelMatmul]:
    """Return attention's two multiplications: `new` tokens of each sequence attend to `seen` ones, on average.

    The query heads that share keys are rows of one matrix.
    """
    kv_heads = float(np.asarray(work.kv_heads_on(tp)))
    rows = new * float(np.asarray(work.heads)) / tp / kv_heads
    times = float(np.asarray(work.layers)) * kv_heads * sequences
    key, value = float(np.asarray(work.key_width)), float(np.asarray(work.value_width))
    return [
        ModelMatmul("attention scores", times, rows, key, seen, is_weight=False),
        ModelMatmul("attention values", times, rows, seen, value, is_weight=False),
    ]


def seconds_of_matmuls(
    some: Sequence[ModelMatmul], points: Points, wanted: str, rows: NDArray[np.int64] | slice = slice(None)
) -> tuple[Floats, Floats]:
    """Return the seconds of arithmetic and of memory of each multiplication on each point: [matmul, point].

    wanted: number format of the weights' multiplications.
    """
    of_compute, of_memory = [], []
    for one in some:
        fmt = points.computed(wanted if one.is_weight else "bf16")
        size = BYTES[fmt] if one.is_weight else 2.0
        moved = np.asarray((one.m * one.k + one.k * one.n + one.m * one.n) * size)
        if points.cache_bytes is not None:
            blocked = one.flops / one.times * size / np.sqrt(points.cache_bytes[rows] / size)
            moved = np.maximum(moved, np.where(points.cache_bytes[rows] > 0, blocked, 0.0))
        rate = points.flops_per_s[fmt][rows] * points.achieved[fmt][rows]
        of_compute.append(one.flops / rate)
        of_memory.append(one.times * moved / points.memory_bytes_per_s[rows])
    return np.stack(np.broadcast_arrays(*of_compute)), np.stack(np.broadcast_arrays(*of_memory))
