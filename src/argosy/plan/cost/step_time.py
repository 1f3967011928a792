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
from argosy.plan.cost.collectives import Group, all_reduce_s, gather_s
from argosy.plan.cost.constants import BACKWARD_ATTENTION
from argosy.plan.cost.layer_time import BACKWARD_POINTWISE
from argosy.plan.cost.layer_waits import WaitModel
from argosy.plan.cost.network import HIDDEN_SHARE, group_of
from argosy.plan.layouts import SCHEDULE_NAMES, Ints
from argosy.plan.pipeline import SPLITTING
from argosy.plan.plan import Plan
from argosy.plan.sync import COMPRESSED, SENT_TO_ALL
from argosy.plan.workload import Numbers

SIZES_MB = tuple(2**n for n in range(2, 9))
"""Sizes that are compared: 4 to 256 MiB. Smaller ones gain next to nothing."""
MEMORY_SHARE = 1 / 256
"""Largest bucket, of a device's memory: copies of a bucket or two live in a step, and no formula counts them."""
LEAST_BUCKET_GAIN = 0.005
"""Share of a step that another size than the usual one must save."""


def wait_s(gradients: Numbers, bucket: Numbers, of_message: Numbers, of_byte: Numbers, backward_s: Numbers) -> Numbers:
    """Return the seconds from the end of backward to the end of the last sum.

    gradients, bucket: bytes; of_message, of_byte: seconds that a sum takes for each message, and for each byte.
    """
    many = np.maximum(1.0, np.ceil(np.asarray(gradients) / bucket))
    each = of_message + np.minimum(bucket, np.asarray(gradients)) * of_byte
    all_of_them = many * of_message + np.asarray(gradients) * of_byte
    return np.maximum(each, backward_s / many + all_of_them - backward_s)


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
    """Seconds of a step by category; their sum is the step. `plan.report.explain.MEANING` says what each is."""

    parts = OF_TIME

    ideal: Numbers
    matmul: Numbers
    attention: Numbers
    pointwise: Numbers
    host: Numbers
    recompute: Numbers
    offload: Numbers
    tensor: Numbers
    context: Numbers
    experts: Numbers
    pipeline: Numbers
    bubble: Numbers
    gradients: Numbers
    optimizer: Numbers
    other: Numbers


class StepModel(WaitModel):
    """Seconds of a step, for plans of one workload on one kind of cluster, or of as many as there are plans."""

    def predict(self) -> StepTime:
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
        gradients = m * per_rank * gathered + self._gradients(mean)
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
    def layer_s(self) -> Numbers:
        """Seconds of a layer's forward and backward on a microbatch, with what it waits for."""
        layer, waits = self.mean_layer, self.waits
        return layer.forward + self.layer_backward_s + self.recomputed_s + sum(vars(waits).values())

    @cached_property
    def mean_microbatch_s(self) -> Numbers:
        """Seconds of a microbatch on a rank of mean work."""
        return (self.work.layers * self.layer_s + self.of_head_s) / self.plans.pp

    # What comes once a step

    def _gradients(self, window: Numbers) -> Numbers:
        """Return the wait of ZeRO 0 to 2 for one sum of all gradients a step, of which the last backward hides a part,
        and for the updated values, which may travel under the next forward."""
        plans, system, constants = self.plans, self.system, self.constants
        dense, experts = self.summed_parameters
        updated = np.where(plans.is_("precision", "fp32"), 4, system.updated_bytes)
        updated = np.where(plans.is_("weights", "bf16"), 2, updated)
        updated = np.where(plans.zero == 0, self.reduced_bytes, updated)
        is_tier = (plans.zero > 0) & (plans.dp_replicate > 1)  # ranks that share the state
        in_tiers = (plans.sum_inside > 1) | is_tier
        moved: Numbers = 0.0
        ahead: Numbers = 0.0
        for parameters, group in (dense, self.data_group), (experts, self.expert_data_group):
            back, inside = (gather_s(parameters * updated, each) for each in (group, self.shard_group))
            both = gather_s(parameters * self.reduced_bytes, group) + back
            if group.algorithms:  # over nodes those of the network's, else a ring
                summed = self._over_group_s(parameters * self.reduced_bytes, group)
                both = np.where((plans.zero == 0) & group.crosses, summed, both)
            both = both * np.where(plans.zero == 0, self._share_sent(group.ranks), 1.0)
            back = np.where(plans.zero > 0, np.where(in_tiers, inside, back), 0.0)
            both = np.where(in_tiers, self._sum_s(parameters * self.reduced_bytes) + back, both)
            moved = moved + np.where(parameters > 0, both, 0.0)
            ahead = ahead + np.where(parameters > 0, back * system.gathers_ahead, 0.0)
        taken = self.work.layers / plans.pp * self.taken_s(self.data_group)
        hides, under = 1 - constants.exposed_gradients, np.maximum(0.0, window - taken) * system.overlaps_gradients
        hidden = np.minimum(hides * (moved - ahead), BACKWARD_SHARE * under)
        hidden = hidden + np.minimum(hides * ahead, (1 - BACKWARD_SHARE) * under)
        once = np.where(plans.zero == 3, 0.0, moved - hidden)
        of_shard = self._parameters_here * self.reduced_bytes
        once = once + np.where(plans.zero == 3, self._over_replicas_s(of_shard) * 0.5, 0.0)
        waits = once + system.buckets * (self._bucket_waits(plans.bucket_mb) - self._least_wait)
        return waits + self._compressing(waits)

    @cached_property
    def summed_parameters(self) -> tuple[Numbers, Numbers]:
        """Parameters that are trained on a rank, before ranks share them: dense, and of experts."""
        work = self.work
        dense, experts = self.parameters(work.layers / self.plans.pp)
        of_embedding, of_head = work.trained_embedding, (1 - work.tied) * work.trained_head
        # Without a pipeline both are on the rank; else the first stage has one of them, and the last the other.
        of_ends = np.where(self.plans.pp == 1, of_embedding + of_head, np.maximum(of_embedding, of_head))
        ends = of_ends * work.vocabulary_parameters / self.plans.tp
        beside, beside_experts = self.adapters(work.layers / self.plans.pp)
        return dense * work.trained_dense + ends + beside, experts * work.trained_experts + beside_experts

    @property
    def _parameters_here(self) -> Numbers:
        """Those of them whose state the rank has: the rank with most experts."""
        dense, experts = self.summed_parameters
        return dense / self.plans.shares_state + experts * self.expert_padding / self.expert_ranks

    def _sum_s(self, message: Numbers) -> Numbers:
        """Return the seconds of one message's sum under ZeRO 0 to 2: inside replicas, and over them."""
        n = self.plans.shares_state
        inside = np.where(n > 1, gather_s(message, self.shard_group), 0.0)
        return inside + self._over_replicas_s(np.asarray(message) / n)

    @cached_property
    def _of_sum(self) -> tuple[Numbers, Numbers]:
        """Seconds to start a message's sum, and those of each byte."""
        start = self._sum_s(0.0)
        return start, (self._sum_s(1e6) - start) / 1e6

    def _over_replicas_s(self, message: Numbers) -> Numbers:
        """Return the seconds to sum a message over replicas, tier by tier and back."""
        seconds = np.zeros(1)
        for tier, group in self._inner_tiers:
            seconds = seconds + np.where(tier > 1, 2 * gather_s(message, group), 0.0)
            message = np.asarray(message) / tier
        left, last = self._last_tier
        across = self._over_group_s(message * self._share_sent(left), last)
        return seconds + np.where(left > 1, across, 0.0)

    def _over_group_s(self, message: Numbers, group: Group) -> Numbers:
        """Return the seconds in which the replicas of a group sum a message, as they agree."""
        to_all = self.plans.is_("sync", *SENT_TO_ALL)
        return np.where(to_all, 2 * gather_s(message, group), all_reduce_s(message, group))

    @cached_property
    def _inner_tiers(self) -> list[tuple[Numbers, Group]]:
        """The tiers in which replicas sum before the last, with their sizes."""
        plans = self.plans
        stride, found = plans.tp * plans.shares_state, list[tuple[Numbers, Group]]()
        for tier in plans.sum_inside, plans.sum_between:
            found.append((tier, group_of(tier, stride, self.rates, self.constants)))
            stride = stride * tier
        return found

    @cached_property
    def _last_tier(self) -> tuple[Numbers, Group]:
        plans = self.plans
        inside = plans.sum_inside * plans.sum_between
        left = plans.replicas // plans.sum_inside // plans.sum_between
        return left, group_of(left, plans.tp * plans.shares_state * inside, self.rates, self.constants)

    # Buckets

    def best_bucket_mb(self) -> Ints:
        """Return for each plan the size that waits least, or the usual one if none saves much (`_waits_of_sizes`)."""
        usual = Plan().bucket_mb
        waits = np.stack(np.broadcast_arrays(*self._waits_of_sizes.values()))
        least = np.array(list(self._waits_of_sizes))[np.argmin(waits, axis=0)]
        saved = self._bucket_waits(usual) - waits.min(axis=0)
        return np.where(saved > LEAST_BUCKET_GAIN * self.microbatches * self.mean_microbatch_s, least, usual).astype(
            np.int64
        )

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
        start, of_byte = self._of_sum
        gradients, bucket = sum(self.summed_parameters) * self.gradient_bytes, np.asarray(bucket_mb) * 2.0**20
        of_byte = of_byte * self.reduced_bytes / self.gradient_bytes
        wait = wait_s(gradients, bucket, start, of_byte, BACKWARD_SHARE * self.mean_microbatch_s)
        return np.where((self.plans.zero == 3) | (self.plans.dp * self.plans.cp == 1), 0.0, wait)

    def _share_sent(self, replicas: Numbers) -> Numbers:
        """Return which share of an exact sum's bytes replicas send; compressors send theirs whatever `reduce` says."""
        share = self.compression.share_sent(self.plans, self.work, replicas)
        return np.where(self.plans.is_("sync", *COMPRESSED), share * 4 / self.reduced_bytes, share)

    def _compressing(self, waits: Numbers) -> Numbers:
        """Return what compressing adds to the waits for sums over replicas; sending the bucket before hides a part."""
        plans = self.plans
        inside = plans.sum_inside * plans.sum_between
        mine = self._parameters_here / inside
        seconds = self.compression.seconds(plans, mine, plans.replicas // inside, self.rates)
        return seconds - HIDDEN_SHARE * np.minimum(seconds, waits)

    def _optimizer(self) -> Numbers:
        """Return the seconds to read gradient and state, and to write state and weight.

        Narrow moments are unpacked, updated and packed by one kernel after the other.
        """
        plans, system, mine = self.plans, self.system, self._parameters_here
        of_moments = 2 * system.moment_bytes + 4 * system.widened_bytes
        of_weight = self.gradient_bytes * 2 + of_moments + self.weight_bytes
        moved = self.constants.optimizer * mine * of_weight
        # Gradients go to the host, it updates, new values come back: one after the other (`parallel.offload`).
        copied = mine * (self.gradient_bytes + self.weight_bytes) / self._host_link_bytes_per_s
        on_host = copied + moved / self.rates.host_memory_bytes_per_s
        here = moved / self.rates.memory_bytes_per_s
        return np.where(plans.is_("offload", "optimizer", "all"), on_host, here) + self.orthogonal_s()

    def orthogonal_s(self) -> Numbers:
        """Return the seconds in which Muon makes matrices orthogonal, all of them before the update.

        The ranks of a stage deal the matrices out, gather each, and send each result to all. Stacks that are cut only
        between their experts stay where they are.
        """
        plans, rates, system, seconds = self.plans, self.rates, self.system, np.zeros(1)
        half, fp32 = rates.half * rates.achieved_half, rates.fp32 * rates.achieved_fp32
        rate = np.where(rates.host_waits > 0, fp32, half) * self.constants.matmul
        ranks = plans.world_size // plans.pp
        stage = group_of(ranks, 1, rates, self.constants)
        for one in system.hidden:
            apart, whole = self.are_apart(one), 4 * one.numbers / one.many / plans.tp
            dealt = np.maximum(one.flops / plans.pp / ranks, one.largest_flops)
            here = one.flops / plans.pp / plans.ep / self.expert_ranks * self.expert_padding
            group = self.expert_shard_group if one.are_stacks else self.shard_group
            gather = np.where(group.ranks > 1, gather_s(whole / (plans.ep if one.are_stacks else 1), group), 0.0)
            gather = np.where(plans.zero > 0, gather, 0.0)
            gather = gather + np.where(one.are_stacks & (plans.ep > 1), gather_s(whole, self.expert_group), 0.0)
            gather = gather + np.where(plans.tp > 1, gather_s(whole * plans.tp, self.tensor_group), 0.0)
            result = system.direction_bytes * one.numbers / one.many
            sent = gather_s(result * ranks / np.maximum(1, ranks - 1), stage)  # the whole passes every link
            messages = np.where((ranks > 1) & ~apart, one.many / plans.pp * (gather + sent), 0.0)
            seconds = seconds + np.where(apart, here, dealt) / rate + messages
        return seconds

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
