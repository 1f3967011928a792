"""The costs of inference: memory for weights and KV cache, seconds of prefill and of each further token.

A replica of the model is cut over tp x pp devices; the replicas share the sequences that are answered at a time.
Prefill is the forward of a training step: its FLOPs at the rate of matmuls, and two sums over tp ranks in each layer. A
decode step of B sequences reads each layer's weights once (of the experts those that any of B k choices hits: E (1 - (1
- k/E)^B)) and the cache of all B, or computes, whichever takes longer (roofline: Williams et al. 2009; Pope et al.
2022, "Efficiently Scaling Transformer Inference"). Kernels are started from captured graphs, so that the host is no
limit. With pipeline stages the sequences go round in pp groups.

The cache of a token holds its keys and values in each layer; with latent attention, the latent and the rotated key
(DeepSeek-AI 2024), which all tp ranks have whole. A layer with a window keeps those of its window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.estimate import Estimate
from argosy.plan.cost.network import group_of, send_s
from argosy.plan.cost.rates import in_precision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STREAMED = 0.85
"""Share of the memory bandwidth for reading weights and cache; assumed."""
SUM_S = 10e-6
"""Seconds to start a sum over the ranks of a node, by kernels made for small messages; assumed."""


@dataclass(frozen=True)
class Serving:
    """One way to cut the model, with its costs."""

    tp: int
    pp: int
    copies: int
    sequences: int
    """Sequences that each replica answers at a time."""
    weights_bytes: float
    """Weights on one device."""
    cache_bytes: float
    """Cache on one device, for these sequences at full length."""
    memory_bytes: Estimate
    most_sequences: int
    """Sequences that a replica has room for."""
    prefill_s: Estimate
    """Time of one sequence's prefill."""
    decode_s: Estimate
    """Time between two tokens of a sequence, at full length."""
    tokens_per_s: float
    """Tokens that all devices decode a second."""


def predict_serving(costs: CostModel, tp: Ints, pp: Ints, precision: str) -> list[Serving]:
    """Return the costs of each way to cut the model; `tp` and `pp` are columns of one length."""
    model = _ServingModel(costs, tp, pp, precision)
    seq_len, batch = costs.run.data.seq_len, costs.run.train.global_batch
    replicas = costs.devices // (tp * pp)
    sequences = -(-batch // replicas)
    weights = float(costs.workload.matrix_parameters) * model.weight_bytes / (tp * pp)
    cached = seq_len * float(costs.workload.cached_share)
    of_sequence = model.token_cache_bytes() * cached * float(costs.workload.layers) / pp
    memory = weights + sequences * of_sequence + costs.constants.workspace_bytes
    room = (float(costs.memory_bytes) - weights - costs.constants.workspace_bytes) // of_sequence
    prefill = model.prefill_s(seq_len)
    decode = model.decode_s(-(-sequences // pp))
    tokens = replicas * np.minimum(sequences, batch / replicas) / decode
    return [
        Serving(
            tp=int(tp[i]),
            pp=int(pp[i]),
            copies=int(replicas[i]),
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


class _ServingModel:
    """The costs of inference on replicas that are cut over `tp` x `pp` devices, both columns of one length."""

    def __init__(self, costs: CostModel, tp: Ints, pp: Ints, precision: str):
        self.costs, self.tp, self.pp = costs, tp, pp
        self.work, self.rates, self.constants = costs.workload, costs.rates, costs.constants
        self.weight_bytes = 4.0 if precision == "fp32" else 1.0 if precision == "fp8" else 2.0
        self.activation_bytes = 4.0 if precision == "fp32" else 2.0
        rates, number = costs.rates, ("fp32", "bf16", "fp16", "fp8").index(precision)
        peak = in_precision(number, rates.fp32, rates.half, rates.narrow)
        achieved = in_precision(number, rates.achieved_fp32, rates.achieved_half, rates.achieved_narrow)
        self.matmul_flops_per_s = float(peak) * float(achieved) * costs.constants.matmul

    def token_cache_bytes(self) -> Floats:
        """Return the bytes of a token's cache in one layer, on one tensor-parallel rank."""
        work = self.work
        whole = np.maximum(1, float(work.kv_heads) / self.tp) * (float(work.key_width) + float(work.value_width))
        latent = float(work.kv_rank) + float(work.rope_width)
        return np.where(float(work.kv_rank) > 0, latent, whole) * max(self.weight_bytes, 2.0)

    def prefill_s(self, tokens: int) -> Floats:
        """Return the seconds of the forward of a sequence through all layers, one pipeline stage after the other."""
        work, constants, layers = self.work, self.constants, float(self.work.layers)
        matmuls = 2 * tokens * float(work.matmul_parameters) / self.tp / self.matmul_flops_per_s
        widths = float(work.key_width) + float(work.value_width)
        scores = 2 * tokens * float(work.attention_span) * float(work.heads) * widths * layers
        attention = scores / self.tp / (self.matmul_flops_per_s * constants.attention)
        hidden = constants.pointwise * float(work.width) + constants.pointwise_ffn * float(work.ffn_width)
        moved = tokens * hidden * self.activation_bytes * layers
        pointwise = moved / self.tp / float(self.rates.memory_bytes_per_s)
        return np.asarray(matmuls + attention + pointwise + self._waits_s(tokens))

    def decode_s(self, group: Ints) -> Floats:
        """Return the seconds of one token for each of `group` sequences, through all layers and pipeline stages."""
        work, layers = self.work, float(self.work.layers)
        experts, chosen = float(work.experts), float(work.experts_per_token)
        hit = 1 - (1 - chosen / experts) ** group if experts else np.zeros(len(self.tp))
        idle = float(work.moe_layers) * float(work.expert_parameters) * (1 - hit)
        embedding = (1 - float(work.tied)) * float(work.vocabulary_parameters)
        weights = (float(work.matrix_parameters) - idle - embedding) * self.weight_bytes / self.tp
        cached = self.costs.run.data.seq_len * float(work.cached_share)
        cache = group * cached * self.token_cache_bytes() * layers
        reading = (weights + cache) / (float(self.rates.memory_bytes_per_s) * STREAMED)
        computing = 2 * group * float(work.matmul_parameters) / self.tp / self.matmul_flops_per_s
        return np.asarray(np.maximum(reading, computing) + self._waits_s(group))

    def _waits_s(self, tokens: Ints | int) -> Floats:
        """Return the seconds of two sums over tensor-parallel ranks in each layer, and of sends between stages."""
        tp, pp = self.tp, self.pp
        message = tokens * float(self.work.width) * self.activation_bytes
        ring = group_of(tp, 1, self.rates, self.constants).ring
        of_sum = 2 * (tp - 1) / tp * message / ring + np.where(tp > 1, SUM_S, 0.0)
        sends = (pp - 1) * send_s(message / tp, group_of(pp, tp, self.rates, self.constants))
        return np.asarray(2 * float(self.work.layers) * of_sum + sends)
