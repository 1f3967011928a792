"""The computing time of a layer: its matmuls, its attention, and the operations that are as fast as memory.

Shapes are those of one microbatch on one rank: T = microbatch x seq_len / cp tokens, matrices cut by tp.

Matmul of m x k by k x n: 2mkn FLOPs at the rate of large matmuls, slowed by 1 + c/m + c/k + c/n: a small dimension
makes tiles reread their operands. c grows with the device's FLOPs for each byte of memory bandwidth, so that what is
added is time of the memory, the same however fast the device computes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from argosy.plan.cost.breakdown import RankSizes
from argosy.plan.cost.constants import BACKWARD_ATTENTION, INTENSITY, Constants
from argosy.plan.cost.rates import Rates, System, in_precision
from argosy.plan.layer_spec import DELTA_CHUNK
from argosy.plan.layouts import Layouts
from argosy.plan.plan import FP8
from argosy.plan.workload import Numbers, Workload

BACKWARD_POINTWISE = 1.6
"""Time of a pointwise backward over its forward: backward reads the gradient too, and writes one result."""
FULL_HEAD = 128
"""Head width from which tiled attention is as fast as it gets: half as wide, it takes as many exponentials for half the
FLOPs (Shah et al. 2024: 0.65 to 0.75 of the FLOP/s)."""
FUSED_EXCHANGE = 0.6
"""Share of the passes over experts' rows that is left if the exchange sorts them itself (DeepEP, HybridEP)."""
DELTA_PASSES = 8
"""Passes of a gated delta-net's forward over its streams and its chunks' matrices, many of them in fp32; assumed."""
HOST_OF_PART = 20e-6
"""Seconds that the host takes to start one rank's part of a product that exchanges its tokens: a copy, the product and
barriers; assumed, as is all of async tensor parallelism, which has run on no GPU."""
BIAS_PASSES = 4
"""Passes over experts' results to add biases, expert by expert, and to put the results together again."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of the forward of one layer, or of all that is around the layers, for one microbatch."""

    matmul: Numbers
    attention: Numbers
    pointwise: Numbers

    @property
    def forward(self) -> Numbers:
        return self.matmul + self.attention + self.pointwise

    def backward(self, reached: Numbers = 1, trained: Numbers = 1) -> Numbers:
        """`reached`: the share that backward reaches; `trained`: that whose weights have gradients."""
        others = BACKWARD_ATTENTION * self.attention + BACKWARD_POINTWISE * self.pointwise
        return (reached + trained) * self.matmul + reached * others

    def __add__(self, other: LayerTime) -> LayerTime:
        return LayerTime(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: Numbers) -> LayerTime:
        return LayerTime(*(getattr(self, f.name) * times for f in fields(self)))


class LayerModel(RankSizes):
    """Seconds that layers compute, for plans of one workload on one kind of device, or of one for each plan."""

    def __init__(self, plans: Layouts, work: Workload, rates: Rates, system: System, constants: Constants):
        super().__init__(plans, work, system)
        self.rates, self.constants = rates, constants
        self.peak_flops_per_s = in_precision(plans.precision, rates.fp32, rates.half, rates.narrow)
        achieved = in_precision(plans.precision, rates.achieved_fp32, rates.achieved_half, rates.achieved_narrow)
        self.matmul_flops_per_s = self.peak_flops_per_s * achieved * constants.matmul
        self.half_size = constants.half_size * self.matmul_flops_per_s / rates.memory_bytes_per_s / INTENSITY
        """Matmul dimension that halves the speed."""
        half = rates.half * rates.achieved_half * constants.matmul
        self.is_fp8 = np.asarray(plans.is_("precision", *FP8))
        self.wide = np.where(self.is_fp8, half / self.matmul_flops_per_s, 1.0)
        """Speed of matrices that stay in bf16, over that of the plan's precision."""
        self.attention_flops_per_s = in_precision(
            plans.precision,
            rates.fp32 * rates.achieved_fp32,
            rates.half * rates.achieved_half,
            rates.half * rates.achieved_half,
        ) * (constants.attention * system.attention)
        fused = np.where(plans.compile, system.fused, 0.0)
        self.pointwise_passes = 1 + np.where(fused > 0, 0.0, constants.unfused)
        """Passes over memory of pointwise operations, over those of fused kernels."""

    @cached_property
    def mean_layer(self) -> LayerTime:
        """The mean over all layers, some of which may have experts."""
        work = self.work
        moe = work.moe_layers / work.layers
        mlp = self._feed_forward * (1 - moe) + self.mixture * moe
        return self._attention + mlp + self._adapters() + self._dequantised() + self._around()

    def _matmul(
        self,
        m: Numbers,
        k: Numbers,
        n: Numbers,
        rate: Numbers | None = None,
        matrices: tuple[Numbers, ...] | None = None,
    ) -> LayerTime:
        """Return the forward of a matmul, with the conversions to a narrow format.

        matrices: outputs of each, if n are those of several; none: all stay in half precision.
        """
        rate = self.matmul_flops_per_s if rate is None else rate
        narrow = self._in_fp8(k, (n,) if matrices is None else matrices)
        flops, half = 2 * m * k * n, self.half_size * np.where(narrow > 0, 1.0, self.wide)
        slow = 1 + half * (1 / np.maximum(1, m) + 1 / np.maximum(1, k) + 1 / np.maximum(1, n))
        converted = (m * k + m * n + k * n) * self.activation_bytes / self.rates.memory_bytes_per_s
        quantize = narrow * self.constants.quantize * converted / 2
        return LayerTime(flops / rate * slow * (narrow + (1 - narrow) / self.wide) + quantize, 0.0, 0.0)

    def _in_fp8(self, k: Numbers, matrices: tuple[Numbers, ...]) -> Numbers:
        """Return the share of matrices of k inputs, and so many outputs each, that is multiplied in fp8 (`FP8`)."""
        found: Numbers = 0.0
        if not self.is_fp8.any():
            return found
        for precision, multiple in FP8.items():
            # What is no whole number is a mean over layers that differ.
            fits = [(size % multiple == 0) | (size % 1 != 0) for size in map(np.asarray, (k, *matrices))]
            outputs = sum((np.where(fit, n, 0.0) for fit, n in zip(fits[1:], matrices, strict=True)), start=np.zeros(1))
            share = outputs / np.maximum(1, sum(matrices)) * fits[0]
            found = np.where(self.plans.is_("precision", precision), share, found)
        return found

    def _exchanging(self, m: Numbers, k: Numbers, n: Numbers, matrices: tuple[Numbers, ...] | None = None) -> LayerTime:
        """Return the forward of a matmul before or after which tensor-parallel ranks exchange tokens.

        With async_tp it is cut by ranks, and so is backward's to the inputs; that to the weights is whole.
        """
        parts, whole = self.tensor_parts, self._matmul(m, k, n, None, matrices)
        if not np.any(parts > 1):
            return whole
        return (self._matmul(m / parts, k, n, None, matrices) * (2 * parts) + whole) * (1 / 3)

    @property
    def tensor_parts(self) -> Numbers:
        """Parts in which a product that exchanges its tokens is computed."""
        return np.where(self.plans.is_("async_tp", True), self.plans.tp, 1)

    @cached_property
    def _attention(self) -> LayerTime:
        work, plans, tokens = self.work, self.plans, self.tokens
        queries, values = work.heads * work.key_width / plans.tp, work.heads * work.value_width / plans.tp
        kv_heads, gated = work.kv_heads_on(plans.tp), queries + work.gates * values
        kv = kv_heads * (work.kv_width - work.unprojected / work.kv_heads)
        matrices = gated, kv_heads * work.key_width, kv_heads * work.value_width
        plain = self._exchanging(tokens, work.width, gated + kv, matrices)
        down, up = self._exchanging(tokens, work.width, work.q_rank), self._matmul(tokens, work.q_rank, queries)
        direct = self._exchanging(tokens, work.width, queries)
        has_rank = np.where(work.q_rank > 0, 1.0, 0.0)
        unrotated = work.key_width - work.rope_width
        latent = (
            (down + up) * has_rank
            + direct * (1 - has_rank)
            + self._exchanging(tokens, work.width, work.kv_rank + work.rope_width)
            + self._matmul(tokens, work.kv_rank, work.heads / plans.tp * (unrotated + work.value_width))
        )
        is_latent = np.where(work.kv_rank > 0, 1.0, 0.0)
        attention = latent * is_latent + plain * (1 - is_latent) + self._exchanging(tokens, values, work.width)
        return attention * (1 - work.delta_share) + self._delta_net() * work.delta_share + self._scores

    def _delta_net(self) -> LayerTime:
        """Return a gated delta-net: its matrices, its rule at attention's rate, and what moves through memory."""
        work, tp, tokens = self.work, self.plans.tp, self.tokens
        values = work.delta_heads * work.delta_value_width / tp
        rule = tokens * work.delta_flops_per_token / tp / self.attention_flops_per_s
        moved = DELTA_PASSES * tokens * (work.delta_streams + work.delta_heads * DELTA_CHUNK) / tp
        streams = self._exchanging(tokens, work.width, work.delta_streams / tp)
        matrices = streams + self._exchanging(tokens, values, work.width)
        return matrices + LayerTime(0.0, rule, 0.0) + self._moving(moved)

    @cached_property
    def _scores(self) -> LayerTime:
        """The scores, and the sum of values that they weight."""
        work, plans, system = self.work, self.plans, self.system
        flops = self._score_flops()
        narrow = np.sqrt(np.minimum(1.0, work.key_width / FULL_HEAD))
        tiled = flops / (self.attention_flops_per_s * narrow)
        all_scores = self.tokens * work.seq_len * work.heads / plans.tp * (1 - work.delta_share)
        passes = self.constants.score_passes + 4 * system.dropout
        moving = passes * self.activation_bytes * all_scores / self.rates.memory_bytes_per_s
        whole = 2 * all_scores * (work.key_width + work.value_width) / self.matmul_flops_per_s + moving
        return LayerTime(0.0, np.where(system.flash > 0, tiled, whole), 0.0)

    def _score_flops(self) -> Numbers:
        work = self.work
        return 2 * self.tokens * work.attention_span * work.heads / self.plans.tp * (work.key_width + work.value_width)

    @cached_property
    def _feed_forward(self) -> LayerTime:
        return self._mlp(self.tokens, self.work.ffn_width / self.plans.tp, self.work.ffn_matrices)

    def _mlp(self, tokens: Numbers, hidden: Numbers, matrices: Numbers) -> LayerTime:
        """Return a feed-forward, gated or not."""
        work = self.work
        up = self._exchanging(tokens, work.width, (matrices - 1) * hidden, (hidden,))
        moved = self._moving(self.constants.pointwise_ffn * matrices / 3 * tokens * hidden)
        return up + self._exchanging(tokens, hidden, work.width) + moved

    @cached_property
    def mixture(self) -> LayerTime:
        """The router, the experts at an even load of tokens, and the shared experts."""
        work, system, constants = self.work, self.system, self.constants
        pairs, hidden = self._pairs, work.expert_ffn_width / self.expert_tp
        fused = np.where(system.sends_once > 0, FUSED_EXCHANGE, 1.0)
        results = (work.expert_matrices - 1) * hidden + work.width
        moved = constants.permute * fused * pairs * work.width + constants.pointwise_ffn * pairs * hidden
        moved = moved + work.expert_biases * BIAS_PASSES * pairs * results
        router = self._matmul(self.tokens / self.sequence_ranks, work.width, work.experts, matrices=())
        return self.expert_matmuls + self._moving(moved) + router + self.shared_experts

    @cached_property
    def shared_experts(self) -> LayerTime:
        """The experts that all tokens share."""
        return self._mlp(self.tokens, self.work.shared_ffn_width / self.plans.tp, self.work.expert_matrices)

    @cached_property
    def expert_matmuls(self) -> LayerTime:
        """The experts' own matrices, at an even load of tokens."""
        work, times = self.work, np.maximum(1, self.work.experts / self.plans.ep) * self.expert_parts
        of_one = self._pairs / times
        rate = self.matmul_flops_per_s * self.constants.expert_matmul
        hidden = work.expert_ffn_width / self.expert_tp
        inner = self._matmul(of_one, work.width, (work.expert_matrices - 1) * hidden, rate, (hidden,))
        return (inner + self._matmul(of_one, hidden, work.width, rate)) * times

    @property
    def _pairs(self) -> Numbers:
        """Pairs of a token and one of its experts that a rank computes."""
        return self.tokens / (self.plans.tp / self.expert_tp) * self.work.experts_per_token

    @property
    def expert_parts(self) -> Numbers:
        """Parts in which tokens go to their experts."""
        return np.where(self.plans.is_("overlap_experts", True), 2.0, 1.0)

    def _around(self) -> LayerTime:
        widths = self.constants.pointwise + 3 * self.system.dropout
        summed = np.where(self.tensor_parts > 1, 2 * (self.plans.tp + 1), 0)  # parts of sums that no collective adds up
        return self._moving((widths + summed) * self.tokens / self.sequence_ranks * self.work.width)

    def _adapters(self) -> LayerTime:
        """Return the adapters beside a layer's matrices. They are so narrow that reading their inputs, and writing,
        reading and adding their outputs, takes the time, or else the matmuls of a high rank, which have two in
        backward for one in forward, as pointwise operations about have."""
        work, tokens, tp = self.work, self.tokens, self.plans.tp
        flops = 2 * tokens * work.adapter_rank * (work.adapter_inputs + work.adapter_outputs) / tp
        cut = work.adapter_inputs + 3 * work.adapter_outputs + 2 * (work.adapter_kept + work.dropped_cut)
        moved = tokens * (cut / tp + 2 * work.dropped_whole)
        moving = self._moving(moved)
        return replace(moving, pointwise=np.maximum(moving.pointwise, flops / self.matmul_flops_per_s))

    def _dequantised(self) -> LayerTime:
        """Return the dequantising of a layer's matrices, whatever the number of tokens: bytes read, numbers written."""
        numbers = sum(self.quantised(1.0))
        return self._moving(numbers * (1 + self.work.quantised_bytes / self.activation_bytes))

    def _moving(self, elements: Numbers) -> LayerTime:
        """Return pointwise operations that read or write so many elements of memory."""
        moved = elements * self.activation_bytes * self.pointwise_passes
        return LayerTime(0.0, 0.0, moved / self.rates.memory_bytes_per_s)

    @cached_property
    def head(self) -> LayerTime:
        """Logits and loss of one microbatch, on the last stage; in half precision even if layers are narrower. Modules
        of multi-token prediction have one each, after a projection."""
        work, plans, rates = self.work, self.plans, self.rates
        half = rates.half * rates.achieved_half
        rate = in_precision(plans.precision, rates.fp32 * rates.achieved_fp32, half, half)
        logits = self.tokens * work.head_outputs / plans.tp
        flops = 2 * logits * work.width
        once = LayerTime(flops / (rate * self.constants.matmul), 0.0, 10 * logits / rates.memory_bytes_per_s)
        projection = 2 * self.tokens * work.further_parameters / self.sequence_ranks
        return once * (1 + work.further) + LayerTime(projection / (rate * self.constants.matmul), 0.0, 0.0)

    def ideal_s(self) -> tuple[Numbers, Numbers]:
        """Return the seconds of matmuls and of attention at the data sheet's rates, evenly shared out."""
        work, rates, precision = self.work, self.rates, self.plans.precision
        tokens = work.global_batch * work.seq_len / self.plans.world_size
        half = in_precision(precision, rates.fp32, rates.half, rates.half)
        in_layers, in_head = work.matmul_flops_per_token
        of_matmuls = in_layers / self.peak_flops_per_s + in_head / half
        return tokens * of_matmuls, tokens * (work.train_flops_per_token - in_layers - in_head) / half

    @cached_property
    def recomputed_s(self) -> Numbers:
        """Seconds of a layer's recompute: all of it, or the cheap operations (scores, if attention is not tiled)."""
        plans, system = self.plans, self.system
        layer = self.mean_layer
        cheap = layer.pointwise * 0.5 + np.where(system.flash > 0, 0.0, layer.attention)
        which = np.where(plans.is_("recompute", "selective"), cheap, 0.0)
        which = np.where(plans.is_("recompute", "full"), layer.forward, which)
        return self.work.reached * which * self.recomputed_share

    @property
    def trained_matmuls(self) -> Numbers:
        """Share of the layers' matmuls whose weights are trained."""
        work = self.work
        return work.trained_matmul_parameters / (work.matmul_parameters - work.head_parameters)

    @property
    def layer_backward_s(self) -> Numbers:
        """Seconds of the mean layer's backward."""
        return self.mean_layer.backward(self.work.reached, self.trained_matmuls)

    @property
    def of_head_s(self) -> Numbers:
        """Seconds of the head's forward and backward, of one microbatch."""
        return self.head.forward + self.head.backward(trained=self.work.trained_head)

    def host_s(self, device: Numbers) -> Numbers:
        """Return the seconds that the host adds to a layer that takes the device so many seconds.

        The host starts kernels ahead of the device, so that the slower of the two counts. The maximum is softened,
        because neither is spread evenly.
        """
        plans, work, constants = self.plans, self.work, self.constants
        of_experts = constants.host_experts + constants.host_expert * np.maximum(1, work.experts / plans.ep)
        of_experts = work.moe_layers / work.layers * of_experts * self.expert_parts * self.system.launched
        of_parts = np.where(self.tensor_parts > 1, 8 * self.tensor_parts * HOST_OF_PART, 0.0)
        needed = constants.host * np.where(plans.compile, 0.5, 1.0) + of_experts + of_parts
        beyond = np.sqrt(np.hypot(device * device, needed * needed)) - device
        return np.where(self.rates.host_waits > 0, needed, beyond)
