"""The memory of a rank by category, estimated in closed form: for one plan, or for 100,000s at once.

The state follows Rajbhandari et al. 2020 (`plan.cost.exact_state` counts it to the byte, for one plan). Activations
follow Korthikanti et al. 2022 for unfused attention, without its score matrices if attention is tiled. With T tokens of
a microbatch on the rank, e bytes of an activation and everything cut by tp, a layer keeps for backward

    4 h + extra     input and output of both norms, and what the software keeps more       (x T e)
    q, k, v, out    the attention's operands and result
    ffn             each matrix's output, the product of both if gated
    experts         k times as many rows, and their tokens before and after
    delta-net       its streams and result; all between comes and goes in backward (`_delta_between`)

for as many microbatches as the schedule has in flight. Both the first and the last pipeline rank are computed: the one
has most microbatches in flight, the other has the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.breakdown import OF_MEMORY, Breakdown, RankSizes
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.network import Compression
from argosy.plan.cost.rates import System
from argosy.plan.layer_spec import DELTA_CHUNK
from argosy.plan.layouts import Layouts
from argosy.plan.pipeline import INTERLEAVED
from argosy.plan.workload import Numbers, Workload

LOSS_CHUNK_LOGITS = 8 * 2**20
"""Logits that exist at once if the loss is computed in chunks (`models.loss`)."""
LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES_EAGER = 14, 21
"""Bytes of each: once in the arithmetic's format, twice in fp32, and its gradient; eager, also what lies between."""
KEPT_FLOPS_PER_BYTE = 8
"""As `parallel.recompute`: selective recompute keeps results that cost more to compute again, an adapter's too."""
DROPOUT_BYTES = 1


@dataclass(frozen=True)
class Footprint(Breakdown):
    """Bytes at the peak of the rank that needs most; the categories add up to it."""

    parts = OF_MEMORY

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    logits: Numbers
    gathered: Numbers
    """Parameters of the layers at work, if ranks share them, and gradients that are not summed yet."""
    agreement: Numbers
    """State that replicas or sites keep to agree in fewer bytes: residuals, outer weights and momentum."""
    workspace: Numbers
    """Buffers of kernels and collectives, what compiling takes, and the copies for a checkpoint."""
    reserve: Numbers
    """Memory that the allocator holds unused."""


class MemoryModel(RankSizes):
    """The memory of plans, for one workload or for as many as there are plans."""

    def __init__(
        self,
        plans: Layouts,
        work: Workload,
        system: System,
        constants: Constants,
        compression: Compression = Compression(),  # noqa: B008  (frozen)
    ):
        super().__init__(plans, work, system)
        self.constants, self.compression = constants, compression
        self.eager = plans.is_("compile", False)
        self.offloads_optimizer = plans.is_("offload", "optimizer", "all")
        self.offloads_activations = plans.is_("offload", "activations", "all")

    def predict(self) -> Footprint:
        """Return the bytes by category, on the rank with the highest peak."""
        first, last = self._rank(first=True), self._rank(first=False)
        higher = last.total > first.total
        alone = self.plans.pp == 1
        both = self._rank(first=True, last=True)
        return Footprint(
            **{
                f.name: np.where(
                    alone, getattr(both, f.name), np.where(higher, getattr(last, f.name), getattr(first, f.name))
                )
                for f in fields(Footprint)
            }
        )

    def _rank(self, first: bool, last: bool | None = None) -> Footprint:
        last = not first if last is None else last
        plans, work, system, constants = self.plans, self.work, self.system, self.constants
        layers = self._layers + last * work.further
        dense, experts = self.parameters(layers)
        vocabulary = work.vocabulary_parameters / plans.tp
        has_head = float(last) if not first else last * np.where(work.tied > 0, 0.0, 1.0)
        # Multi-token prediction looks tokens up on the last stage as well.
        looks_up = np.where((work.further > 0) & (work.tied == 0), float(last and not first), 0.0)
        projections = last * work.further_parameters
        ends = vocabulary * (first + has_head + looks_up) + projections
        trained_ends = vocabulary * ((first + looks_up) * work.trained_embedding + has_head * work.trained_head)
        trained_ends = trained_ends + projections * work.trained_dense
        whole, share = dense + ends + experts, self._shared(dense + ends, experts)
        held = np.where(plans.zero == 3, share, whole)
        beside, beside_experts = self.adapters(layers)
        dense = dense * work.trained_dense + beside
        experts = experts * work.trained_experts + beside_experts
        trained = dense + trained_ends + experts
        mine = self._shared(dense + trained_ends, experts)
        summed = np.where((plans.zero <= 1) | self._adds_up, trained, mine)
        weight_bytes = np.where(plans.is_("weights", "bf16"), 2.0, system.weight_bytes)
        adapter = np.where(plans.zero == 3, self._shared(beside, beside_experts), beside + beside_experts)
        base_bytes = np.where(self._has_adapter & ~plans.is_("precision", "fp32", "fp16"), 2.0, weight_bytes)
        packed_dense, packed_experts = self.quantised(layers)
        packed = np.where(plans.zero == 3, self._shared(packed_dense, packed_experts), packed_dense + packed_experts)
        saved = np.where(self._has_adapter, self._shared(beside, beside_experts), share)
        in_flight = self._in_flight(first, layers)
        left = work.reached * in_flight * (self._kept - self.moved)
        kept = np.where(self.offloads_activations, left + 2 * self._of_layer, work.reached * in_flight * self._kept)
        if not last:
            kept = kept + np.where(plans.pp > 1, self._outputs(in_flight / layers), 0.0)
        if first:
            kept = kept - self._not_normed * in_flight / layers
        gathered = self._gathered(trained_ends, layers)
        in_sum = summed / np.maximum(trained, 1) * system.gradient_bytes
        of_head = in_sum * vocabulary * work.trained_head * last
        of_embedding = in_sum * vocabulary * work.trained_embedding * first
        moments = self._moments(kept, layers, summed * system.gradient_bytes, of_head, of_embedding, bool(last))
        activations, logits, gradients = _highest(moments)
        comes_and_goes = activations + logits + gathered
        # The optimizer's step begins when activations are gone.
        update = np.maximum(0.0, mine * system.update_bytes - comes_and_goes)
        first_held = system.checks_gradients * trained * system.gradient_bytes
        used = Footprint(
            weights=(held - packed) * base_bytes + packed * work.quantised_bytes + adapter * weight_bytes,
            gradients=first_held + gradients,
            optimizer=np.where(self.offloads_optimizer, 0.0, mine * system.moment_bytes + update),
            activations=activations,
            logits=logits,
            gathered=gathered,
            agreement=self._agreement(trained, mine),
            workspace=constants.workspace_bytes
            + np.where(self.eager, 0.0, system.compiler_bytes)
            + self._received()
            + system.saves_here * self._saved(saved, mine, weight_bytes),
            reserve=np.zeros(1),
        )
        return Footprint(**{**vars(used), "reserve": constants.fragmentation * (comes_and_goes + update)})

    @property
    def _layers(self) -> Numbers:
        """Layers of the fullest rank: what the plan says, or the mean, if they are dealt out by cost; without those of
        multi-token prediction, which the last stage has."""
        plans, dealt = self.plans, self.work.layers - self.work.further
        full = np.ceil(dealt / plans.stages) * plans.stages_here
        usual = np.where(self.system.balanced_stages > 0, dealt / plans.pp, full)
        said = plans.most_layers
        return np.where(said > 0, said, usual)

    @property
    def _has_adapter(self) -> NDArray[np.bool_]:
        return np.asarray(self.work.adapter_rank) > 0

    @property
    def _adds_up(self) -> NDArray[np.bool_]:
        """True where gradients of several microbatches add up on the rank before they are summed over ranks."""
        return np.asarray((self.microbatches > 1) & (self.system.sums_once > 0))

    def _moments(
        self, kept: Numbers, layers: Numbers, gradients: Numbers, of_head: Numbers, of_embedding: Numbers, last: bool
    ) -> list[tuple[Numbers, Numbers, Numbers]]:
        """Return activations, what the loss needs, and gradients at the moments of a step one of which is its peak.

        kept: of all layers in flight; gradients: of all that is trained, of which the head's come first, and the
        embedding's last. A step of one microbatch makes them while it gives its activations up. All later ones add to
        them, so that a new one of head or embedding is there for a moment beside the sum.
        """
        work, hidden = self.work, self.tokens * self.work.width / self.sequence_ranks
        alone = (self.microbatches <= 1) & (self.plans.pp == 1) & (self.system.gradient_buffers == 0)
        loss, waiting = self._loss() if last else (np.zeros(1), np.zeros(1))
        is_once = alone & (work.tied == 0)
        return [
            (kept, loss, np.where(alone, 0.0, gradients)),
            (kept + self.working, waiting, np.where(alone, of_head, gradients)),
            (
                kept / np.maximum(1, work.reached * layers) + self.working,
                np.zeros(1),
                gradients - np.where(is_once, of_embedding, 0.0),
            ),
            (hidden * (self.activation_bytes + 4) + np.where(is_once, 0.0, of_embedding), np.zeros(1), gradients),
        ]

    def _outputs(self, microbatches: Numbers) -> Numbers:
        """Return the bytes of the hidden states that a rank's stages have sent on, and keep until their backward
        (torch.distributed.pipelining)."""
        return (self.system.receives_ahead > 0) * microbatches * self.plans.stages_here * self.hidden_bytes

    @cached_property
    def _attention(self) -> Numbers:
        """Elements for a token: queries, keys, values, the result of attention, and latents."""
        plans, work = self.plans, self.work
        queries, values = work.heads * work.key_width / plans.tp, work.heads * work.value_width / plans.tp
        kv = work.kv_heads_on(plans.tp) * work.kv_width
        latent = np.where(work.kv_rank > 0, 2 * (work.q_rank + work.kv_rank) + work.rope_width, 0)
        attention = queries + work.gates * values + kv + values + latent
        of_result = np.where(self.eager, 2 + 16 / self.activation_bytes, 3) * work.delta_heads * work.delta_value_width
        return (1 - work.delta_share) * attention + work.delta_share * (work.delta_streams + of_result) / plans.tp

    @cached_property
    def _delta_between(self) -> Numbers:
        """Bytes for a token between the streams and the result of a gated delta-net, that backward computes again.

        The factors are counted from autograd's saved tensors of `models.delta_net`: fp32 copies by heads, operands of
        matrix products, chunks' matrices, and a state for each chunk.
        """
        work, e = self.work, self.activation_bytes
        keys, values = work.delta_key_heads * work.delta_key_width, work.delta_heads * work.delta_value_width
        between = (48 + 7 * e) * keys + (30 + 6.5 * e) * values + 10 * work.delta_heads * work.delta_key_width
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

    def _feed_forward(self, matrices: Numbers) -> Numbers:
        """Return the elements for a token of `matrices` results in the feed-forward; the mean over layers."""
        plans, work = self.plans, self.work
        moe = work.moe_layers / work.layers
        routed = work.experts_per_token * (2 * work.width + matrices * work.expert_ffn_width) / plans.tp
        shared = matrices * work.shared_ffn_width / plans.tp
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
        ffn = self._feed_forward(work.ffn_results) - self._feed_forward(work.ffn_matrices)
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
        elements = hidden + self._attention + self._feed_forward(work.ffn_matrices)
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
        return np.where(self.eager & self._is_cast, cast * self.activation_bytes, 0.0)

    @cached_property
    def _is_cast(self) -> NDArray[np.bool_]:
        """True where weights are cast to the format of the arithmetic by the modules that use them."""
        plans = self.plans
        is_cast = ~plans.is_("precision", "fp32") & plans.is_("weights", "fp32") & ~plans.shards_parameters
        return np.asarray(is_cast & (~self._has_adapter | plans.is_("precision", "fp16")))

    @cached_property
    def moved(self) -> Numbers:
        """Bytes of a layer and microbatch that go to the host: what it keeps, or a recomputed layer's input."""
        plans = self.plans
        whole = self._of_layer - self._casts
        again = np.where(plans.is_("recompute", "none"), 0.0, 1 / plans.recompute_every)
        return np.where(self.offloads_activations, again * self.hidden_bytes + (1 - again) * whole, 0.0)

    @cached_property
    def _kept(self) -> Numbers:
        """Bytes that one layer keeps until backward, with the plan's recompute."""
        plans, work, system = self.plans, self.work, self.system
        whole = self._of_layer
        hidden = 3 * work.width / self.sequence_ranks + self._inputs
        results = hidden + self._attention + self._feed_forward(work.ffn_matrices - 1)
        is_dear = 2 * work.adapter_rank / self.activation_bytes > KEPT_FLOPS_PER_BYTE
        results = results + np.where(is_dear, work.adapter_outputs / plans.tp, 0)
        of_matmuls = self.tokens * (results * self.activation_bytes + self._scores + self._delta_results)
        cheap = np.where(system.selective > 0, system.selective * self._fused_layer, of_matmuls)
        cheap = np.where(system.flash > 0, cheap, whole - self.tokens * self._scores)
        kept = np.where(plans.is_("recompute", "selective"), cheap, whole)
        kept = np.where(plans.is_("recompute", "full"), self.hidden_bytes, kept)
        return kept / plans.recompute_every + whole * (1 - 1 / plans.recompute_every)

    def _in_flight(self, first: bool, layers: Numbers) -> Numbers:
        """Return the layers whose activations are alive at once: microbatches in flight times layers of the rank."""
        plans, stages = self.plans, self.plans.stages_here
        chunks = 2 * (plans.pp - 1) + (stages - 1) * plans.pp + 1 if first else (stages - 1) * plans.pp + 1
        at_most = np.where(plans.is_("schedule", "gpipe"), self.microbatches, plans.pp if first else 1)
        at_most = np.where(plans.is_("schedule", *INTERLEAVED), chunks / stages, at_most)
        at_most = np.where(plans.is_("schedule", "zbv", "dualpipev"), (2 * plans.pp + 1) / 2, at_most)
        return np.where(plans.pp == 1, 1, np.minimum(self.microbatches, at_most)) * layers

    @cached_property
    def working(self) -> Numbers:
        """Bytes that a layer's backward needs beside what was kept: recomputed activations, new gradients.

        Eager, it is most at one of three operations after the gradient of the layer's result has come: the product of
        the last matrix, which gives gradients of its input and weight; the copy of the latter to fp32, when its input
        and its cast weight are gone; the gate, whose both operands get one.
        """
        plans, work = self.plans, self.work
        again = np.where(plans.is_("recompute", "none"), 0.0, np.maximum(0, self._of_layer - self._kept))
        dense, routed = work.widest_ffn * (work.dense_layers > 0), work.experts_per_token * work.expert_ffn_width
        given = self.tokens * self.activation_bytes * work.width
        inside = self.tokens * self.activation_bytes * np.maximum(dense, routed) / plans.tp
        between = self.tokens * self._delta_between * (work.delta_layers > 0)
        # When a delta-net's is computed, what the feed-forward kept is gone.
        kept_inside = self.tokens * self.activation_bytes * self._feed_forward(work.ffn_results)
        later = given + np.maximum(0.0, between - kept_inside)
        stack = work.experts * work.width * work.expert_ffn_width / plans.ep / self.expert_tp
        widest = work.width * np.maximum(dense, work.heads * work.value_width) / plans.tp
        matrix = self.activation_bytes * np.maximum(
            work.width * dense / plans.tp * (work.trained_dense > 0), stack * (work.trained_experts > 0)
        )
        cast = np.where(self._is_cast, matrix, 0.0)
        copied = np.where(self.activation_bytes < 4, 4 / self.activation_bytes * matrix + matrix - cast, 0.0)
        of_gate = (work.ffn_matrices - 1) * inside - cast
        eager = np.maximum(given + np.maximum(np.maximum(inside + matrix, copied), of_gate), later)
        fused = 2 * given + 2 * inside
        # Beside an adapter a matrix is neither cast nor has a gradient; DoRA takes its lengths in fp32.
        as_held = self._has_adapter & (work.adapter_kept == 0) & (work.quantised_dense == 0)
        as_held = as_held & ~plans.is_("precision", "fp16") & ~plans.shards_parameters
        of_matrix = np.where(as_held, 0.0, widest * (self.activation_bytes + 4))
        of_matrix = np.maximum(of_matrix, stack * work.quantised_experts * self.activation_bytes)
        return again + np.where(self.eager & ~self._has_adapter, eager, between + fused + of_matrix)

    def _received(self) -> Numbers:
        """Return the bytes that a rank's stages receive, for each microbatch of the step, and hold in buffers."""
        plans = self.plans
        boundaries = np.where(plans.pp > 1, 2 * plans.stages_here - 1, 0) * (self.system.receives_ahead > 0)
        return self.microbatches * boundaries * self.hidden_bytes

    def _agreement(self, whole: Numbers, mine: Numbers) -> Numbers:
        """Return the bytes that replicas, or sites, keep to agree in fewer bytes."""
        summed = np.where(self.plans.zero == 0, whole, mine) / (self.plans.sum_inside * self.plans.sum_between)
        return self.compression.kept_bytes(self.plans, summed, mine)

    def _shared(self, dense: Numbers, experts: Numbers) -> Numbers:
        """Return a rank's part of the state of so many parameters (ZeRO)."""
        plans = self.plans
        return dense / plans.shares_state + experts / np.maximum(1, plans.shares_state / plans.ep)

    def _saved(self, held: Numbers, trained: Numbers, weight_bytes: Numbers) -> Numbers:
        """Return the bytes that a rank copies for a checkpoint: of what several ranks hold, each copies a part."""
        return (held * weight_bytes + trained * self.system.moment_bytes) / self.plans.replicas

    def _loss(self) -> tuple[Numbers, Numbers]:
        """Return the bytes that the loss needs beside what layers keep, and those of them that are left when the
        backward of the last layer begins: gradients of modules that predict further tokens wait for theirs.

        Forward makes the gradients, in chunks (`models.loss`): the weight's in fp32, to which each chunk adds a product
        in the arithmetic's format. Backward multiplies both, and then the last norm has its own, of five hidden states
        in fp32.
        """
        plans, work, system, element = self.plans, self.work, self.system, self.activation_bytes
        hidden, matrix = self.tokens * work.width, work.width * work.head_outputs / plans.tp
        whole = self.tokens * work.head_outputs / plans.tp
        chunk = np.minimum(whole, LOSS_CHUNK_LOGITS)
        gradients = 4 * work.trained_head * matrix + element * hidden
        arithmetic = chunk * np.where(self.eager, LOSS_CHUNK_BYTES_EAGER, LOSS_CHUNK_BYTES)
        product = (work.trained_head * matrix + 2 * chunk) * element
        cast = np.where(self._is_cast, matrix * element, 0.0)
        forward = gradients + cast + np.maximum(arithmetic, product) + element * hidden
        norm = 4 * (1 + work.scaled_norms) * hidden / self.sequence_ranks
        of_norm = (4 * 5 * hidden) / self.sequence_ranks
        waiting = work.further * gradients
        loss = waiting + norm + np.maximum(np.maximum(forward, 2 * gradients), of_norm)
        is_whole, logits = system.whole_logits > 0, whole * system.whole_logits
        return np.where(is_whole, logits, loss), np.where(is_whole, logits, waiting)

    def _gathered(self, trained_ends: Numbers, layers: Numbers) -> Numbers:
        """Return the bytes of stage 3: parameters are whole while they are used, gradients until they are summed.

        They are those of two layers, or of all layers of a pipeline rank, because its stages give up none after a
        backward.
        """
        plans = self.plans
        dense, experts = self.parameters(1.0)
        packed = sum(self.quantised(1.0))
        gathered = (dense + experts - packed) * self.activation_bytes + packed * self.work.quantised_bytes
        gathered = np.where(plans.pp > 1, layers, np.minimum(2, layers)) * gathered
        trained = dense * self.work.trained_dense + experts * self.work.trained_experts + trained_ends
        trained = trained + sum(self.adapters(1.0))
        gradients = np.where(self._adds_up, 0, trained * self.system.gradient_bytes)
        return np.where(plans.shards_parameters, gathered + gradients, 0.0)


def _highest(moments: Sequence[tuple[Numbers, ...]]) -> tuple[NDArray[Any], ...]:
    """Return the figures of each plan's moment whose sum is highest."""
    figures = np.stack([np.stack(np.broadcast_arrays(*moment)) for moment in _alike(moments)])
    best = figures.sum(1).argmax(0)
    return tuple(np.take_along_axis(figures, best[None, None], 0)[0])


def _alike(moments: Sequence[tuple[Numbers, ...]]) -> list[tuple[NDArray[Any], ...]]:
    flat = np.broadcast_arrays(*(figure for moment in moments for figure in moment))
    each = len(moments[0])
    return [tuple(flat[i : i + each]) for i in range(0, len(flat), each)]
