"""Waits of a layer, in forward and backward of a microbatch: other ranks, the host's memory, the host itself.

Collectives of different axes that pass the same wires get shares of them. While gradients and parameters travel under
computing, so do messages of tp, cp, ep and pp; where the cluster's topology is known, what these take of the wires is
no longer there to hide the former. Which of them waits makes no difference: together they take as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from argosy.plan.cost.collectives import Group, all_reduce_s, all_to_all_s, gather_s, send_s, shared
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.layer_time import LayerModel, LayerTime
from argosy.plan.cost.memory_model import MemoryModel
from argosy.plan.cost.network import Compression, group_of
from argosy.plan.cost.rates import Rates, System
from argosy.plan.layouts import Layouts
from argosy.plan.workload import Numbers, Workload

HOST_LINK = 0.8
"""Share of the link to the host that large copies from pinned memory reach (PCIe 4.0: 25 of 32 GB/s)."""


@dataclass(frozen=True)
class LayerWaits:
    """Seconds that a layer waits in forward and backward of a microbatch, for each reason."""

    tensor: Numbers
    context: Numbers
    experts: Numbers
    gathered: Numbers
    offload: Numbers
    host: Numbers


class WaitModel(LayerModel):
    """Seconds that layers wait, for plans of one workload on one kind of cluster, or of as many as there are plans."""

    def __init__(
        self,
        plans: Layouts,
        work: Workload,
        rates: Rates,
        system: System,
        constants: Constants,
        compression: Compression = Compression(),  # noqa: B008  (frozen)
    ):
        super().__init__(plans, work, rates, system, constants)
        self.compression = compression
        self.tensor_group = group_of(plans.tp, 1, rates, constants)
        self.context_group = group_of(plans.cp, plans.tp, rates, constants)
        self.data_group = group_of(plans.dp * plans.cp, plans.tp, rates, constants)
        self.shard_group = group_of(plans.dp_shard * plans.cp, plans.tp, rates, constants)
        stride = self.expert_tp
        self.expert_group = group_of(plans.ep, stride, rates, constants)
        replicas = plans.cp * plans.tp / (plans.ep * stride)  # of an expert among the ranks of one model replica
        self.expert_data_group = group_of(np.maximum(1, plans.dp * replicas), plans.ep * stride, rates, constants)
        shards = np.maximum(1, plans.dp_shard * replicas)
        self.expert_shard_group = group_of(shards, plans.ep * stride, rates, constants)
        self.stage_group = group_of(plans.pp, plans.tp * plans.cp * plans.dp, rates, constants)

    @cached_property
    def waits(self) -> LayerWaits:
        layer = self.mean_layer
        compute = layer.forward + self.layer_backward_s + self.recomputed_s
        tensor, context, experts = self._tensor(), self._context(layer), self._experts()
        gathered = self._gathered(compute)
        host = self.host_s(compute + tensor + context + experts + gathered)
        return LayerWaits(tensor, context, experts, gathered, self._offload(layer), host)

    @cached_property
    def _forwards(self) -> Numbers:
        """Times that a layer's forward communication happens; backward's counts as one more."""
        again = np.where(self.plans.is_("recompute", "full"), self.recomputed_share, 0.0)
        return 1 + self.work.reached * (1 + again)

    def _tensor(self) -> Numbers:
        """Return the wait for two sums a layer and direction over tensor-parallel ranks.

        A reduce-scatter and an all-gather are one sum. With async_tp it is hidden by the products before and after it,
        but for the first of their parts; experts' are not cut.
        """
        message = self.hidden
        exposed = self.constants.exposed_tensor * np.where(self.system.overlaps_tensor > 0, 0.5, 1.0)
        in_switch = self.system.sequence_parallel == 0
        one_sum = exposed * all_reduce_s(message, self.tensor_group, in_switch)
        share, moe = 1 - 1 / self.tensor_parts, self.work.moe_layers / self.work.layers
        hidden = np.minimum(one_sum, share * self._attention.matmul)
        hidden = hidden + (1 - moe) * np.minimum(one_sum, share * self._feed_forward.matmul)
        return self._forwards * (2 * one_sum - hidden)

    def _context(self, layer: LayerTime) -> Numbers:
        """Return the wait for a ring of keys and values under attention, or for the exchange of heads for tokens."""
        plans, work = self.plans, self.work
        around = self._ring_s()
        behind = np.maximum(0.0, around - layer.attention * self._forwards**2 / 2)
        ring = np.where(plans.cp > 1, self.constants.exposed_context * around + behind, 0.0)
        ulysses = self._forwards * all_to_all_s(self.heads, self.context_group)
        of_states = self.tokens * work.delta_streams / plans.tp * self.activation_bytes  # and back what heads read
        exchange = self._forwards * all_to_all_s(of_states, self.context_group)
        attention = np.where(plans.is_("context", "ulysses"), ulysses, ring)
        return (1 - work.delta_share) * attention + work.delta_share * exchange

    def _ring_s(self) -> Numbers:
        """Return the seconds of a layer's sends round a ring, backward's included."""
        blocks, gradients = self.ring_blocks
        group, of_gradients = self.context_group, self.system.ring_gradient_bytes / self.activation_bytes
        passed = send_s(self.keys_and_values, group), send_s(self.keys_and_values * of_gradients, group)
        return blocks * passed[0] + gradients * passed[1]

    def _experts(self) -> Numbers:
        """Return the wait for tokens to reach their experts and come back, and for the busiest expert.

        In halves, the second's way there and the first's way back are hidden by what is computed meanwhile; the first
        way there, in backward too, by shared experts.
        """
        plans, work, constants = self.plans, self.work, self.constants
        message = self.to_experts / self.expert_parts
        exposed = constants.exposed_experts * np.where(self.system.overlaps_experts > 0, 0.25, 1.0)
        one_way = exposed * self.expert_parts * all_to_all_s(message, self.expert_group, self._crossing())
        of_halves = np.where(self.expert_parts > 1, self._hidden_s(one_way, self.expert_matmuls), 0.0)
        of_shared = self._hidden_s(one_way / self.expert_parts, self.shared_experts)
        exchange = 2 * self._forwards * one_way - of_halves - self.system.computes_shared_meanwhile * of_shared
        mixture_s = self.mixture.forward + self.mixture.backward(self.work.reached, self.trained_matmuls)
        busiest = (constants.imbalance - 1) * np.where(self.system.even_experts > 0, 0.0, mixture_s)
        return work.moe_layers / work.layers * (exchange + np.where(plans.ep > 1, busiest, 0.0))

    def _hidden_s(self, message_s: Numbers, computed: LayerTime) -> Numbers:
        """Return the seconds of one message in each forward and in backward that go by while this is computed."""
        reached = self.work.reached
        backward = np.minimum(reached * message_s, computed.backward(reached, self.trained_matmuls))
        return (self._forwards - reached) * np.minimum(message_s, computed.forward) + backward

    # Bytes of a rank's messages

    @property
    def hidden(self) -> Numbers:
        return self.tokens * self.work.width * self.activation_bytes

    @property
    def keys_and_values(self) -> Numbers:
        plans, work = self.plans, self.work
        kv_elements = work.kv_heads_on(plans.tp) * 2 * work.core_width
        return self.tokens * kv_elements * self.activation_bytes

    @property
    def ring_blocks(self) -> tuple[Numbers, Numbers]:
        """Blocks of keys and values, and of their gradients, that a rank passes on for a layer and a microbatch."""
        return self._forwards * (self.plans.cp - 1), self.work.reached * self.plans.cp

    @property
    def heads(self) -> Numbers:
        plans, work = self.plans, self.work
        return self.tokens * (2 * work.heads + 2 * work.kv_heads) / plans.tp * work.core_width * self.activation_bytes

    @property
    def to_experts(self) -> Numbers:
        work = self.work
        copies = self._copies(self.plans.ep) * np.where(work.experts > 0, 1.0, 0.0)
        return self.tokens / self.sequence_ranks * copies * work.width * self.activation_bytes

    def taken_s(self, group: Group) -> Numbers:
        """Return the seconds of a layer's forward and backward in which other axes' messages have wires of `group`, the
        sends between stages shared out among the layers; 0 where the topology is not known."""
        if self.rates.fabric is None:
            return 0.0
        plans, work = self.plans, self.work
        heads = self._forwards * all_to_all_s(self.heads, self.context_group)
        context = np.where(plans.is_("context", "ulysses"), heads, self._ring_s())
        experts = 2 * work.moe_layers / work.layers * all_to_all_s(self.to_experts, self.expert_group, self._crossing())
        sends = 2 * plans.stages_here * send_s(self.hidden_bytes, self.stage_group) / (work.layers / plans.pp)
        of_layer = (
            (self.tensor_group, plans.tp, 2 * self._forwards * all_reduce_s(self.hidden, self.tensor_group, False)),
            (self.context_group, plans.cp, context),
            (self.expert_group, plans.ep, self._forwards * experts),
            (self.stage_group, plans.pp, sends),
        )
        taken: Numbers = 0.0
        for other, ranks, seconds in of_layer:
            taken = taken + np.where(ranks > 1, shared(group, other) * seconds, 0.0)
        return taken

    def _copies(self, places: Numbers) -> Numbers:
        """Return the copies of a token that are sent: one for each expert, or for each of the `places` it goes to."""
        k = np.maximum(1, self.work.experts_per_token)
        return np.where(self.system.sends_once > 0, np.minimum(k, places * (1 - (1 - 1 / places) ** k)), k)

    def _crossing(self) -> Numbers:
        """Return the share of a token's copies that crosses the network."""
        nodes = np.maximum(1, self.plans.ep * self.expert_tp / self.rates.node)
        return np.minimum(1, self._copies(nodes) / self._copies(self.plans.ep))

    def _gathered(self, compute: Numbers) -> Numbers:
        """Return what ZeRO 3 adds to a layer's compute: gathering its parameters and scattering its gradients."""
        plans, system = self.plans, self.system
        dense, experts = self.parameters(1.0)
        in_backward = np.where(plans.pp > 1, 1 / self.microbatches, 1.0)  # a pipeline keeps parameters after a backward
        gathers = 1 + self.work.reached * in_backward
        gathers = gathers + (self._forwards - 1 - self.work.reached) * system.gathers_recomputed
        times = np.where(system.sums_once > 0, 1 / self.microbatches, 1.0)
        moved = (system.gathers - 1) * (gathers + times) * gather_s(0.0, self.shard_group)
        beside, beside_experts = self.adapters(1.0)
        trained = dense * self.work.trained_dense + beside, experts * self.work.trained_experts + beside_experts
        groups = self.shard_group, self.expert_shard_group
        element = np.where(plans.is_("fp8_gather", True), 1.0, self.activation_bytes)
        padding = 1.0, self.expert_padding
        sizes = zip((dense, experts), self.quantised(1.0), trained, groups, padding, strict=True)
        for parameters, packed, summed, group, padded in sizes:
            size = (parameters - packed) * element + packed * self.work.quantised_bytes
            gather = gather_s(padded * size, group) * gathers
            both = gather + times * gather_s(padded * summed * self.reduced_bytes, group)
            moved = moved + np.where(parameters > 0, both, 0.0)
        room = np.maximum(0.0, compute - self.taken_s(self.shard_group))
        under = np.maximum(room, moved) - room + self.constants.exposed_gradients * np.minimum(moved, room)
        added = np.where(system.overlaps_gradients > 0, under, moved)
        return np.where(plans.shards_parameters, added, 0.0)

    # The host, and the next stage

    def _offload(self, layer: LayerTime) -> Numbers:
        """Return what copying a layer's activations adds, beside forward and before backward."""
        if not np.any(self.plans.is_("offload", "activations", "all")):
            return np.zeros(1)
        memory = MemoryModel(self.plans, self.work, self.system, self.constants, self.compression)
        moved = memory.moved / self._host_link_bytes_per_s
        return moved + np.where(self.rates.host_waits > 0, moved, np.maximum(0.0, moved - layer.forward))

    @property
    def _host_link_bytes_per_s(self) -> Numbers:
        return HOST_LINK * self.rates.host_link_bytes_per_s

    def _sends(self, of_microbatch: Numbers) -> Numbers:
        """Return the wait for hidden states to the next stage and gradients back, of one microbatch on one rank.

        A link that carries them slower than ranks compute is waited for, whatever is hidden.
        """
        plans = self.plans
        one_way = plans.stages_here * send_s(self.hidden_bytes, self.stage_group)
        sends = np.maximum(self.constants.exposed_pipeline * 2 * one_way, one_way - of_microbatch)
        return np.where(plans.pp > 1, sends, 0.0)
