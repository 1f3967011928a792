"""The time of a training step by category, estimated in closed form: for one plan, or for 100,000s at once.

The step of a pipeline rank with M microbatches is M times its stages' forward and backward, plus the bubble, plus the
work that comes once a step. `plan.cost.layer_time` has the computing of a layer, `plan.cost.constants` the numbers that
no formula gives. Every time is that of the slowest rank.

Collectives of a message of S bytes over n ranks: ring all-reduce 2 (n-1)/n S/B + latency, all-gather, reduce-scatter
and all-to-all half of it (Thakur et al. 2005). Bubble: (pp - 1)/v times a microbatch (Narayanan et al. 2021), less
the part that zero-bubble schedules fill (Qi et al. 2024).

The size of a bucket: what a sum of gradients that begins during backward leaves to wait for after it.

Backward hands out G bytes of gradients evenly over its W seconds, in n = G/S buckets of S bytes. A bucket's sum takes
c(S) = latency + S/bandwidth, and sums go one after the other. The last bucket is whole when backward ends, so there is
its sum to wait for; or, where the links are the limit, all sums less what backward hid:

    wait(S) = max(c(S), W/n + n c(S) - W)

Small buckets pay the latency n times; of large ones the first begins late and the last ends late.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from argosy.plan.cost.breakdown import OF_TIME, Breakdown
from argosy.plan.cost.constants import BACKWARD_ATTENTION, Constants
from argosy.plan.cost.layer_time import BACKWARD_POINTWISE, LayerModel, LayerTime
from argosy.plan.cost.memory_model import MemoryModel
from argosy.plan.cost.network import HIDDEN, Compression, all_reduce_s, all_to_all_s, gather_s, group_of, send_s
from argosy.plan.cost.rates import Rates, System
from argosy.plan.layouts import SCHEDULE_NAMES, Ints, Layouts
from argosy.plan.pipeline import SPLITTING
from argosy.plan.plan import Plan
from argosy.plan.workload import Numbers, Workload

SIZES_MB = tuple(2**n for n in range(2, 9))
"""Sizes that are compared: 4 to 256 MiB. Smaller ones gain next to nothing."""
MEMORY_SHARE = 1 / 256
"""Largest bucket, of a device's memory: copies of a bucket or two live in a step, and no formula counts them."""
WORTH = 0.005
"""Share of a step that another size than the usual one must save."""


def wait_s(gradients: Numbers, bucket: Numbers, of_message: Numbers, of_byte: Numbers, backward_s: Numbers) -> Numbers:
    """Return the seconds from the end of backward to the end of the last sum.

    gradients, bucket: bytes; of_message, of_byte: seconds that a sum takes for each message, and for each byte.
    """
    many = np.maximum(1.0, np.ceil(np.asarray(gradients) / bucket))
    each = of_message + np.minimum(bucket, np.asarray(gradients)) * of_byte
    all_of_them = many * of_message + np.asarray(gradients) * of_byte
    return np.maximum(each, backward_s / many + all_of_them - backward_s)


HOST_LINK = 0.8
"""Share of the link to the host that large copies from pinned memory reach (PCIe 4.0: 25 of 32 GB/s)."""
BUBBLE_LEFT = {
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved_1f1b": 1.0,
    "interleaved_zero_bubble": 1 / 3,
    "zbv": 1 / 6,
    "dualpipev": 1 / 6,
}
"""Share of the bubble of 1F1B that is left, with as many stages on a rank: a third for ZB-H1; for V-shaped schedules
only that which synchronising the gradient norm leaves (planner notes: about 8 % of a step of few microbatches)."""

BACKWARD_SHARE = 0.6
"""Share of a microbatch's time in which its gradients come; the rest is forward."""


@dataclass(frozen=True)
class StepTime(Breakdown):
    """Seconds of a step by category; their sum is the step."""

    parts = OF_TIME

    ideal: Numbers
    """Model FLOPs at the data sheet's rate."""
    matmul: Numbers
    """Seconds of matmuls beyond that: rates never reached, shapes, conversions to narrow formats."""
    attention: Numbers
    """Seconds of attention beyond that."""
    pointwise: Numbers
    """Operations as fast as memory."""
    host: Numbers
    """Kernels so small that the host cannot start them fast enough."""
    recompute: Numbers
    offload: Numbers
    """Waiting for activations that go to the host's memory and back."""
    tensor: Numbers
    """Waiting for tensor-parallel ranks."""
    context: Numbers
    experts: Numbers
    """Waiting for tokens that go to experts, and for the busiest expert."""
    pipeline: Numbers
    """Waiting for sends between stages."""
    bubble: Numbers
    """Idle stages, and stages shorter than the longest."""
    gradients: Numbers
    """Waiting for data-parallel ranks: sums of gradients, gathering of parameters."""
    optimizer: Numbers
    other: Numbers
    """Costs of every step, and stragglers."""


@dataclass(frozen=True)
class LayerWaits:
    """Seconds that a layer waits in forward and backward of a microbatch, for each reason."""

    tensor: Numbers
    context: Numbers
    experts: Numbers
    gathered: Numbers
    offload: Numbers
    host: Numbers


class StepModel(LayerModel):
    """Seconds of a step, for plans of one workload on one kind of cluster, or of as many as there are plans."""

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

    def predict(self) -> StepTime:
        """Return the seconds of a step by category."""
        plans, work, constants = self.plans, self.work, self.constants
        m = self.microbatches
        layer, again = self.mean_layer, self.recomputed_s
        per_rank = work.layers / plans.pp
        head, of_head = self.head, self.of_head_s
        waits, mean = self.waits, self.mean_microbatch_s
        tensor, context, experts = waits.tensor, waits.context, waits.experts
        gathered, offload, host = waits.gathered, waits.offload, waits.host
        heaviest = self._heaviest(self.layer_s, of_head)
        sends = self._sends(mean)
        bubble = self._bubble(mean + sends) + m * (heaviest - mean)
        of_matmuls, of_attention = self.ideal_s()
        passes = 1 + work.reached + self.trained_matmuls
        gradients = m * per_rank * gathered + self._gradients(m * mean, mean)
        times = StepTime(
            ideal=of_matmuls + of_attention,
            matmul=m * (per_rank * passes * layer.matmul + (2 + work.trained_head) * head.matmul / plans.pp)
            - of_matmuls,
            attention=m * per_rank * (1 + work.reached * BACKWARD_ATTENTION) * layer.attention - of_attention,
            pointwise=m
            * (
                per_rank * (1 + work.reached * BACKWARD_POINTWISE) * layer.pointwise
                + (1 + BACKWARD_POINTWISE) * head.pointwise / plans.pp
            ),
            host=m * per_rank * host,
            recompute=m * per_rank * again,
            offload=m * per_rank * offload,
            tensor=m * per_rank * tensor,
            context=m * per_rank * context,
            experts=m * per_rank * experts,
            pipeline=m * sends,
            bubble=bubble,
            gradients=gradients,
            optimizer=self._optimizer(),
            other=np.zeros(1),
        )
        nodes = np.maximum(1, plans.world_size / self.rates.node)
        other = constants.step + constants.straggling * np.log2(nodes) * times.total
        return StepTime(**{**vars(times), "other": other})

    @cached_property
    def waits(self) -> LayerWaits:
        layer = self.mean_layer
        compute = layer.forward + self.layer_backward_s + self.recomputed_s
        tensor, context, experts = self._tensor(), self._context(layer), self._experts()
        gathered = self._gathered(compute)
        host = self.host_s(compute + tensor + context + experts + gathered)
        return LayerWaits(tensor, context, experts, gathered, self._offload(layer), host)

    @cached_property
    def layer_s(self) -> Numbers:
        """Seconds of a layer's forward and backward on a microbatch, with what it waits for."""
        layer, waits = self.mean_layer, self.waits
        return layer.forward + self.layer_backward_s + self.recomputed_s + sum(vars(waits).values())

    @cached_property
    def mean_microbatch_s(self) -> Numbers:
        """Seconds of a microbatch on a rank of mean work."""
        return (self.work.layers * self.layer_s + self.of_head_s) / self.plans.pp

    # What a layer waits for

    @cached_property
    def _forwards(self) -> Numbers:
        """Times that a layer's forward communication happens; backward's counts as one more."""
        again = np.where(self.plans.is_("recompute", "full"), 1 / self.plans.recompute_every, 0.0)
        return 1 + self.work.reached * (1 + again)

    def _tensor(self) -> Numbers:
        """Return the wait for two sums a layer and direction over tensor-parallel ranks.

        A reduce-scatter and an all-gather are one sum.
        """
        message = self.tokens * self.work.width * self.activation_bytes
        exposed = self.constants.exposed_tensor * np.where(self.system.overlaps_tensor > 0, 0.5, 1.0)
        in_switch = self.system.sequence_parallel == 0
        return 2 * self._forwards * exposed * all_reduce_s(message, self.tensor_group, in_switch)

    def _context(self, layer: LayerTime) -> Numbers:
        """Return the wait for a ring of keys and values under attention, or for the exchange of heads for tokens."""
        plans, work = self.plans, self.work
        kv_elements = np.maximum(1, work.kv_heads / plans.tp) * (work.key_width + work.value_width)
        kv = self.tokens * kv_elements * self.activation_bytes
        around = (plans.cp - 1) * send_s(kv, self.context_group)
        behind = np.maximum(0.0, around - layer.attention * self._forwards / 2)
        ring = np.where(plans.cp > 1, self._forwards * (self.constants.exposed_context * around + behind), 0.0)
        heads = self.tokens * (2 * work.heads + 2 * work.kv_heads) / plans.tp * work.value_width * self.activation_bytes
        ulysses = self._forwards * all_to_all_s(heads, self.context_group)
        of_states = self.tokens * (work.delta_streams / plans.tp) * self.activation_bytes  # and back what heads read
        exchange = self._forwards * all_to_all_s(of_states, self.context_group)
        attention = np.where(plans.is_("context", "ulysses"), ulysses, ring)
        return (1 - work.delta_share) * attention + work.delta_share * exchange

    def _experts(self) -> Numbers:
        """Return the wait for tokens to reach their experts and come back, and for the busiest expert."""
        plans, work, constants = self.plans, self.work, self.constants
        copies = self._copies(plans.ep) * np.where(work.experts > 0, 1.0, 0.0)
        message = self.tokens / self.sequence_ranks * copies * work.width * self.activation_bytes
        exposed = constants.exposed_experts * np.where(self.system.overlaps_experts > 0, 0.25, 1.0)
        exchange = 2 * self._forwards * exposed * all_to_all_s(message, self.expert_group, self._crossing())
        mixture_s = self.mixture.forward + self.mixture.backward(self.work.reached, self.trained_matmuls)
        busiest = (constants.imbalance - 1) * np.where(self.system.even_experts > 0, 0.0, mixture_s)
        return work.moe_layers / work.layers * (exchange + np.where(plans.ep > 1, busiest, 0.0))

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
        trained = self.work.trained_dense, self.work.trained_experts
        groups = self.shard_group, self.expert_shard_group
        for parameters, share, group in zip((dense, experts), trained, groups, strict=True):
            gather = gather_s(parameters * self.activation_bytes, group) * gathers
            both = gather + times * gather_s(parameters * share * system.reduced_bytes, group)
            moved = moved + np.where(parameters > 0, both, 0.0)
        under = np.maximum(compute, moved) - compute + self.constants.exposed_gradients * np.minimum(moved, compute)
        added = np.where(system.overlaps_gradients > 0, under, moved)
        return np.where(plans.shards_parameters, added, 0.0)

    # What comes once a step

    def _gradients(self, compute: Numbers, window: Numbers) -> Numbers:
        """Return the wait of ZeRO 0 to 2 for one sum of all gradients a step, of which the last backward hides a part,
        and for the updated values, which may travel under the next forward."""
        plans, system, constants = self.plans, self.system, self.constants
        dense, experts = self._summed_parameters
        updated = np.where(plans.is_("precision", "fp32"), 4, system.updated_bytes)
        updated = np.where(plans.zero == 0, system.reduced_bytes, updated)
        is_tier = (plans.zero > 0) & (plans.dp_replicate > 1)  # ranks that share the state
        in_tiers = (plans.sum_inside > 1) | is_tier
        moved: Numbers = 0.0
        ahead: Numbers = 0.0
        for parameters, group in (dense, self.data_group), (experts, self.expert_data_group):
            back, inside = (gather_s(parameters * updated, each) for each in (group, self.shard_group))
            both = gather_s(parameters * system.reduced_bytes, group) + back
            both = both * np.where(plans.zero == 0, self._share_sent(group.ranks), 1.0)
            back = np.where(plans.zero > 0, np.where(in_tiers, inside, back), 0.0)
            both = np.where(in_tiers, self._sum_s(parameters * system.reduced_bytes) + back, both)
            moved = moved + np.where(parameters > 0, both, 0.0)
            ahead = ahead + np.where(parameters > 0, back * system.gathers_ahead, 0.0)
        hides, under = 1 - constants.exposed_gradients, window * system.overlaps_gradients
        hidden = np.minimum(hides * (moved - ahead), BACKWARD_SHARE * under)
        hidden = hidden + np.minimum(hides * ahead, (1 - BACKWARD_SHARE) * under)
        once = np.where(plans.zero == 3, 0.0, moved - hidden)
        of_shard = (dense + experts) * system.reduced_bytes / (plans.dp_shard * plans.cp)
        once = once + np.where(plans.zero == 3, self._over_replicas_s(of_shard) * 0.5, 0.0)
        waits = once + system.buckets * (self._bucket_waits(plans.bucket_mb) - self._least_wait)
        return waits + self._compressing(dense + experts, waits)

    @cached_property
    def _summed_parameters(self) -> tuple[Numbers, Numbers]:
        """Parameters that are trained on a rank, before ranks share them: dense, and of experts."""
        work = self.work
        dense, experts = self.parameters(work.layers / self.plans.pp)
        ends = np.maximum(work.trained_embedding, work.trained_head) * work.vocabulary_parameters / self.plans.tp
        return dense * work.trained_dense + ends, experts * work.trained_experts

    def _sum_s(self, message: Numbers) -> Numbers:
        """Return the seconds of one message's sum under ZeRO 0 to 2: inside replicas, and over them."""
        n = self.plans.shares_state
        inside = np.where(n > 1, gather_s(message, self.shard_group), 0.0)
        return inside + self._over_replicas_s(np.asarray(message) / n)

    def _over_replicas_s(self, message: Numbers) -> Numbers:
        """Return the seconds to sum a message over replicas, tier by tier and back."""
        plans, seconds = self.plans, np.zeros(1)
        stride, left = plans.tp * plans.shares_state, plans.replicas
        for tier in plans.sum_inside, plans.sum_between:
            group = group_of(tier, stride, self.rates, self.constants)
            seconds = seconds + np.where(tier > 1, 2 * gather_s(message, group), 0.0)
            message, stride, left = np.asarray(message) / tier, stride * tier, left // tier
        across = all_reduce_s(message * self._share_sent(left), group_of(left, stride, self.rates, self.constants))
        return seconds + np.where(left > 1, across, 0.0)

    # Buckets

    def best_bucket_mb(self) -> Ints:
        """Return for each plan the size that waits least, or the usual one if none saves much (`_waits_of_sizes`)."""
        usual = Plan().bucket_mb
        waits = np.stack(np.broadcast_arrays(*self._waits_of_sizes.values()))
        least = np.array(list(self._waits_of_sizes))[np.argmin(waits, axis=0)]
        saved = self._bucket_waits(usual) - waits.min(axis=0)
        return np.where(saved > WORTH * self.microbatches * self.mean_microbatch_s, least, usual).astype(np.int64)

    @cached_property
    def _waits_of_sizes(self) -> dict[int, Numbers]:
        largest = max(SIZES_MB[0], float(np.max(self.rates.memory_bytes)) * MEMORY_SHARE / 2**20)
        return {size: self._bucket_waits(size) for size in SIZES_MB if size <= largest}

    @cached_property
    def _least_wait(self) -> Numbers:
        """Wait that is left with the best size of buckets or with the plan's, whichever is less."""
        every = np.stack(np.broadcast_arrays(self._bucket_waits(self.plans.bucket_mb), *self._waits_of_sizes.values()))
        least: Numbers = every.min(axis=0)
        return least

    def _bucket_waits(self, bucket_mb: Numbers) -> Numbers:
        """Return the seconds that buckets of this size leave to wait for; 0 where FSDP2 has messages of its own."""
        start = self._sum_s(0.0)
        of_byte = self._sum_s(1e6) - start
        gradients = sum(self._summed_parameters) * self.system.reduced_bytes
        bucket = np.asarray(bucket_mb) * 2.0**20
        wait = wait_s(gradients, bucket, start, of_byte / 1e6, BACKWARD_SHARE * self.mean_microbatch_s)
        return np.where((self.plans.zero == 3) | (self.plans.dp * self.plans.cp == 1), 0.0, wait)

    def _share_sent(self, replicas: Numbers) -> Numbers:
        """Return which share of an exact sum's bytes replicas send."""
        return self.compression.share_sent(self.plans, self.work, replicas)

    def _compressing(self, parameters: Numbers, waits: Numbers) -> Numbers:
        """Return what compressing adds to the waits for sums over replicas; sending the bucket before hides a part."""
        plans = self.plans
        inside = plans.sum_inside * plans.sum_between
        mine = parameters / plans.shares_state / inside
        seconds = self.compression.seconds(plans, mine, plans.replicas // inside, self.rates)
        return seconds - HIDDEN * np.minimum(seconds, waits)

    def _optimizer(self) -> Numbers:
        """Return the seconds to read gradient and state, and to write state and weight."""
        plans, system = self.plans, self.system
        dense, experts = self._summed_parameters
        mine = dense / plans.shares_state
        mine = mine + experts / np.maximum(1, plans.shares_state / plans.ep)
        of_weight = system.gradient_bytes * 2 + 2 * system.moment_bytes + system.weight_bytes
        moved = self.constants.optimizer * mine * of_weight
        # Gradients go to the host, it updates, new values come back: one after the other (`parallel.offload`).
        copied = mine * (system.gradient_bytes + system.weight_bytes) / self._host_link_bytes_per_s
        on_host = copied + moved / self.rates.host_memory_bytes_per_s
        return np.where(plans.is_("offload", "optimizer", "all"), on_host, moved / self.rates.memory_bytes_per_s)

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

    # The pipeline

    def _heaviest(self, of_layer: Numbers, of_head: Numbers) -> Numbers:
        """Return the seconds of a microbatch on the slowest rank."""
        plans, work = self.plans, self.work
        stages = plans.pp * plans.stages_here
        worth = of_head / of_layer
        balanced = np.maximum((work.layers + worth) / stages, np.ceil(work.layers / stages))
        even = np.ceil(work.layers / stages) + worth / plans.stages_here
        layers = np.where(self.system.balanced_stages > 0, np.maximum(balanced, worth), even)
        heaviest = layers * plans.stages_here * of_layer
        said = plans.most_layers
        heaviest = np.where(said > 0, said * of_layer, heaviest)  # whoever says so gives the head's rank fewer
        return np.where(plans.pp == 1, work.layers * of_layer + of_head, heaviest)

    def _bubble(self, of_microbatch: Numbers) -> Numbers:
        plans = self.plans
        left = np.array([BUBBLE_LEFT[name] for name in SCHEDULE_NAMES])[plans.schedule]
        filled = left * (plans.pp - 1) / plans.stages_here * of_microbatch
        # One microbatch passes all ranks and comes back; if backward is split, the gradients of weights can wait.
        way = np.where(plans.is_("schedule", *SPLITTING), 2 / 3, 1.0) * plans.pp
        return np.maximum(filled, (way - self.microbatches) * of_microbatch)

    def _sends(self, of_microbatch: Numbers) -> Numbers:
        """Return the wait for hidden states to the next stage and gradients back, of one microbatch on one rank.

        A link that carries them slower than ranks compute is waited for, whatever is hidden.
        """
        plans = self.plans
        group = group_of(plans.pp, plans.tp * plans.cp * plans.dp, self.rates, self.constants)
        one_way = plans.stages_here * send_s(self.hidden_bytes, group)
        sends = np.maximum(self.constants.exposed_pipeline * 2 * one_way, one_way - of_microbatch)
        return np.where(plans.pp > 1, sends, 0.0)
