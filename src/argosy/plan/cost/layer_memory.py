"""The memory of a layer: the activations that it keeps for backward, and what its backward needs beside them.

Activations follow Korthikanti et al. 2022 for unfused attention, without its score matrices if attention is tiled. With
T tokens of a microbatch on the rank, e bytes of an activation and everything cut by tp, a layer keeps for backward

    4 h + extra     input and output of both norms, and what the software keeps more       (x T e)
    q, k, v, out    the attention's operands and result
    ffn             each matrix's output, the product of both if gated
    experts         k times as many rows, and their tokens before and after
    delta-net       its streams and result; all between comes and goes in backward (`delta_between`)
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.breakdown import RankSizes
from argosy.plan.cost.rates import System
from argosy.plan.layer_spec import DELTA_CHUNK
from argosy.plan.layouts import Layouts
from argosy.plan.plan import FP8
from argosy.plan.workload import Numbers, Workload

KEPT_FLOPS_PER_BYTE = 8.0
"""Selective recomputation (`parallel.recompute`) keeps an output if each of its bytes saves more FLOPs than this.

Elementwise operations, norms and casts cost about one FLOP a byte, a matmul with inner dimension K costs 2K over the
size of an element, attention over S tokens 4S over that size: any bound between these gives the same choice for dense
models, and a higher one gives up attention inside short documents first. The outputs of adapters are computed again
whatever their rank. Below a device's ridge point (about 10 on a CPU, 200 to 300 on datacentre GPUs in bf16) computing
again takes no longer than reading.
"""
DROPOUT_BYTES = 1


class LayerMemory(RankSizes):
    """The memory of one layer of each plan for one microbatch, on one rank; the mean over layers."""

    def __init__(self, plans: Layouts, work: Workload, system: System):
        super().__init__(plans, work, system)
        self.eager = plans.is_("compile", False)
        self.offloads_activations = plans.is_("offload", "activations", "all")

    @property
    def _has_adapter(self) -> NDArray[np.bool_]:
        return np.asarray(self.work.adapter_rank) > 0

    @cached_property
    def _attention(self) -> Numbers:
        """Elements for a token: queries, keys, values, the result of attention, and latents."""
        plans, work = self.plans, self.work
        queries, values = work.heads * work.key_width / plans.tp, work.heads * work.value_width / plans.tp
        kv = work.kv_heads_on(plans.tp) * work.kv_width
        latent = np.where(work.kv_rank > 0, 2 * (work.q_rank + work.kv_rank) + work.rope_width, 0)
        attention = queries + work.gates * values + kv + values + latent
        in_fp32 = 4 * (1 + work.trained_norms) / self.activation_bytes  # a norm's input, its result before factors
        of_result = np.where(self.eager, 3 + in_fp32, 3) * work.delta_heads * work.delta_value_width
        return (1 - work.delta_share) * attention + work.delta_share * (work.delta_streams + of_result) / plans.tp

    @cached_property
    def delta_between(self) -> Numbers:
        """Bytes for a token between the streams and the result of a gated delta-net, that backward computes again.

        The factors are counted from autograd's saved tensors of `models.delta_net`: fp32 copies by heads, operands of
        matrix products, chunks' matrices, a state for each chunk, and what gradients of convolutions' kernels read.
        """
        work, e = self.work, self.activation_bytes
        keys, values = work.delta_key_heads * work.delta_key_width, work.delta_heads * work.delta_value_width
        between = (48 + 7 * e) * keys + (30 + 6.5 * e) * values + 10 * work.delta_heads * work.delta_key_width
        between = between - 3 * e * (1 - work.trained_dense) * (2 * keys + values)
        return (between + 21 * work.delta_heads * DELTA_CHUNK + 4 * work.delta_state / DELTA_CHUNK) / self.plans.tp

    @cached_property
    def _delta_results(self) -> Numbers:
        """Bytes for a token of the matrix products, systems and states between, which selective recompute keeps."""
        work = self.work
        width = work.delta_key_width + 4 * work.delta_value_width
        chunks = 8 * work.delta_key_heads * DELTA_CHUNK + 4 * work.delta_state / DELTA_CHUNK
        return work.delta_share * (4 * work.delta_heads * width + chunks) / self.plans.tp

    @cached_property
    def _scores(self) -> Numbers:
        """Bytes for a token: scores and their softmax if attention is not tiled, else its log-sum-exp."""
        plans, work, system = self.plans, self.work, self.system
        heads = work.heads / plans.tp * (1 - work.delta_share)
        matrices = (self.activation_bytes + 3 * system.dropout) * heads * work.seq_len
        return np.where(system.flash > 0, 4 * heads, matrices)

    def _feed_forward(self, matrices: Numbers, of_expert: Numbers) -> Numbers:
        """Return the elements for a token of so many results in a dense feed-forward, or in experts; the mean over
        layers."""
        plans, work = self.plans, self.work
        moe = work.moe_layers / work.layers
        routed = work.experts_per_token * (2 * work.width + of_expert * work.expert_ffn_width) / plans.tp
        shared = of_expert * work.shared_ffn_width / plans.tp
        router = 4 * work.experts / self.sequence_ranks
        return (1 - moe) * matrices * work.ffn_width / plans.tp + moe * (routed + shared + router)

    @cached_property
    def _of_layer(self) -> Numbers:
        """Bytes that one layer keeps of one microbatch without recompute; the mean over layers."""
        return self._fused_layer + np.where(self.eager, self.tokens * self._unfused, 0.0) + self._casts

    @cached_property
    def _unfused(self) -> Numbers:
        """Bytes for a token that an eager layer keeps beside those of a compiled one.

        A norm keeps its input in fp32, and its result before the factor for the gradient of that; neither what compiled
        code keeps of both norms nor a second input of matrices where one serves both. A gate keeps its activation. A
        router reads its input in fp32. Where heads are filled up to one width, scores read them so, and what follows a
        copy of the results as they were.
        """
        plans, work = self.plans, self.work
        width, element = work.width / self.sequence_ranks, self.activation_bytes
        norms = 4 * (1 + work.scaled_norms) * (work.norms * width + work.normed / plans.tp)
        ffn = self._feed_forward(work.ffn_results, work.expert_results)
        ffn = ffn - self._feed_forward(work.ffn_matrices, work.expert_matrices)
        once = (2 - work.streams) * (width + self._inputs / 2)
        fused = (2 + self.system.kept_widths) * width + once
        heads = (work.heads + work.kv_heads) * (2 * work.core_width - work.key_width - work.value_width)
        cut = work.heads * work.value_width * ((work.core_width > work.value_width) | (np.asarray(work.gates) > 0))
        attention = (1 - work.delta_share) * (heads + cut) / plans.tp
        router = 4 * width * (work.trained_dense > 0) * work.moe_layers / work.layers
        return norms + router + (ffn + attention - fused) * element

    @cached_property
    def _fused_layer(self) -> Numbers:
        work, system = self.work, self.system
        hidden = (4 + system.kept_widths) * work.width / self.sequence_ranks + self._inputs
        elements = hidden + self._attention + self._feed_forward(work.ffn_matrices, work.expert_matrices)
        masks = system.dropout * 2 * DROPOUT_BYTES * work.width / self.sequence_ranks
        elements = elements - self._not_read + work.adapter_rank * work.adapters
        elements = elements + (work.adapter_kept + work.dropped_cut) / self.plans.tp + work.dropped_whole
        return self.tokens * (elements * self.activation_bytes + masks + self._scores)

    @cached_property
    def _not_read(self) -> Numbers:
        """Elements for a token that a layer does not keep: only gradients of frozen weights would read them."""
        plans, work = self.plans, self.work
        reached = np.maximum(work.reached, 1 / work.layers)
        dense, experts = (np.maximum(0, 1 - n / reached) for n in (work.read_dense, work.read_experts))
        moe = work.moe_layers / work.layers
        routed = experts * work.experts_per_token * (work.width + work.expert_ffn_width)
        inner = (1 - moe) * dense * work.ffn_width + moe * (dense * work.shared_ffn_width + routed)
        return dense * (2 * work.width / self.sequence_ranks + self._inputs) + inner / plans.tp

    @cached_property
    def _inputs(self) -> Numbers:
        """Elements for a token: the outputs of both norms, gathered from tensor-parallel ranks and kept so."""
        return np.where(self.system.gathers_again > 0, 0, 2 * self.work.width * (1 - 1 / self.sequence_ranks))

    @cached_property
    def _not_normed(self) -> Numbers:
        """Bytes of a microbatch that the first norm that backward reaches does not keep, if neither it nor what comes
        before it has a gradient."""
        work, plans = self.work, self.plans
        is_kept = (work.trained_norms > 0) | (work.trained_embedding > 0) | ~plans.is_("recompute", "none")
        return np.where(self.eager & ~is_kept, 4 * self.tokens * work.width / self.sequence_ranks, 0.0)

    @cached_property
    def _casts(self) -> Numbers:
        """Bytes of a layer's weights cast to the format of the arithmetic: eager autograd keeps them too."""
        cast = sum(self.parameters(1.0)) - sum(self.quantised(1.0))
        return np.where(self.eager & self._are_matrices_cast, cast * self.activation_bytes, 0.0)

    @cached_property
    def _are_matrices_cast(self) -> NDArray[np.bool_]:
        """True where matrices of layers are: fp8 is rounded from what is stored, and MXFP8 from bf16."""
        return np.asarray(self._is_cast & ~self.plans.is_("precision", *(word for word in FP8 if word != "mxfp8")))

    @cached_property
    def _is_cast(self) -> NDArray[np.bool_]:
        """True where weights are cast to the format of the arithmetic by the modules that use them."""
        plans = self.plans
        is_cast = ~plans.is_("precision", "fp32") & plans.is_("weights", "fp32") & ~plans.shards_parameters
        return np.asarray(is_cast & (~self._has_adapter | plans.is_("precision", "fp16")))

    @cached_property
    def moved(self) -> Numbers:
        """Bytes of a layer and microbatch that go to the host: what it keeps, or a recomputed layer's input."""
        whole = self._of_layer - self._casts
        again = np.where(self.plans.is_("recompute", "none"), 0.0, self.recomputed_share)
        return np.where(self.offloads_activations, again * self.hidden_bytes + (1 - again) * whole, 0.0)

    @cached_property
    def kept(self) -> Numbers:
        """Bytes that one layer keeps until backward, with the plan's recompute; the mean over layers."""
        share, work = self.recomputed_share, self.work
        kept = share * self._of_recomputed + (1 - share) * self._of_layer
        for every, experts, deltas in work.passed_over:
            here = (every > 1) & (self.plans.recompute_every == every)
            if np.any(here):
                passed = experts * work.layers, deltas * work.layers
                unlike = work.moe_layers, work.delta_layers
                again = ((all_ - (1 - share) * some) / share for all_, some in zip(unlike, passed, strict=True))
                of_both = share * self._among(*again)._of_recomputed + (1 - share) * self._among(*passed)._of_layer
                kept = np.where(here, of_both, kept)
        return kept

    def _among(self, moe_layers: Numbers, delta_layers: Numbers) -> LayerMemory:
        """Return the memory of layers of which so many have experts, and so many a delta-net."""
        work = replace(self.work, moe_layers=moe_layers, delta_layers=delta_layers, passed_over=())
        return LayerMemory(self.plans, work, self.system)

    @cached_property
    def _of_recomputed(self) -> Numbers:
        """Bytes that a recomputed layer keeps until backward; all, without recompute."""
        plans, work, system = self.plans, self.work, self.system
        whole = self._of_layer
        hidden = 3 * work.width / self.sequence_ranks + self._inputs
        results = hidden + self._attention + self._feed_forward(work.ffn_matrices - 1, work.expert_matrices - 1)
        of_matmuls = self.tokens * (results * self.activation_bytes + self._scores + self._delta_results)
        cheap = np.where(system.selective > 0, system.selective * self._fused_layer, of_matmuls)
        cheap = np.where(system.flash > 0, cheap, whole - self.tokens * self._scores)
        kept = np.where(plans.is_("recompute", "selective"), cheap, whole)
        return np.where(plans.is_("recompute", "full"), self.hidden_bytes, kept)

    @property
    def _stack(self) -> Numbers:
        """Elements of one matrix of all experts on a rank."""
        return self.work.experts * self.work.width * self.work.expert_ffn_width / self.plans.ep / self.expert_tp

    @cached_property
    def working(self) -> Numbers:
        """Bytes that the backward of the last layers needs beside what all keep: recomputed activations, new gradients.

        Those of the last layer, or of the last delta-net, when what the layers after it kept is gone.
        """
        after = self.work.delta_after
        is_again = (self.work.layers - 1) % self.plans.recompute_every == 0
        again = np.where(is_again, self._again(self._of_recomputed), 0.0)
        if not np.any(after > 0):
            return self._beside_lower + again
        of_delta = self.working_lower - after * (self.kept - self.moved)
        return np.where(after > 0, np.maximum(self._beside(False) + again, of_delta), self._beside_lower + again)

    @property
    def working_lower(self) -> Numbers:
        """Bytes that the backward of a layer below needs beside what the mean one keeps: it is recomputed as the mean
        layer is, as is the first, and has a delta-net if any has one."""
        return self._beside_lower + self._again(self.kept)

    @cached_property
    def _beside_lower(self) -> Numbers:
        return self._beside(True)

    def _again(self, kept: Numbers) -> Numbers:
        """Return the bytes of a recomputed layer that are computed again beside so many that were kept."""
        again = np.where(self.plans.is_("recompute", "none"), 0.0, np.maximum(0, self._of_layer - kept))
        # An eager layer keeps its input in fp32 alone, where it is computed again beside the one that was kept.
        has_both = self.eager & self.plans.is_("recompute", "full") & (self.activation_bytes < 4)
        return again + np.where(has_both, self.hidden_bytes, 0.0)

    def _beside(self, may_have_delta: bool) -> Numbers:
        """Return the bytes of a layer's backward beside those of its forward; may_have_delta: of a delta-net's, if the
        model has some.

        Eager, it is most at one of three operations after the gradient of the layer's result has come: the product of
        the last matrix, which gives gradients of its input and weight; the copy of the latter to fp32, when its input
        and its cast weight are gone; the gate, whose both operands get one.
        """
        plans, work = self.plans, self.work
        dense, routed = work.widest_ffn * (work.dense_layers > 0), work.experts_per_token * work.expert_ffn_width
        given = self.tokens * self.activation_bytes * work.width
        inside = self.tokens * self.activation_bytes * np.maximum(dense, routed) / plans.tp
        ups = np.where(routed > dense, work.expert_matrices, work.ffn_matrices) - 1
        between = may_have_delta * self.tokens * self.delta_between * (work.delta_layers > 0)
        # When a delta-net's is computed, what the feed-forward kept is gone.
        kept_inside = self._feed_forward(work.ffn_results, work.expert_results) * self.tokens * self.activation_bytes
        later = given + np.maximum(0.0, between - kept_inside)
        stack = self._stack
        widest = work.width * np.maximum(dense, work.heads * work.value_width) / plans.tp
        matrix = self.activation_bytes * np.maximum(
            work.width * dense / plans.tp * (work.trained_dense > 0), stack * (work.trained_experts > 0)
        )
        cast = np.where(self._are_matrices_cast, matrix, 0.0)
        copied = np.where(self.activation_bytes < 4, 4 / self.activation_bytes * matrix + matrix - cast, 0.0)
        # The gradients of a layer that FSDP2 shares wait for its last one.
        of_gate = ups * inside - cast + np.where(plans.shards_parameters, matrix, 0.0)
        eager = np.maximum(given + np.maximum(np.maximum(inside + matrix, copied), of_gate), later)
        # The gradient by way of the adapter waits for that by way of the weight, which is dequantised for it.
        packed = widest * (work.quantised_dense > 0), stack * (work.quantised_experts > 0)
        dequantised = self.activation_bytes * np.maximum(*packed)
        adapted = np.maximum(widest, stack * (work.adapter_experts_whole + work.adapter_experts_cut > 0))
        beside = given + np.maximum(inside + dequantised, self._of_adapter(given, inside, adapted, dequantised))
        eager = np.maximum(eager, np.where(self._has_adapter, beside, 0.0))
        # Compiled, beside an adapter a matrix is neither cast nor has a gradient; DoRA takes its lengths in fp32.
        as_held = self._has_adapter & (work.adapter_kept == 0) & (work.quantised_dense == 0)
        as_held = as_held & ~plans.is_("precision", "fp16") & ~plans.shards_parameters
        of_matrix = np.where(as_held, 0.0, widest * (self.activation_bytes + 4))
        of_matrix = np.maximum(of_matrix, stack * work.quantised_experts * self.activation_bytes)
        return np.where(self.eager, eager, between + 2 * given + 2 * inside + of_matrix)

    def _of_adapter(self, given: Numbers, inside: Numbers, widest: Numbers, dequantised: Numbers) -> Numbers:
        """Return the bytes of an eager adapter's forward that backward has computed again when it begins with it: the
        residual and the outputs of weight and adapter, of the latter before and after the scale, whose gradient waits;
        what dropout reads. DoRA squares the weight in fp32 for its lengths, in any forward."""
        work = self.work
        is_again = ~self.plans.is_("recompute", "none")
        dropped = np.where(np.asarray(work.dropped_whole + work.dropped_cut) > 0, inside, 0.0)
        has_lengths = np.asarray(work.adapter_kept) > 0
        plain = np.maximum(5 * given, 3 * given + dequantised)
        waiting = np.where(has_lengths, 4 * given + 8 * widest, plain)
        return np.where(is_again, waiting + dropped, np.where(has_lengths, 8 * widest, 0.0))
