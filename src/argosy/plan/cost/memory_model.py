"""The memory of a rank by category, estimated in closed form: for one plan, or for 100,000s at once.

The state follows Rajbhandari et al. 2020 (`plan.cost.exact_state` counts it to the byte, for one plan). Activations of
a layer are those of `plan.cost.layer_memory`, for as many microbatches as the schedule has in flight. The peak is the
highest of a few moments of a step (`MemoryModel._moments`). The first and the last pipeline rank are computed, and
the first that has more layers: one has most microbatches in flight, the other has the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.plan.cost.breakdown import MEMORY_FACTORS, Breakdown
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.layer_memory import LayerMemory
from argosy.plan.cost.network import Compression
from argosy.plan.cost.rates import System
from argosy.plan.layer_spec import CHUNK_LOGITS, FROZEN_CHUNK_ROWS
from argosy.plan.layouts import Layouts
from argosy.plan.pipeline import INTERLEAVED, V_SHAPED, last_stage_layers
from argosy.plan.sync import SUMS_AHEAD
from argosy.plan.workload import Numbers, Workload

ROUNDED_BYTES_EAGER = 16, 32
"""Bytes for an element that is rounded at random to bf16, or to eight bits, besides itself in fp32; its own if a kernel
is compiled."""
LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES_EAGER = 14, 18
"""Bytes of each: once in the arithmetic's format, twice in fp32, and its gradient; eager, also what lies between."""


@dataclass(frozen=True)
class Footprint(Breakdown):
    """Bytes at the peak of the rank that needs most; the categories add up to it. `plan.report.explain.MEMORY_MEANING`
    says what each is."""

    parts = MEMORY_FACTORS

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    logits: Numbers
    gathered: Numbers
    agreement: Numbers
    workspace: Numbers
    reserve: Numbers


class MemoryModel(LayerMemory):
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
        self.offloads_optimizer = plans.is_("offload", "optimizer", "all")

    def predict(self) -> Footprint:
        """Return the bytes by category, on the rank with the highest peak."""
        plans = self.plans
        if np.all(plans.pp == 1):
            return self.on_rank(first=True, last=True)
        found = [self.on_rank(first=True), self.on_rank(first=False)]
        if np.any(self.place_between > 0):
            found.append(self.on_rank(first=False, last=False))
        highest = np.stack(np.broadcast_arrays(*(rank.total for rank in found))).argmax(0)
        if np.any(plans.pp == 1):
            found.append(self.on_rank(first=True, last=True))
            highest = np.where(plans.pp == 1, len(found) - 1, highest)
        return Footprint(
            **{f.name: np.choose(highest, [getattr(rank, f.name) for rank in found]) for f in fields(Footprint)}
        )

    def on_rank(self, first: bool, last: bool | None = None) -> Footprint:
        """Return the bytes on the first pipeline rank, on the last one (usually the other), or on one between."""
        last = not first if last is None else last
        plans, work, system, constants = self.plans, self.work, self.system, self.constants
        layers = self.layers_on(first, last) + last * work.further
        dense, experts = self.parameters(layers)
        vocabulary = work.vocabulary_parameters / plans.tp
        has_head = (last if not first else last * np.where(work.tied > 0, 0.0, 1.0)) * (1 - work.scored)
        # Multi-token prediction looks tokens up on the last stage as well.
        looks_up = np.where((work.further > 0) & (work.tied == 0), float(last and not first), 0.0)
        projections = last * work.further_parameters
        ends = vocabulary * (first + has_head + looks_up) + projections
        trained_words = vocabulary * ((first + looks_up) * work.trained_embedding + has_head * work.trained_head)
        trained_ends = trained_words + projections * work.trained_dense
        share = self._shared(dense + ends, experts)
        held = np.where(plans.zero == 3, share, dense + ends + experts)
        beside, beside_experts = self.adapters(layers)
        reached = self._reached(first, last, layers)
        dense = dense * self._trained(work.trained_dense, reached) + beside
        experts = experts * self._trained(work.trained_experts, reached) + beside_experts
        trained, mine = dense + trained_ends + experts, self._shared(dense + trained_ends, experts)
        moment_bytes = mine * system.moment_bytes + self._shared(trained_words, 0.0) * system.ends_moment_bytes
        summed = np.where((plans.zero <= 1) | self._adds_up, trained, mine)
        weight_bytes = self.weight_bytes
        adapter = np.where(plans.zero == 3, self._shared(beside, beside_experts), beside + beside_experts)
        base_bytes = np.where(self._has_adapter & ~plans.is_("precision", "fp32", "fp16"), 2.0, weight_bytes)
        packed_dense, packed_experts = self.quantised(layers)
        packed = np.where(plans.zero == 3, self._shared(packed_dense, packed_experts), packed_dense + packed_experts)
        saved = np.where(self._has_adapter, self._shared(beside, beside_experts), share)
        in_flight = self.in_flight(first, last, layers)
        # Of what goes to the host, one layer's is on its way there, or back.
        kept = reached * in_flight * (self.kept - self.moved) + self.moved
        if not last:
            kept = kept + np.where(plans.pp > 1, self._outputs(in_flight / layers), 0.0)
        if first:
            kept = kept - self._not_normed * in_flight / layers
        in_sum = summed / np.maximum(trained, 1) * self.gradient_bytes
        of_head = in_sum * vocabulary * work.trained_head * last * (1 - work.scored)
        of_embedding = in_sum * vocabulary * work.trained_embedding * first
        of_loss, of_layers = self._gathered(ends, trained_ends, vocabulary * work.trained_head * last, layers)
        # FSDP2 adds up whole gradients in the format in which it sums them over ranks.
        in_fsdp = plans.shards_parameters & self._adds_up
        held_gradients = summed * np.where(in_fsdp, self.reduced_bytes, self.gradient_bytes)
        moments = self._moments(
            kept,
            reached * layers,
            held_gradients,
            of_head,
            of_embedding,
            self._sent(dense + trained_ends, experts),
            bool(last),
        )
        whole = (of_loss, of_layers, of_layers, of_loss)
        zero, words = np.zeros(1), (trained_words > 0) * vocabulary
        # The optimizer's step begins when activations are gone.
        left = (mine + trained * ((plans.zero == 1) & (plans.shares_state > 1))) * self.gradient_bytes
        opened = np.maximum(self._opened(words), self._orthogonal())
        step = zero, zero, left, zero, mine * system.update_bytes + opened
        of_step = [(*moment, some, zero) for moment, some in zip(moments, whole, strict=True)]
        activations, logits, gradients, gathered, update = _highest([*of_step, step], constants.fragmentation)
        comes_and_goes = activations + logits + gathered
        first_held = system.checks_gradients * trained * self.gradient_bytes
        used = Footprint(
            weights=(held - packed) * base_bytes + packed * work.quantised_bytes + adapter * weight_bytes,
            gradients=first_held + gradients,
            optimizer=np.where(self.offloads_optimizer, 0.0, moment_bytes),
            activations=activations,
            logits=logits,
            gathered=gathered,
            agreement=self._agreement(trained, mine),
            workspace=constants.workspace_bytes
            + update
            + self._received()
            + system.saves_here
            * (saved * weight_bytes + np.maximum(moment_bytes, mine * system.widened_bytes))
            / plans.replicas,
            reserve=np.zeros(1),
        )
        return Footprint(**{**vars(used), "reserve": constants.fragmentation * (comes_and_goes + update)})

    def layers_on(self, first: bool, last: bool) -> Numbers:
        """Return the layers of the first pipeline rank, of the last one, or of the first that has more than the first:
        what the plan says of the fullest, or as they are dealt out by cost; without those of multi-token prediction,
        which the last stage has."""
        plans, each, dealt = self.plans, self._stages_here, self.work.layers - self.work.further
        place = 0 if first else plans.pp - 1 if last else self.place_between
        # Stages before the last one have a layer more from the first of those with more on.
        of_more = each - np.clip(np.ceil((self._first_of_more - place) / plans.pp), 0, each)
        others = self._fewest * (each - last) + of_more - last
        by_cost = np.maximum(each, others + last * (dealt - self._before_last))
        full = np.ceil(dealt / self._stages) * each
        is_v = plans.is_("schedule", *V_SHAPED)
        usual = np.where(self.system.balanced_stages > 0, np.where(is_v, dealt / plans.pp, by_cost), full)
        return np.where(self._said > 0, self._said, np.where(plans.pp == 1, dealt, usual))

    @cached_property
    def _said(self) -> Numbers:
        """Layers of the fullest rank, where the plan says which stage has which; else 0."""
        return self.plans.most_layers

    @cached_property
    def _stages_here(self) -> Numbers:
        return self.plans.stages_here

    @cached_property
    def _stages(self) -> NDArray[Any]:
        return self.plans.pp * self._stages_here

    @cached_property
    def _fewest(self) -> Numbers:
        """Layers of a stage that has fewest, the last one left out."""
        return np.floor(self._before_last / np.maximum(1, self._stages - 1))

    @cached_property
    def _first_of_more(self) -> Numbers:
        """The first stage that has a layer more; the last one, if none has."""
        before = np.maximum(1, self._stages - 1)
        return before - (self._before_last - before * self._fewest)

    @cached_property
    def _before_last(self) -> Numbers:
        """Layers of all stages but the last one, which has the head, and modules of multi-token prediction, besides."""
        work = self.work
        plain = work.matmul_parameters - work.head_parameters - work.further_parameters
        attention = work.attention_span * work.heads * (work.key_width + work.value_width)
        of_layer = plain / work.layers + attention + work.delta_share * work.delta_flops_per_token / 2
        worth = work.further + (work.head_parameters + work.further_parameters) / of_layer
        dealt = work.layers - work.further
        if np.size(dealt) > 1 or np.size(worth) > 1:
            return dealt - last_stage_layers(dealt, self._stages, worth)
        stages, of_plan = np.unique(self._stages, return_inverse=True)  # many plans have few numbers of stages
        return (dealt - last_stage_layers(dealt, stages, worth))[of_plan]

    @cached_property
    def place_between(self) -> NDArray[Any]:
        """Place of the pipeline rank between first and last that may need most, 0 if there is none: the first that has
        a layer more than rank 0, and of which backward reaches all layers."""
        end = self._stages - 1
        more = np.where(self._first_of_more < end, self._first_of_more, 0)
        place = np.maximum(more, np.ceil(self._unreached / np.maximum(1, self._fewest)))
        usual = (self.system.balanced_stages > 0) & (self._stages_here == 1) & (self._said == 0)
        return np.where((place > 0) & (place < end) & usual, place, 0)

    @property
    def _unreached(self) -> Numbers:
        """Layers, the first of the model, that backward does not reach: neither they nor the embedding are trained."""
        return (1 - self.work.reached) * self.work.layers

    def _trained(self, share: Numbers, reached: Numbers) -> Numbers:
        """Return the share of a rank's matrices that is trained, if it is `share` of all, in layers that backward
        reaches."""
        return np.minimum(1, share * reached / np.where(self.work.reached > 0, self.work.reached, 1))

    def _reached(self, first: bool, last: bool, layers: Numbers) -> Numbers:
        """Return the share of a rank's layers that backward reaches: of several stages, the mean of all layers."""
        place, of_more = self.place_between, np.maximum(0, self.place_between - self._first_of_more)
        before = 0 if first else self.work.layers - layers if last else place * self._fewest + of_more
        here = np.clip((before + layers - self._unreached) / np.maximum(1, layers), 0, 1)
        return np.where((self.plans.pp > 1) & (self._stages_here == 1), here, self.work.reached)

    @property
    def _adds_up(self) -> NDArray[np.bool_]:
        """True where gradients of several microbatches add up on the rank before they are summed over ranks."""
        return np.asarray((self.microbatches > 1) & (self.system.sums_once > 0))

    def _moments(
        self,
        kept: Numbers,
        reached: Numbers,
        gradients: Numbers,
        of_head: Numbers,
        of_embedding: Numbers,
        sent: Numbers,
        last: bool,
    ) -> list[tuple[Numbers, Numbers, Numbers]]:
        """Return activations, what the loss needs, and gradients at the moments of a step one of which is its peak.

        kept: of all layers in flight; reached: the rank's layers that backward reaches; gradients: of all that is
        trained, of which the head's come first, and the embedding's last. A step of one microbatch makes them while it
        gives its activations up. All later ones add to them, so that a new one of head or embedding is there for a
        moment beside the sum. sent: buckets on their way and sums, beside gradients that are kept.
        """
        work, hidden = self.work, self.tokens * self.work.width / self.sequence_ranks
        alone = (self.microbatches <= 1) & (self.plans.stages_here == 1) & (self.system.gradient_buffers == 0)
        loss, waiting = self._loss() if last else (np.zeros(1), np.zeros(1))
        is_once = alone & ((work.tied == 0) | (work.scored > 0))
        return [
            (kept, loss, np.where(alone, 0.0, gradients)),
            (kept + self.working, waiting, np.where(alone, of_head, gradients)),
            (
                (kept - self.moved) / np.maximum(1, reached) + self.moved + self.working_lower,
                np.zeros(1),
                gradients - np.where(is_once, of_embedding, 0.0) + sent,
            ),
            (
                hidden * (self.activation_bytes + 4) + np.where(is_once, 0.0, of_embedding),
                np.zeros(1),
                gradients + sent,
            ),
        ]

    def _sent(self, dense: Numbers, experts: Numbers) -> Numbers:
        """Return the bytes of ZeRO 1 and 2 at the end of backward, beside gradients that it keeps: of stage 1 the sums,
        of both the buckets on their way, each of which ends half a matrix, on the average, beyond its size."""
        plans, work, system = self.plans, self.work, self.system
        experts = experts * (self.expert_ranks > 1)
        matrix = work.width * work.widest_ffn / plans.tp * (work.dense_layers > 0)
        numbers = plans.bucket_mb * 2.0**20 / self.weight_bytes + np.where(experts > 0, self._stack, matrix) / 2
        sending = np.minimum(dense + experts, (SUMS_AHEAD + 1) * numbers) * self.reduced_bytes
        sums = np.where(plans.zero == 1, self._shared(dense, experts) * self.gradient_bytes, 0.0)
        is_shared = ((plans.zero == 1) | (plans.zero == 2)) & (plans.shares_state > 1) & (system.buckets > 0)
        return np.where(is_shared, sums + (1 + system.copies_sums) * sending, 0.0)

    def _opened(self, words: Numbers) -> Numbers:
        """Return the bytes of the largest parameter while its update has it in fp32, and what rounding it takes; one
        comes after the other. `words`: elements of the vocabulary's matrix, if the rank trains it."""
        plans, work = self.plans, self.work
        matrix = work.width * work.widest_ffn / plans.tp * (work.dense_layers > 0) * (work.trained_dense > 0)
        stack = self._stack * (work.trained_experts > 0)
        largest = np.maximum(self._shared(np.maximum(words, matrix), 0.0), self._shared(np.zeros(1), stack))
        is_half, widened = plans.is_("weights", "bf16"), self.system.widened_bytes
        rounded = np.where(is_half, np.where(self.eager, ROUNDED_BYTES_EAGER[0], 2.0), 0.0)
        rounded = np.where(widened > 0, np.where(self.eager, ROUNDED_BYTES_EAGER[1], 1.0), rounded)
        opened = largest * (widened + np.where(is_half, 8.0, 0.0) + rounded)  # a weight and its gradient in fp32
        return np.where(self.offloads_optimizer, 0.0, opened)

    def _orthogonal(self) -> Numbers:
        """Return the bytes in which Muon makes the largest matrices orthogonal, with all directions of before.

        Ranks have their parts of as many matrices in fp32 as there are ranks, and one whole, if matrices are cut; of
        that its products with itself, and four of its size.
        """
        plans, element, most, waiting = self.plans, self.system.direction_bytes, np.zeros(1), np.zeros(1)
        ranks = plans.world_size // plans.pp
        for one in self.system.hidden:
            apart = self.are_apart(one) | (ranks == 1)
            shards = plans.ep * self.expert_ranks if one.are_stacks else self._shares_state
            parts = plans.tp * shards
            whole = np.where(apart, 1 / shards, 1.0)
            batch = np.where(apart, 1, np.minimum(ranks, one.many / plans.pp)) * one.largest_numbers / parts
            gathered = np.where(apart | (parts == 1), 0.0, one.largest_numbers)
            iterated = whole * (4 * one.largest_numbers + one.largest_gram)
            kept = np.where(apart, 0.0, element * one.numbers / plans.pp / parts)
            most = np.maximum(most, 4 * (batch + gathered) + element * (iterated - np.where(apart, 0.0, batch)))
            waiting = waiting + kept
        return most + np.where(self.offloads_optimizer, 0.0, waiting)

    def _outputs(self, microbatches: Numbers) -> Numbers:
        """Return the bytes of the hidden states that a rank's stages have sent on, and keep until their backward
        (torch.distributed.pipelining)."""
        return (self.system.receives_ahead > 0) * microbatches * self._stages_here * self.hidden_bytes

    def in_flight(self, first: bool, last: bool, layers: Numbers) -> Numbers:
        """Return the layers whose activations are alive at once: microbatches in flight times layers of the rank."""
        plans, stages = self.plans, self._stages_here
        chunks = 2 * (plans.pp - 1) + (stages - 1) * plans.pp + 1 if first else (stages - 1) * plans.pp + 1
        after = plans.pp if first else 1 if last else plans.pp - self.place_between
        at_most = np.where(plans.is_("schedule", "gpipe"), self.microbatches, after)
        at_most = np.where(plans.is_("schedule", *INTERLEAVED), chunks / stages, at_most)
        at_most = np.where(plans.is_("schedule", *V_SHAPED), (2 * plans.pp + 1) / 2, at_most)
        return np.where(plans.pp == 1, 1, np.minimum(self.microbatches, at_most)) * layers

    def _received(self) -> Numbers:
        """Return the bytes that a rank's stages receive, for each microbatch of the step, and hold in buffers."""
        plans = self.plans
        boundaries = np.where(plans.pp > 1, 2 * self._stages_here - 1, 0) * (self.system.receives_ahead > 0)
        return self.microbatches * boundaries * self.hidden_bytes

    def _agreement(self, whole: Numbers, mine: Numbers) -> Numbers:
        """Return the bytes that replicas, or sites, keep to agree in fewer bytes."""
        summed = np.where(self.plans.zero == 0, whole, mine) / (self.plans.sum_inside * self.plans.sum_between)
        return self.compression.kept_bytes(self.plans, summed, mine)

    def _shared(self, dense: Numbers, experts: Numbers) -> Numbers:
        """Return a rank's part of the state of so many parameters (ZeRO)."""
        return dense / self._shares_state + experts * self.expert_padding / self.expert_ranks

    @cached_property
    def _shares_state(self) -> Numbers:
        return self.plans.shares_state

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
        most_rows = np.where(work.trained_head, np.inf, FROZEN_CHUNK_ROWS)
        rows = np.minimum(system.chunk_rows, most_rows)
        chunk = np.minimum(whole, np.maximum(CHUNK_LOGITS, rows * work.head_outputs / plans.tp))
        gradients = 4 * work.trained_head * matrix + element * hidden
        arithmetic = chunk * np.where(self.eager, LOSS_CHUNK_BYTES_EAGER, LOSS_CHUNK_BYTES)
        product = (work.trained_head * matrix + 2 * chunk) * element
        cast = np.where(self._is_cast, matrix * element, 0.0)
        forward = gradients + cast + np.maximum(arithmetic, product) + element * hidden
        norm = 4 * (1 + work.scaled_norms) * hidden / self.sequence_ranks
        of_norm = (4 * 5 * hidden) / self.sequence_ranks
        # A module that predicts further tokens joins two hidden states, each after a norm, and casts its projection.
        joined = 3 * norm + 3 * element * hidden + np.where(self._is_cast, 2 * work.width**2 * element, 0.0)
        waiting = work.further * (gradients + joined)
        loss = waiting + norm + np.maximum(np.maximum(forward, 2 * gradients), of_norm)
        is_whole, logits = system.whole_logits > 0, whole * system.whole_logits
        return np.where(is_whole, logits, loss), np.where(is_whole, logits, waiting)

    def _gathered(
        self, ends: Numbers, trained_ends: Numbers, of_head: Numbers, layers: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Return the bytes of stage 3 in the loss, and in the backward of a layer: parameters are whole while they are
        used, gradients until they are summed.

        They are those of the last two layers, or of all layers of a pipeline rank, because its stages give up none
        after a backward. What is outside of layers stays whole until the end of backward (FSDP2's root), the head's
        gradient too.
        """
        plans, element = self.plans, self.activation_bytes
        mean, two = (self._gathered_layer(*one.parameters(1.0)) for one in (self, self._last_two))
        gathered = np.where(plans.pp > 1, layers * mean, np.minimum(2, layers) * two)
        dense, experts = self._last_two.parameters(1.0)
        trained = dense * self.work.trained_dense + experts * self.work.trained_experts + trained_ends
        trained = trained + sum(self.adapters(1.0))
        gradients = np.where(self._adds_up, of_head * element, trained * self.gradient_bytes)
        root = np.where(self.system.keeps_root > 0, ends * element, 0.0)
        of_loss = np.where(plans.pp > 1, gathered, 0.0) + root
        return np.where(plans.shards_parameters, of_loss, 0.0), np.where(
            plans.shards_parameters, gathered + root + gradients, 0.0
        )

    def _gathered_layer(self, dense: Numbers, experts: Numbers) -> Numbers:
        """Return the bytes of a layer of so many parameters while it is whole."""
        of_packed = self.work.quantised_bytes - self.activation_bytes
        packed = dense * self.work.quantised_dense + experts * self.work.quantised_experts
        return (dense + experts * self.expert_padding) * self.activation_bytes + packed * of_packed

    @cached_property
    def _last_two(self) -> LayerMemory:
        """The mean of the last two layers: both have experts if most layers have, one if fewer have, as in models that
        begin with dense layers, or alternate."""
        work = self.work
        return self._among(np.ceil(2 * work.moe_layers / work.layers) / 2 * work.layers, work.delta_layers)


def _highest(moments: Sequence[tuple[Numbers, ...]], fragmentation: float) -> tuple[NDArray[Any], ...]:
    """Return the figures of each plan's moment that needs most: activations, logits, gradients, gathered, update. All
    but gradients come and go, and leave holes."""
    needed = [sum(one) + fragmentation * (sum(one) - one[2]) for one in moments]
    best = np.stack(np.broadcast_arrays(*needed)).argmax(0)
    return tuple(np.choose(best, figures) for figures in zip(*moments, strict=True))
