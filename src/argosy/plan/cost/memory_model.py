"""How much memory a rank needs, by category, in closed form: for one plan, or for 100,000s in one go.

State is Rajbhandari et al. 2020 (`plan.cost.exact_state` has it to the byte, for one plan); activations are Korthikanti
et al. 2022 for unfused attention, without its score matrices where attention is tiled. With T tokens of a microbatch
on the rank, e bytes of an activation and everything cut by tp, a layer keeps for backward

    4 h + extra     input and output of both norms, and what the software keeps besides    (x T e)
    q, k, v, out    the attention's operands and result
    ffn             each matrix's output, the product of both if gated
    experts         k times as many rows, and their tokens before and after

of as many microbatches as the schedule has in flight. The first and the last pipeline rank are both looked at: one
has most microbatches in flight, the other the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from argosy.plan.cost.breakdown import Breakdown
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.rates import System
from argosy.plan.cost.workload import Numbers, Workload
from argosy.plan.layouts import Layouts

LOSS_CHUNK_LOGITS = 8 * 2**20
"""Logits that exist at once where the loss is computed in chunks (`models.loss`)."""
LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES_EAGER = 14, 22
"""Of each: in the arithmetic's format, in fp32 twice, its gradient; eager, intermediate results too."""
EAGER_WIDTHS, EAGER_FFN = 6, 1
"""What eager blocks keep beside what compiled ones would: norms' fp32 inputs and results; the gate's activation."""
DROPOUT_BYTES = 1


@dataclass(frozen=True)
class Footprint(Breakdown):
    """Bytes on the rank that needs most, at its peak; they add up to it."""

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    logits: Numbers
    gathered: Numbers
    """Parameters of the layers at work, where ranks share them, and gradients on their way."""
    workspace: Numbers
    """Kernels' and collectives' buffers."""
    reserve: Numbers
    """What the allocator holds without use."""


class MemoryModel:
    """The memory of plans for one workload, or for as many as there are plans."""

    def __init__(self, plans: Layouts, work: Workload, system: System, constants: Constants):
        self.p, self.w, self.s, self.c = plans, work, system, constants
        self.microbatches = np.maximum(1, work.global_batch / (plans.dp * plans.microbatch))
        self.tokens = plans.microbatch * work.seq_len / plans.cp
        self.element = np.where(plans.precision == 0, 4.0, 2.0)
        self.eager = plans.compile == 0
        self.shared = np.where(system.sequence_parallel > 0, plans.tp, 1)
        self.offloads_optimizer = plans.is_("offload", "optimizer", "all")
        self.offloads_activations = plans.is_("offload", "activations", "all")

    def predict(self) -> Footprint:
        """Bytes by category on the rank with the highest peak."""
        first, last = self._rank(first=True), self._rank(first=False)
        higher = last.total > first.total
        alone = self.p.pp == 1
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
        p, w, s, c = self.p, self.w, self.s, self.c
        dense, experts = self._parameters(self._layers)
        ends = (w.vocabulary_parameters / p.tp) * (np.where(w.tied > 0, 1, 2) if first and last else 1)
        n = p.shares_state
        expert_n = np.maximum(1, n / p.ep)
        whole = dense + ends + experts
        mine = (dense + ends) / n + experts / expert_n
        held = np.where(p.zero == 3, mine, whole)
        adds_up = (p.zero <= 1) | ((self.microbatches > 1) & (s.sums_once > 0))  # whole until all are summed over ranks
        summed = np.where(adds_up, whole, mine)
        weight_bytes = np.where(p.weights == 1, 2.0, s.weight_bytes)
        kept = self._in_flight(first, last) * self._kept
        activations = kept + self.working
        left = self._in_flight(first, last) * (self._kept - self.moved)
        activations = np.where(self.offloads_activations, left + self.working + 2 * self._of_layer, activations)
        logits = self._logits() if last else np.zeros(1)
        gathered = self._gathered(ends)
        comes_and_goes = activations + logits + gathered
        update = np.maximum(0.0, mine * s.update_bytes - comes_and_goes)  # when activations are gone
        first_held = s.checks_gradients * whole * s.gradient_bytes
        used = Footprint(
            weights=held * weight_bytes,
            gradients=first_held + self._beside(kept, summed * s.gradient_bytes, ends * s.gradient_bytes),
            optimizer=np.where(self.offloads_optimizer, 0.0, mine * s.moment_bytes + update),
            activations=activations,
            logits=logits,
            gathered=gathered,
            workspace=c.workspace_bytes + self._received(),
            reserve=np.zeros(1),
        )
        return Footprint(**{**vars(used), "reserve": c.fragmentation * (comes_and_goes + update)})

    @property
    def _layers(self) -> Numbers:
        """Layers of the fullest rank: the mean where they are dealt out by cost."""
        p = self.p
        full = np.ceil(self.w.layers / p.stages) * p.stages_here
        return np.where(self.s.balanced_stages > 0, self.w.layers / p.pp, full)

    def _beside(self, kept: Numbers, gradients: Numbers, of_ends: Numbers) -> Numbers:
        """Gradients at the peak: one microbatch's take the place of its activations, layer by layer."""
        alone = (self.microbatches <= 1) & (self.p.pp == 1) & (self.s.gradient_buffers == 0)
        return np.where(alone, np.minimum(gradients, of_ends) + np.maximum(0, gradients - of_ends - kept), gradients)

    def _parameters(self, layers: Numbers) -> tuple[Numbers, Numbers]:
        """Of so many layers after tensor and expert parallelism: those of all but experts, those of experts."""
        p, w = self.p, self.w
        moe = w.moe_layers / w.layers
        dense = w.attention_parameters + (1 - moe) * w.ffn_parameters + moe * w.shared_parameters
        cut = np.where(self.s.whole_experts > 0, 1, p.tp)
        whole = w.whole_parameters
        return layers * ((dense - whole) / p.tp + whole), layers * moe * w.expert_parameters / p.ep / cut

    @cached_property
    def _attention(self) -> Numbers:
        """Elements of a token: queries, keys, values, attention's result, and latents."""
        p, w = self.p, self.w
        queries, values = w.heads * w.key_width / p.tp, w.heads * w.value_width / p.tp
        kv = np.maximum(1, w.kv_heads / p.tp) * (w.key_width + w.value_width)
        latent = np.where(w.kv_rank > 0, 2 * (w.q_rank + w.kv_rank) + w.rope_width, 0)
        return queries + kv + values + latent

    @cached_property
    def _scores(self) -> Numbers:
        """Bytes of a token: scores and their softmax where attention is not tiled, else its log-sum-exp."""
        p, w, s = self.p, self.w, self.s
        heads = w.heads / p.tp
        return np.where(s.flash > 0, 4 * heads, (self.element + 3 * s.dropout) * heads * w.seq_len)

    def _feed_forward(self, matrices: Numbers) -> Numbers:
        """Elements of a token: so many results as wide as the feed-forward, or as its experts; the mean over layers."""
        p, w = self.p, self.w
        moe, k = w.moe_layers / w.layers, w.experts_per_token
        mixture = k * (2 * w.width + matrices * w.expert_ffn_width) / p.tp + matrices * w.shared_ffn_width / p.tp
        return (1 - moe) * matrices * w.ffn_width / p.tp + moe * (mixture + 4 * w.experts / self.shared)

    @cached_property
    def _of_layer(self) -> Numbers:
        """Bytes that one layer keeps of one microbatch, nothing recomputed; the mean over layers."""
        w, s = self.w, self.s
        wider = np.where(self.eager, EAGER_WIDTHS - s.kept_widths, 0) * w.width / self.shared
        ffn = self._feed_forward(w.ffn_matrices + EAGER_FFN * self.eager) - self._feed_forward(w.ffn_matrices)
        return self._fused_layer + self.tokens * (wider + ffn) * self.element + self._casts

    @cached_property
    def _fused_layer(self) -> Numbers:
        """Bytes that one layer of fused operations keeps."""
        w, s = self.w, self.s
        hidden = (4 + s.kept_widths) * w.width / self.shared + self._inputs
        elements = hidden + self._attention + self._feed_forward(w.ffn_matrices)
        masks = s.dropout * 2 * DROPOUT_BYTES * w.width / self.shared
        return self.tokens * (elements * self.element + masks + self._scores)

    @cached_property
    def _inputs(self) -> Numbers:
        """Elements of a token: both norms' outputs, gathered from tensor-parallel ranks and kept so."""
        return np.where(self.s.gathers_again > 0, 0, 2 * self.w.width * (1 - 1 / self.shared))

    @cached_property
    def _casts(self) -> Numbers:
        """Bytes of a layer's weights in the format of the arithmetic: eager autograd keeps these copies too."""
        p = self.p
        is_cast = self.eager & (p.precision > 0) & (p.weights == 0) & ~((p.zero == 3) & (p.dp_shard * p.cp > 1))
        return np.where(is_cast, sum(self._parameters(1.0)) * self.element, 0.0)

    @cached_property
    def moved(self) -> Numbers:
        """Bytes of a layer and microbatch that go to the host: what it keeps, or of a recomputed layer its input."""
        p = self.p
        boundary = self.tokens * self.w.width / self.shared * self.element
        whole, again = self._of_layer - self._casts, np.where(p.recompute > 0, 1 / p.recompute_every, 0.0)
        return np.where(self.offloads_activations, again * boundary + (1 - again) * whole, 0.0)

    @cached_property
    def _kept(self) -> Numbers:
        """Bytes that one layer keeps until backward, with the plan's recompute."""
        p, w, s = self.p, self.w, self.s
        whole = self._of_layer
        boundary = self.tokens * w.width / self.shared * self.element
        results = 3 * w.width / self.shared + self._inputs + self._attention + self._feed_forward(w.ffn_matrices - 1)
        of_matmuls = self.tokens * (results * self.element + self._scores)
        cheap = np.where(s.selective > 0, s.selective * self._fused_layer, of_matmuls)
        cheap = np.where(s.flash > 0, cheap, whole - self.tokens * self._scores)
        kept = np.where(p.recompute == 2, boundary, np.where(p.recompute == 1, cheap, whole))
        return kept / p.recompute_every + whole * (1 - 1 / p.recompute_every)

    def _in_flight(self, first: bool, last: bool) -> Numbers:
        """Layers' activations that are alive at once: microbatches of the schedule times layers of the rank."""
        p, m, layers = self.p, self.microbatches, self._layers
        v = p.stages_here
        at_once = np.minimum(m, p.pp if first else 1)
        chunks = 2 * (p.pp - 1) + (v - 1) * p.pp + 1 if first else (v - 1) * p.pp + 1
        interleaved = np.minimum(m, chunks / v)
        both_ways = np.minimum(m, (2 * p.pp + 1) / 2)
        microbatches = np.where(p.is_("schedule", "gpipe"), m, at_once)
        microbatches = np.where(
            p.is_("schedule", "interleaved_1f1b", "interleaved_zero_bubble"), interleaved, microbatches
        )
        microbatches = np.where(p.is_("schedule", "zbv", "dualpipev"), both_ways, microbatches)
        return np.where(p.pp == 1, 1, microbatches) * layers

    @cached_property
    def working(self) -> Numbers:
        """What backward of one layer needs beside what was kept: recomputed activations, gradients on their way."""
        p, w = self.p, self.w
        again = np.where(p.recompute > 0, np.maximum(0, self._of_layer - self._kept), 0.0)
        expert = w.experts_per_token * w.expert_ffn_width
        widest = np.maximum(w.ffn_width * (w.dense_layers > 0), expert) / p.tp
        matrix = w.width * np.maximum(w.ffn_width * (w.dense_layers > 0) / p.tp, w.heads * w.value_width / p.tp)
        return again + self.tokens * self.element * (2 * w.width + 2 * widest) + matrix * (self.element + 4)

    def _received(self) -> Numbers:
        """A pipeline's buffers: what a rank's stages receive from their neighbours, for each microbatch of the step."""
        p = self.p
        hidden = self.tokens * self.w.width / self.shared * self.element
        boundaries = np.where(p.pp > 1, 2 * p.stages_here - 1, 0) * (self.s.receives_ahead > 0)
        return self.microbatches * boundaries * hidden

    def _logits(self) -> Numbers:
        p, w, s = self.p, self.w, self.s
        whole = self.tokens * w.vocab_size / p.tp
        of_logit = np.where(self.eager, LOSS_CHUNK_BYTES_EAGER, LOSS_CHUNK_BYTES)
        chunk = np.minimum(whole, LOSS_CHUNK_LOGITS) * of_logit
        saved = (4 + self.element) * w.vocabulary_parameters / p.tp + self.tokens * w.width * self.element
        return np.where(s.whole_logits > 0, whole * s.whole_logits, saved + np.maximum(0, chunk - self.working))

    def _gathered(self, ends: Numbers) -> Numbers:
        """Stage 3: parameters that ranks share are whole while they are used, and gradients until they are summed.

        Those of two layers, or of all of a pipeline rank's, whose stages give none up after a backward.
        """
        p = self.p
        of_layer, layers = sum(self._parameters(1.0)), self._layers
        adds_up = (self.microbatches > 1) & (self.s.sums_once > 0)
        parameters = np.where(p.pp > 1, layers, np.minimum(2, layers)) * of_layer
        moving = parameters * self.element + np.where(adds_up, 0, (of_layer + ends) * self.s.gradient_bytes)
        return np.where((p.zero == 3) & (p.dp_shard * p.cp > 1), moving, 0.0)
