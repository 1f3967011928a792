"""What a model takes where it answers: memory for weights and KV cache, seconds of prefill and of each further token.

A copy of the model is cut over tp x pp devices; all copies share the sequences that are answered at a time. Prefill is
the forward of a training step: its FLOPs at the rate of matmuls, two sums over tp ranks in each layer. A decode step of
B sequences reads each layer's weights once (of experts those that any of B k choices hits: E (1 - (1 - k/E)^B)) and
the cache of all B, or computes, whichever takes longer (roofline: Williams et al. 2009; Pope et al. 2022, "Efficiently
Scaling Transformer Inference"); kernels are started from captured graphs, so that the host is no limit. With pipeline
stages the sequences go round in pp groups.

The cache of a token is its keys and values in each layer; with latent attention the latent and the rotated key
(DeepSeek-AI 2024), which all tp ranks have whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.network import group_of, send_s
from argosy.plan.cost.rates import in_precision
from argosy.plan.cost.workload import Workload

Floats = NDArray[np.float64]

STREAMED = 0.85
"""Share of the memory bandwidth that reading weights and cache gets; assumed."""
SUM_S = 10e-6
"""To start a sum over the ranks of a node, by kernels made for small messages; assumed."""


@dataclass(frozen=True)
class Serving:
    """One way to cut the model, with what it comes to."""

    tp: int
    pp: int
    copies: int
    sequences: int
    """Answered at a time by each copy."""
    weights_bytes: float
    """Of a device."""
    cache_bytes: float
    """Of a device, for these sequences at full length."""
    memory_bytes: Estimate
    most_sequences: int
    """That a copy has room for."""
    prefill_s: Estimate
    """Of one sequence."""
    decode_s: Estimate
    """Between two tokens of a sequence, at full length."""
    tokens_per_s: float
    """Decoded by all devices."""


def predict_serving(costs: CostModel, tp: NDArray[np.int64], pp: NDArray[np.int64], precision: str) -> list[Serving]:
    """What each way to cut the model comes to, `tp` and `pp` ranks being columns of one length."""
    w, c = costs.workload, costs.constants
    seq_len, batch = costs.run.data.seq_len, costs.run.train.global_batch
    element = 4.0 if precision == "fp32" else 1.0 if precision == "fp8" else 2.0
    copies = costs.devices // (tp * pp)
    sequences = -(-batch // copies)
    weights = float(w.parameters) * element / (tp * pp)
    of_sequence = _cache_bytes(w, tp, max(element, 2.0)) * seq_len * float(w.layers) / pp
    memory = weights + sequences * of_sequence + c.workspace_bytes
    room = (float(costs.memory_bytes) - weights - c.workspace_bytes) // of_sequence
    prefill = _forward_s(costs, tp, pp, precision, seq_len)
    group = -(-sequences // pp)
    decode = _decode_s(costs, tp, pp, precision, group)
    tokens = copies * np.minimum(sequences, batch / copies) / decode
    return [
        Serving(
            tp=int(tp[i]),
            pp=int(pp[i]),
            copies=int(copies[i]),
            sequences=int(sequences[i]),
            weights_bytes=float(weights[i]),
            cache_bytes=float(sequences[i] * of_sequence[i]),
            memory_bytes=Estimate.log_normal(float(memory[i]), costs.memory_std),
            most_sequences=max(0, int(room[i])),
            prefill_s=Estimate.log_normal(float(prefill[i]), costs.time_std),
            decode_s=Estimate.log_normal(float(decode[i]), costs.time_std),
            tokens_per_s=float(tokens[i]),
        )
        for i in range(len(tp))
    ]


def _cache_bytes(w: Workload, tp: NDArray[np.int64], element: float) -> Floats:
    """Of a token in one layer, on one tensor-parallel rank."""
    whole = np.maximum(1, float(w.kv_heads) / tp) * (float(w.key_width) + float(w.value_width))
    latent = float(w.kv_rank) + float(w.rope_width)
    return np.where(float(w.kv_rank) > 0, latent, whole) * element


def _forward_s(costs: CostModel, tp: NDArray[np.int64], pp: NDArray[np.int64], precision: str, tokens: int) -> Floats:
    """Forward of a sequence through all layers, one pipeline stage after the other."""
    w, r, c = costs.workload, costs.rates, costs.constants
    rate, element = _rate(costs, precision), 4.0 if precision == "fp32" else 2.0
    matmuls = 2 * tokens * float(w.matmul_parameters) / tp / rate
    scores = 2 * tokens * float(w.span) * float(w.heads) * (float(w.key_width) + float(w.value_width)) * float(w.layers)
    attention = scores / tp / (rate * c.attention)
    hidden = c.pointwise * float(w.width) + c.pointwise_ffn * float(w.ffn_width)
    pointwise = tokens * hidden * element * float(w.layers) / tp / float(r.memory_bytes_per_s)
    return np.asarray(matmuls + attention + pointwise + _waits(costs, tp, pp, tokens, element))


def _decode_s(
    costs: CostModel, tp: NDArray[np.int64], pp: NDArray[np.int64], precision: str, group: NDArray[np.int64]
) -> Floats:
    """One token for each of `group` sequences, through all layers, one pipeline stage after the other."""
    w, r = costs.workload, costs.rates
    element = 4.0 if precision == "fp32" else 1.0 if precision == "fp8" else 2.0
    experts, chosen = float(w.experts), float(w.experts_per_token)
    hit = 1 - (1 - chosen / experts) ** group if experts else np.zeros(len(tp))
    idle = float(w.moe_layers) * float(w.expert_parameters) * (1 - hit)
    embedding = (1 - float(w.tied)) * float(w.vocabulary_parameters)
    weights = (float(w.parameters) - idle - embedding) * element / tp
    cache = group * costs.run.data.seq_len * _cache_bytes(w, tp, max(element, 2.0)) * float(w.layers)
    reading = (weights + cache) / (float(r.memory_bytes_per_s) * STREAMED)
    computing = 2 * group * float(w.matmul_parameters) / tp / _rate(costs, precision)
    waits = _waits(costs, tp, pp, group, 4.0 if precision == "fp32" else 2.0)
    return np.asarray(np.maximum(reading, computing) + waits)


def _waits(
    costs: CostModel, tp: NDArray[np.int64], pp: NDArray[np.int64], tokens: NDArray[np.int64] | int, element: float
) -> Floats:
    """Two sums over tensor-parallel ranks in each layer, and sends between stages."""
    w, r, c = costs.workload, costs.rates, costs.constants
    message = tokens * float(w.width) * element
    ring = group_of(tp, 1, r, c).ring
    of_sum = 2 * (tp - 1) / tp * message / ring + np.where(tp > 1, SUM_S, 0.0)
    sends = (pp - 1) * send_s(message / tp, group_of(pp, tp, r, c))
    return np.asarray(2 * float(w.layers) * of_sum + sends)


def _rate(costs: CostModel, precision: str) -> float:
    """FLOP/s of matmuls inside a model."""
    r, number = costs.rates, ("fp32", "bf16", "fp16", "fp8").index(precision)
    peak = in_precision(number, r.fp32, r.half, r.narrow)
    achieved = in_precision(number, r.achieved_fp32, r.achieved_half, r.achieved_narrow)
    return float(peak) * float(achieved) * costs.constants.matmul
