"""How long a training step takes, by category, in closed form: for one plan, or for 100,000s in one go.

The step of a pipeline rank with M microbatches is M times its stages' forward and backward, plus the bubble, plus what
comes once a step. Shapes are those of one microbatch on one rank: T = microbatch x seq_len / cp tokens, matrices cut by
tp. Every time is that of the slowest rank. What formulas do not say stands in `plan.cost.constants`.

Matmul of m x k by k x n: 2mkn FLOPs at the rate of large matmuls, slowed by (1 + c/m)(1 + c/k)(1 + c/n): tiles at the
edges, and operands that are read too seldom; c grows with the device's FLOPs for each byte of memory bandwidth.
Collectives of a message of S bytes over n ranks: ring all-reduce 2 (n-1)/n S/B + latency, all-gather, reduce-scatter
and all-to-all half of it (Thakur et al. 2005). Bubble: (pp - 1)/v times a microbatch (Narayanan et al. 2021), less
what zero-bubble schedules fill (Qi et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from argosy.plan.cost.breakdown import Breakdown
from argosy.plan.cost.constants import Constants
from argosy.plan.cost.memory_model import MemoryModel
from argosy.plan.cost.network import all_reduce_s, all_to_all_s, gather_s, group_of, send_s
from argosy.plan.cost.rates import Rates, System, in_precision
from argosy.plan.cost.workload import Numbers, Workload
from argosy.plan.layouts import SCHEDULE_NAMES, Layouts
from argosy.plan.pipeline import SPLITTING

BACKWARD_ATTENTION = 2.5
"""Attention's backward over its forward: it computes the scores again (Dao 2023)."""
BACKWARD_POINTWISE = 1.6
"""Backward reads the gradient beside what forward read, and writes one result."""
HOST_LINK = 0.8
"""Share of the link to the host that large copies from pinned memory reach (PCIe 4.0: 25 of 32 GB/s)."""
INTENSITY = 156e0
"""FLOPs for each byte of memory bandwidth of an A100 in bf16, for which `Constants.half_size` is stated."""
FULL_HEAD = 128
"""Head width from which tiled attention is as fast as it gets: half as wide, it takes as many exponentials for half the
FLOPs (Shah et al. 2024: 0.65 to 0.75 of the FLOP/s)."""
FUSED_EXCHANGE = 0.6
"""Passes over rows on their way to experts that are left where the exchange sorts them itself (DeepEP, HybridEP)."""
BIAS_PASSES = 4
"""Over experts' results where they have biases, which are added expert by expert and put together again."""
BUBBLE_LEFT = {
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved_1f1b": 1.0,
    "interleaved_zero_bubble": 1 / 3,
    "zbv": 1 / 6,
    "dualpipev": 1 / 6,
}
"""Share of 1F1B's bubble, at the same number of stages on a rank: ZB-H1 a third; V-shaped ones none but for what the
gradient norm's synchronisation leaves (planner notes: about 8 % of a step of few microbatches)."""


@dataclass(frozen=True)
class StepTime(Breakdown):
    """Seconds of a step by category; they add up to the step."""

    ideal: Numbers
    """Model FLOPs at the data sheet's rate."""
    matmul: Numbers
    """What matmuls take beyond that: rates never reached, shapes, narrow formats' conversions."""
    attention: Numbers
    """What attention takes beyond that."""
    pointwise: Numbers
    """Operations as fast as memory is."""
    host: Numbers
    """Kernels so small that the host cannot start them fast enough."""
    recompute: Numbers
    offload: Numbers
    """Waiting for activations on their way to the host's memory and back."""
    tensor: Numbers
    """Waiting for tensor-parallel ranks."""
    context: Numbers
    experts: Numbers
    """Waiting for tokens on their way to experts, and for the busiest of these."""
    pipeline: Numbers
    """Waiting for sends between stages."""
    bubble: Numbers
    """Stages with nothing to do, and stages shorter than the longest."""
    gradients: Numbers
    """Waiting for data-parallel ranks: sums of gradients, gathering of parameters."""
    optimizer: Numbers
    other: Numbers
    """What every step costs besides, and stragglers."""


@dataclass(frozen=True)
class Layer:
    """Seconds of forward of one layer, or of what is around the layers, for one microbatch."""

    matmul: Numbers
    attention: Numbers
    pointwise: Numbers

    @property
    def forward(self) -> Numbers:
        return self.matmul + self.attention + self.pointwise

    @property
    def backward(self) -> Numbers:
        return 2 * self.matmul + BACKWARD_ATTENTION * self.attention + BACKWARD_POINTWISE * self.pointwise

    def __add__(self, other: Layer) -> Layer:
        return Layer(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: Numbers) -> Layer:
        return Layer(*(getattr(self, f.name) * times for f in fields(self)))


class StepModel:
    """The cost of plans for one workload on one kind of cluster, or of as many as there are plans."""

    def __init__(self, plans: Layouts, work: Workload, rates: Rates, system: System, constants: Constants):
        self.p, self.w, self.r, self.s, self.c = plans, work, rates, system, constants
        p, w, r = plans, work, rates
        self.microbatches = np.maximum(1, w.global_batch / (p.dp * p.microbatch))
        self.tokens = p.microbatch * w.seq_len / p.cp
        self.element = np.where(p.precision == 0, 4.0, 2.0)
        self.peak = in_precision(p.precision, r.fp32, r.half, r.narrow)
        achieved = in_precision(p.precision, r.achieved_fp32, r.achieved_half, r.achieved_narrow)
        self.rate = self.peak * achieved * constants.matmul
        self.half_size = constants.half_size * self.rate / r.memory_bytes_per_s / INTENSITY
        self.attention_rate = in_precision(
            p.precision, r.fp32 * r.achieved_fp32, r.half * r.achieved_half, r.half * r.achieved_half
        ) * (constants.attention * system.attention)
        fused = np.where(p.compile, system.fused, 0.0)
        self.kernels = np.where(fused > 0, 0.5, 1.0)
        self.passes = 1 + np.where(fused > 0, 0.0, constants.unfused)
        self.shared = np.where(system.sequence_parallel > 0, p.tp, 1)
        self.tensor_group = group_of(p.tp, 1, r, constants)
        self.context_group = group_of(p.cp, p.tp, r, constants)
        self.data_group = group_of(p.dp * p.cp, p.tp, r, constants)
        self.shard_group = group_of(p.dp_shard * p.cp, p.tp, r, constants)
        stride = np.where(system.whole_experts > 0, 1, p.tp)
        self.expert_group = group_of(p.ep, stride, r, constants)
        copies = p.cp * p.tp / (p.ep * stride)  # of an expert among the ranks of one replica
        self.expert_data_group = group_of(np.maximum(1, p.dp * copies), p.ep * stride, r, constants)
        self.expert_shard_group = group_of(np.maximum(1, p.dp_shard * copies), p.ep * stride, r, constants)

    def predict(self) -> StepTime:
        """Seconds of a step by category."""
        p, w, c = self.p, self.w, self.c
        m = self.microbatches
        layer, again = self._mean_layer, self._recomputed
        per_rank = w.layers / p.pp
        head = self._head
        forward_backward = layer.forward + layer.backward + again
        tensor = self._tensor()
        context = self._context(layer)
        experts = self._experts()
        gathered = self._gathered(forward_backward)
        offload = self._offload(layer)
        host = self._host(forward_backward + tensor + context + experts + gathered)
        of_layer = forward_backward + host + offload + tensor + context + experts + gathered
        of_head = head.forward + head.backward
        heaviest = self._heaviest(of_layer, of_head)
        mean = (w.layers * of_layer + of_head) / p.pp
        sends = self._sends()
        bubble = self._bubble(mean + sends) + m * (heaviest - mean)
        of_matmuls, of_attention = self._ideal()
        gradients = m * per_rank * gathered + self._gradients(m * mean, mean)
        times = StepTime(
            ideal=of_matmuls + of_attention,
            matmul=3 * m * (per_rank * layer.matmul + head.matmul / p.pp) - of_matmuls,
            attention=m * per_rank * (1 + BACKWARD_ATTENTION) * layer.attention - of_attention,
            pointwise=m * (1 + BACKWARD_POINTWISE) * (per_rank * layer.pointwise + head.pointwise / p.pp),
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
        nodes = np.maximum(1, p.world_size / self.r.node)
        return StepTime(**{**vars(times), "other": c.step + c.straggling * np.log2(nodes) * times.total})

    # What a layer computes

    @cached_property
    def _mean_layer(self) -> Layer:
        """The mean over all layers, of which some may have experts."""
        w = self.w
        moe = w.moe_layers / w.layers
        return self._attention() + self._feed_forward() * (1 - moe) + self._mixture * moe + self._around()

    def _matmul(self, m: Numbers, k: Numbers, n: Numbers, rate: Numbers | None = None) -> Layer:
        """Forward of a matmul, with what a narrow format's conversions cost."""
        rate = self.rate if rate is None else rate
        flops, half = 2 * m * k * n, self.half_size
        slow = (1 + half / np.maximum(1, m)) * (1 + half / np.maximum(1, k)) * (1 + half / np.maximum(1, n))
        converted = (m * k + m * n + k * n) * self.element / self.r.memory_bytes_per_s
        quantize = np.where(self.p.precision == 3, self.c.quantize * converted / 2, 0.0)
        return Layer(flops / rate * slow + quantize, 0.0, 0.0)

    def _attention(self) -> Layer:
        """Projections and the attention itself."""
        w, p, tokens = self.w, self.p, self.tokens
        queries, values = w.heads * w.key_width / p.tp, w.heads * w.value_width / p.tp
        kv_heads = np.maximum(1, w.kv_heads / p.tp)
        plain = self._matmul(tokens, w.width, queries + kv_heads * (w.key_width + w.value_width))
        down, up = self._matmul(tokens, w.width, w.q_rank), self._matmul(tokens, w.q_rank, queries)
        direct = self._matmul(tokens, w.width, queries)
        has_rank = np.where(w.q_rank > 0, 1.0, 0.0)
        unrotated = w.key_width - w.rope_width
        latent = (
            (down + up) * has_rank
            + direct * (1 - has_rank)
            + self._matmul(tokens, w.width, w.kv_rank + w.rope_width)
            + self._matmul(tokens, w.kv_rank, w.heads / p.tp * (unrotated + w.value_width))
        )
        is_latent = np.where(w.kv_rank > 0, 1.0, 0.0)
        return latent * is_latent + plain * (1 - is_latent) + self._matmul(tokens, values, w.width) + self._scores

    @cached_property
    def _scores(self) -> Layer:
        """Scores and their weighted sum of values."""
        w, p, s = self.w, self.p, self.s
        flops = self._score_flops()
        narrow = np.sqrt(np.minimum(1.0, w.key_width / FULL_HEAD))
        tiled = flops / (self.attention_rate * narrow)
        all_scores = self.tokens * w.seq_len * w.heads / p.tp
        passes = (self.c.score_passes + 4 * s.dropout) * self.element * all_scores / self.r.memory_bytes_per_s
        whole = flops * w.seq_len / w.span / self.rate + passes
        return Layer(0.0, np.where(s.flash > 0, tiled, whole), 0.0)

    def _score_flops(self) -> Numbers:
        w = self.w
        return 2 * self.tokens * w.span * w.heads / self.p.tp * (w.key_width + w.value_width)

    def _feed_forward(self) -> Layer:
        return self._mlp(self.tokens, self.w.ffn_width / self.p.tp)

    def _mlp(self, tokens: Numbers, hidden: Numbers) -> Layer:
        """A feed-forward, gated or not."""
        w = self.w
        up = self._matmul(tokens, w.width, (w.ffn_matrices - 1) * hidden)
        moved = self.c.pointwise_ffn * w.ffn_matrices / 3 * tokens * hidden * self.element * self.passes
        return up + self._matmul(tokens, hidden, w.width) + Layer(0.0, 0.0, moved / self.r.memory_bytes_per_s)

    @cached_property
    def _mixture(self) -> Layer:
        """Router, experts for the tokens that come to this rank at an even load, shared experts."""
        w, p, s, c = self.w, self.p, self.s, self.c
        cut = np.where(s.whole_experts > 0, 1, p.tp)
        pairs = self.tokens / (p.tp / cut) * w.experts_per_token
        experts_here = np.maximum(1, w.experts / p.ep)
        of_one = pairs / experts_here
        rate = self.rate * c.expert_matmul
        hidden = w.expert_ffn_width / cut
        grouped = self._matmul(of_one, w.width, (w.ffn_matrices - 1) * hidden, rate) + self._matmul(
            of_one, hidden, w.width, rate
        )
        fused = np.where(s.sends_once > 0, FUSED_EXCHANGE, 1.0)
        results = (w.ffn_matrices - 1) * hidden + w.width
        moved = c.permute * fused * pairs * w.width + c.pointwise_ffn * pairs * hidden
        moved = moved + w.expert_biases * BIAS_PASSES * pairs * results
        sorting = Layer(0.0, 0.0, moved * self.element * self.passes / self.r.memory_bytes_per_s)
        router = self._matmul(self.tokens / self.shared, w.width, w.experts)
        return grouped * experts_here + sorting + router + self._mlp(self.tokens, w.shared_ffn_width / p.tp)

    def _around(self) -> Layer:
        """Norms, residuals, rotary embedding, dropout."""
        moved = (self.c.pointwise + 3 * self.s.dropout) * self.tokens / self.shared * self.w.width * self.element
        return Layer(0.0, 0.0, moved * self.passes / self.r.memory_bytes_per_s)

    @cached_property
    def _head(self) -> Layer:
        """Logits and loss of one microbatch, on the last stage; in half precision even where layers are narrower."""
        w, p = self.w, self.p
        rate = in_precision(p.precision, self.r.fp32 * self.r.achieved_fp32, *2 * [self.r.half * self.r.achieved_half])
        logits = self.tokens * w.vocab_size / p.tp
        flops = 2 * logits * w.width
        return Layer(flops / (rate * self.c.matmul), 0.0, 10 * logits / self.r.memory_bytes_per_s)

    def _ideal(self) -> tuple[Numbers, Numbers]:
        """Seconds of the model's FLOPs at the data sheet's rates, shared out evenly: of matmuls, of attention."""
        w, r, precision = self.w, self.r, self.p.precision
        tokens = w.global_batch * w.seq_len / self.p.world_size
        half = in_precision(precision, r.fp32, r.half, r.half)
        layers = 6 * (w.matmul_parameters - w.vocabulary_parameters) / self.peak + 6 * w.vocabulary_parameters / half
        return tokens * layers, tokens * (w.train_flops_per_token - 6 * w.matmul_parameters) / half

    @cached_property
    def _recomputed(self) -> Numbers:
        """Seconds of what a layer computes a second time: all of it, or what is cheap (untiled: the scores)."""
        p, s = self.p, self.s
        layer = self._mean_layer
        cheap = layer.pointwise * 0.5 + np.where(s.flash > 0, 0.0, layer.attention)
        which = np.where(p.recompute == 2, layer.forward, np.where(p.recompute == 1, cheap, 0.0))
        return which / p.recompute_every

    def _host(self, device: Numbers) -> Numbers:
        """What the host adds to a layer that takes the device so many seconds.

        It starts kernels ahead of the device, so that the slower of both counts; softened, as neither is spread evenly.
        """
        p, w, c = self.p, self.w, self.c
        of_experts = c.host_experts + c.host_expert * np.maximum(1, w.experts / p.ep)
        needed = c.host * np.where(p.compile, 0.5, 1.0) + w.moe_layers / w.layers * of_experts * self.s.launched
        beyond = np.sqrt(np.hypot(device * device, needed * needed)) - device
        return np.where(self.r.host_waits > 0, needed, beyond)

    # What a layer waits for

    @cached_property
    def _forwards(self) -> Numbers:
        """How often a layer's forward communication happens, backward's counted as one more."""
        return 2 + np.where(self.p.recompute == 2, 1 / self.p.recompute_every, 0.0)

    def _tensor(self) -> Numbers:
        """Two sums a layer and direction over tensor-parallel ranks; a reduce-scatter and an all-gather are one."""
        p, w = self.p, self.w
        message = self.tokens * w.width * np.where(p.precision == 0, 4, 2)
        exposed = self.c.exposed_tensor * np.where(self.s.overlaps_tensor > 0, 0.5, 1.0)
        return 2 * self._forwards * exposed * all_reduce_s(message, self.tensor_group, self.s.sequence_parallel == 0)

    def _context(self, layer: Layer) -> Numbers:
        """A ring of keys and values under attention, or the exchange of heads for tokens."""
        p, w = self.p, self.w
        kv = self.tokens * np.maximum(1, w.kv_heads / p.tp) * (w.key_width + w.value_width) * self.element
        around = (p.cp - 1) * send_s(kv, self.context_group)
        behind = np.maximum(0.0, around - layer.attention * self._forwards / 2)
        ring = np.where(p.cp > 1, self._forwards * (self.c.exposed_context * around + behind), 0.0)
        heads = self.tokens * (2 * w.heads + 2 * w.kv_heads) / p.tp * w.value_width * self.element
        ulysses = self._forwards * all_to_all_s(heads, self.context_group)
        return np.where(p.context == 1, ulysses, ring)

    def _experts(self) -> Numbers:
        """Tokens to their experts and back; and the wait for the busiest."""
        p, w, c = self.p, self.w, self.c
        copies = self._copies(p.ep) * np.where(w.experts > 0, 1.0, 0.0)
        message = self.tokens / self.shared * copies * w.width * np.where(p.precision == 0, 4, 2)
        exposed = c.exposed_experts * np.where(self.s.overlaps_experts > 0, 0.25, 1.0)
        exchange = 2 * self._forwards * exposed * all_to_all_s(message, self.expert_group, self._crossing())
        mixture = self._mixture
        busiest = (c.imbalance - 1) * np.where(self.s.even_experts > 0, 0.0, mixture.forward + mixture.backward)
        return w.moe_layers / w.layers * (exchange + np.where(p.ep > 1, busiest, 0.0))

    def _copies(self, places: Numbers) -> Numbers:
        """Of a token: one for each of its experts, or one for each rank, or node, of so many that it goes to."""
        k = np.maximum(1, self.w.experts_per_token)
        return np.where(self.s.sends_once > 0, np.minimum(k, places * (1 - (1 - 1 / places) ** k)), k)

    def _crossing(self) -> Numbers:
        """Of a token's copies to ranks, the share that crosses the network."""
        nodes = np.maximum(1, self.p.ep * np.where(self.s.whole_experts > 0, 1, self.p.tp) / self.r.node)
        return np.minimum(1, self._copies(nodes) / self._copies(self.p.ep))

    def _gathered(self, compute: Numbers) -> Numbers:
        """ZeRO 3: what gathering a layer's parameters and scattering its gradients adds to its compute."""
        p, s = self.p, self.s
        dense, experts = self._parameters_here(p.pp)
        gathers = np.where(p.pp > 1, 1 + 1 / self.microbatches, 2.0)  # a pipeline gives up nothing after a backward
        gathers = gathers + (self._forwards - 2) * s.gathers_recomputed
        times = np.where(s.sums_once > 0, 1 / self.microbatches, 1.0)
        moved = (s.gathers - 1) * (gathers + times) * gather_s(0.0, self.shard_group)
        for parameters, group in (dense, self.shard_group), (experts, self.expert_shard_group):
            gather = gather_s(parameters * self.element, group) * gathers
            both = gather + times * gather_s(parameters * s.reduced_bytes, group)
            moved = moved + np.where(parameters > 0, both, 0.0)
        under = np.maximum(compute, moved) - compute + self.c.exposed_gradients * np.minimum(moved, compute)
        added = np.where(s.overlaps_gradients > 0, under, moved)
        return np.where((p.zero == 3) & (p.dp_shard * p.cp > 1), added, 0.0)

    # What comes once a step

    def _parameters_here(self, layers: Numbers) -> tuple[Numbers, Numbers]:
        """Parameters on a rank of `layers` layers in all, those outside experts and those of experts."""
        w, p = self.w, self.p
        moe = w.moe_layers / w.layers
        whole = w.whole_parameters
        dense = w.attention_parameters + (1 - moe) * w.ffn_parameters + moe * w.shared_parameters - whole
        cut = np.where(self.s.whole_experts > 0, 1, p.tp)
        return layers / p.pp * (dense / p.tp + whole), layers / p.pp * moe * w.expert_parameters / p.ep / cut

    def _gradients(self, compute: Numbers, window: Numbers) -> Numbers:
        """ZeRO 0 to 2: one sum of all gradients a step, the last microbatch's backward hiding what it can."""
        p, w, s, c = self.p, self.w, self.s, self.c
        dense, experts = self._parameters_here(w.layers)
        dense = dense + w.vocabulary_parameters / p.tp
        updated = np.where(p.zero == 0, s.reduced_bytes, np.where(p.precision == 0, 4, s.updated_bytes))
        moved: Numbers = 0.0
        for parameters, group in (dense, self.data_group), (experts, self.expert_data_group):
            both = gather_s(parameters * s.reduced_bytes, group) + gather_s(parameters * updated, group)
            moved = moved + np.where(parameters > 0, both, 0.0)
        under = 0.6 * window * s.overlaps_gradients
        hidden = np.minimum((1 - c.exposed_gradients) * moved, under)
        once = np.where(p.zero == 3, 0.0, moved - hidden)
        replicas = group_of(p.dp_replicate, p.tp * p.cp * p.dp_shard, self.r, c)
        of_shard = (dense + experts) * s.reduced_bytes / (p.dp_shard * p.cp)
        return once + np.where(p.zero == 3, all_reduce_s(of_shard, replicas) * 0.5, 0.0)

    def _optimizer(self) -> Numbers:
        """Reading gradient and state, writing state and weight."""
        p, s = self.p, self.s
        dense, experts = self._parameters_here(self.w.layers)
        mine = (dense + self.w.vocabulary_parameters / p.tp) / p.shares_state
        mine = mine + experts / np.maximum(1, p.shares_state / p.ep)
        moved = self.c.optimizer * mine * (s.gradient_bytes * 2 + 2 * s.moment_bytes + s.weight_bytes)
        # Gradients to the host, its update, and new values back: one after the other (`parallel.offload`).
        copied = mine * (s.gradient_bytes + s.weight_bytes) / (HOST_LINK * self.r.host_link_bytes_per_s)
        on_host = copied + moved / self.r.host_memory_bytes_per_s
        return np.where(p.is_("offload", "optimizer", "all"), on_host, moved / self.r.memory_bytes_per_s)

    def _offload(self, layer: Layer) -> Numbers:
        """What copying a layer's activations adds: they leave beside forward, and backward waits for their return."""
        if not np.any(self.p.is_("offload", "activations", "all")):
            return np.zeros(1)
        moved = MemoryModel(self.p, self.w, self.s, self.c).moved / (HOST_LINK * self.r.host_link_bytes_per_s)
        return moved + np.where(self.r.host_waits > 0, moved, np.maximum(0.0, moved - layer.forward))

    # The pipeline

    def _heaviest(self, of_layer: Numbers, of_head: Numbers) -> Numbers:
        """Seconds of a microbatch on the slowest rank."""
        p, w = self.p, self.w
        stages = p.pp * p.stages_here
        worth = of_head / of_layer
        balanced = np.maximum((w.layers + worth) / stages, np.ceil(w.layers / stages))
        even = np.ceil(w.layers / stages) + worth / p.stages_here
        layers = np.where(self.s.balanced_stages > 0, np.maximum(balanced, worth), even)
        return np.where(p.pp == 1, w.layers * of_layer + of_head, layers * p.stages_here * of_layer)

    def _bubble(self, of_microbatch: Numbers) -> Numbers:
        p = self.p
        left = np.array([BUBBLE_LEFT[name] for name in SCHEDULE_NAMES])[p.schedule]
        filled = left * (p.pp - 1) / p.stages_here * of_microbatch
        # One microbatch's way through all ranks and back; where backward is split, weights' gradients can wait.
        way = np.where(p.is_("schedule", *SPLITTING), 2 / 3, 1.0) * p.pp
        return np.maximum(filled, (way - self.microbatches) * of_microbatch)

    def _sends(self) -> Numbers:
        """Hidden states to the next stage, gradients back, of one microbatch on one rank."""
        p, w = self.p, self.w
        message = self.tokens / self.shared * w.width * np.where(p.precision == 0, 4, 2)
        group = group_of(p.pp, p.tp * p.cp * p.dp, self.r, self.c)
        return np.where(p.pp > 1, self.c.exposed_pipeline * 2 * p.stages_here * send_s(message, group), 0.0)
