"""The seconds of inference: forward passes of prefill and decode, and the latencies of requests that share a replica.

A replica is cut over tp x pp devices. A forward pass of some tokens takes, in each layer, the longer of computing and
of reading the weights (of the experts, those that any token chose: E (1 - (1 - k/E)^tokens)), with a soft maximum,
because neither hides the other entirely; beside that attention (its FLOPs in prefill, reading the cache in decode), two
sums over tp ranks, and a time that no roofline has: launches and gaps between kernels for each layer, scheduling for
each pass, sampling and bookkeeping for each sequence (roofline: Williams et al. 2009; Pope et al. 2022, "Efficiently
Scaling Transformer Inference"; continuous batching: Yu et al. 2022, "Orca"; chunked prefill: Agrawal et al. 2024,
"Sarathi-Serve"). Engines replay decode passes from a captured graph; a pass with prompts, whose shape is new each time,
is launched kernel by kernel, and takes no less than its host needs for that. The numbers of it that no formula gives
are in `serving_constants`.

The cache of a token holds its keys and values in each layer; with latent attention, the latent and the rotated key
(DeepSeek-AI 2024), which all tp ranks have whole. A layer with a window keeps those of its window. A gated delta-net
keeps none: its state is of one size for any sequence, and is read and written for each token.

All figures are numbers, or columns of one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy.errors import UserError
from argosy.plan.cost.rates import Rates
from argosy.plan.cost.serving_constants import ServingConstants, ServingEngine, fitted_serving
from argosy.plan.hardware.devices import Device, Format
from argosy.plan.workload import Numbers, Workload

Floats = NDArray[np.float64]

ENGINE_MEMORY_SHARE = 0.9
"""Share of a device's memory that engines take (vLLM's gpu_memory_utilization and TensorRT-LLM's default)."""
WORKSPACE_BYTES = 2e9
"""Bytes of activations of `CHUNK_TOKENS`, graphs and collectives' buffers beside weights and cache; assumed."""
CHUNK_TOKENS = 8192
"""Most prompt tokens of a pass: vLLM's and TensorRT-LLM's max_num_batched_tokens of 8192."""
ACTIVATION_BYTES = 2.0
BYTES_OF_WEIGHT = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.53, "fp4": 0.5625}
"""Bytes of a weight with its scales: groups of 128 (int4), of 16 (NVFP4)."""
NARROW_ACTIVATIONS: tuple[Format, ...] = ("fp8", "fp4")
"""Formats of weights that activations are rounded to as well, where the device has matmuls for them."""
CACHES = {"16": 2.0, "fp8": 1.0}
"""Bytes of a number in the cache."""
ADMITTED = 0.1
"""Share of an answer's cache that has to be free when its prompt is let in; assumed."""
SOFTNESS = 3.0
"""Exponent p of the soft maximum (x^p + y^p)^(1/p); assumed."""
SHARING_HEADS = 512
"""Query heads of all sequences of a pass above which vLLM of 2024 takes the attention on AMD's devices in which each
reads the cache for itself (paged_attention_v1 if num_seqs * num_heads > 512)."""
UNTUNED = {"MI300X": 7.2}
"""Device -> time of products with dense weights by libraries that nobody tuned for it over that of tuned ones, in 2024:
what tuning gave vLLM at most (nscale.com, June 2024). Experts have kernels of vLLM's own."""
HALF_WAVES = 1.34
"""Time of matrix-vector products in warps of 32 on devices of 64 over that in 64 (llama.cpp pull request 11519)."""
WITHOUT_OWN_SUMS = ("DeepSpeed", "DeepSpeed-MII", "FasterTransformer")
"""Engines of 2024 and earlier without kernels of their own for small sums."""
UNEVEN = 1.0
"""Standard deviation of the tokens of an expert over their mean; assumed, as if popularity were exponential."""
MOST_GUESSES = 1024
"""Most guesses of a pass: published drafts have up to some tens."""


@dataclass(frozen=True)
class Formats:
    """Bytes of numbers, and the rate of matmuls."""

    weight_bytes: Numbers
    """Bytes of a weight, its scales included."""
    cache_bytes: Numbers
    """Bytes of a number in the cache."""
    flops_per_s: Numbers
    """FLOP/s of large matmuls in the format that they compute in."""
    narrow: Numbers = 0.0
    """1 where that format has 8 bits or fewer."""


@dataclass(frozen=True)
class ReplicaCut:
    """The split of a replica over devices."""

    tp: Numbers
    pp: Numbers = 1
    experts: Numbers = 0
    """Devices that the experts are dealt to, if each has attention for sequences of its own; 0: cut over tp."""


@dataclass(frozen=True)
class Draft:
    """Speculative or multi-token decoding: cheap guesses that a pass of the model checks (Leviathan et al. 2023)."""

    tokens: int = 0
    """Guesses a pass."""
    accepted: float = 0.7
    """Probability that a guess is right, given those before it are."""
    cost: float = 0.05
    """Time of a guess over that of a pass: a draft model of a twentieth, or one layer for several tokens."""

    @property
    def kept(self) -> float:
        """Tokens that a pass yields for a sequence, on average."""
        return float(sum(self.accepted**k for k in range(self.tokens + 1)))


@dataclass(frozen=True)
class ServingOptions:
    """Settings of the command line of an engine, and the kernels that its release has for a device."""

    eager: Numbers = 0.0
    """1: no pass is replayed from a captured graph."""
    gaps: Numbers = 0.0
    """1: kernels that are launched one by one leave gaps on the device, which nothing hides."""
    untuned: Numbers = 1.0
    """Time of products with dense weights over that of tuned ones, where it is bound by computing."""
    chunk: Numbers = CHUNK_TOKENS
    """Most prompt tokens of a pass; room for the activations of so many is kept free."""
    sharing_heads: Numbers = np.inf
    """Query heads of all sequences of a decode pass above which each reads the cache of its key for itself."""
    library_sums: Numbers = 0.0
    """1: small sums go by NCCL or RCCL, as large ones do."""
    reads: Numbers = 1.0
    """Bandwidth of reading weights over that of most engines."""

    @classmethod
    def of(cls, engine: ServingEngine, device: Device) -> ServingOptions:
        """Return the options that an engine has by default on a device."""
        # HIP graphs of 2024 gained nothing (ROCm/clr issue 77) or lost (llama.cpp pull request 22254).
        if device.vendor == "AMD" and engine.name == "llama.cpp":  # no attention that shares reads
            return cls(eager=1.0, gaps=1.0, sharing_heads=0.0, reads=1 / HALF_WAVES)
        if device.vendor == "AMD" and engine.label == "vLLM old":
            untuned = UNTUNED.get(device.name, 1.0)
            return cls(eager=1.0, gaps=1.0, sharing_heads=SHARING_HEADS, library_sums=1.0, untuned=untuned)
        return cls(library_sums=float(engine.name in WITHOUT_OWN_SUMS))


class ServingSoftware(NamedTuple):
    """An engine on a device: what is known of it there."""

    engine: ServingEngine
    constants: ServingConstants
    options: ServingOptions

    @classmethod
    def of(cls, text: str, device: Device, asked: str) -> ServingSoftware:
        """Return the engine that a text names, as "vLLM 0.10", on a device; "": the mean of all engines.

        asked: the option or key that named it. Raises: UserError if no such engine is known.
        """
        engine = ServingEngine.of(text)
        if text and not engine.name:
            raise UserError(f"{asked} {text}: not known. Try vLLM, SGLang or TensorRT-LLM.")
        constants = fitted_serving().of(engine, device.vendor, device.name)
        return cls(engine, constants, ServingOptions.of(engine, device))


@dataclass(frozen=True)
class ServingLoad:
    """Requests that a replica answers at a time."""

    sequences: Numbers
    prompt: Numbers
    """Tokens of each prompt."""
    output: Numbers
    """Tokens of each answer."""
    together: Numbers = 0.0
    """1: all begin at once, as a fixed batch; 0: each begins when another ends (continuous batching)."""
    first: Numbers = -1.0
    """Share of a benchmark's requests that come at once at its beginning; below 0: not known."""


@dataclass(frozen=True)
class Latencies:
    """Seconds of a request, on average."""

    ttft_s: Floats
    """Seconds to the first token, waiting for room included."""
    tpot_s: Floats
    """Between two tokens, pauses for other requests' prefill included."""
    e2e_s: Floats
    """Seconds to the last token; of a fixed batch, of all its sequences."""
    tokens_per_s: Floats
    """Output tokens of the replica a second, while requests come."""
    room: Floats
    """Sequences that have their cache in memory at a time, at half of their output."""

    def reached(self, load: ServingLoad) -> Floats:
        """Return the output tokens of the replica a second: those of the requests on the way, by the time that each
        takes, and not more than prefill and decode let through."""
        return np.minimum(load.sequences * load.output / self.e2e_s, self.tokens_per_s)


class ServingModel:
    """Predicts the passes of one replica and the latencies of requests."""

    def __init__(
        self,
        work: Workload,
        rates: Rates,
        cut: ReplicaCut,
        formats: Formats,
        constants: ServingConstants,
        cached_layers: Numbers | None = None,
        draft: Draft | None = None,
        options: ServingOptions | None = None,
    ):
        """Set the model up; cached_layers: layers whose cache grows with the sequence (default: all)."""
        self.draft, self.options = draft or Draft(), options or ServingOptions()
        self.work, self.rates, self.cut, self.formats = work, rates, cut, formats
        self.constants = constants
        self.cached_layers = self.scored_layers = work.layers if cached_layers is None else cached_layers
        if cached_layers is None:  # of a prompt, layers with windows score less than half, gated delta-nets nothing
            self.scored_layers = work.layers * (2 * work.attention_span / work.seq_len)
        self.ep = np.maximum(cut.tp, cut.experts)

    @property
    def token_cache_bytes(self) -> Floats:
        """Bytes of a token's cache on one device of each stage, all its layers; with windows, on average."""
        work = self.work
        whole = work.kv_heads_on(self.cut.tp, cached=True) * work.kv_width
        of_layer = np.where(np.asarray(work.kv_rank) > 0, work.kv_rank + work.rope_width, whole)
        layers = self.cached_layers * work.cached_share
        return np.asarray(of_layer * self.formats.cache_bytes * layers / self.cut.pp, float)

    @property
    def weights_bytes(self) -> Floats:
        """Bytes of weights on one device."""
        work, cut = self.work, self.cut
        experts = work.moe_layers * work.expert_parameters
        rest = work.matrix_parameters - experts - (2 - work.tied) * work.vocabulary_parameters
        vocabulary = (2 - work.tied) * work.vocabulary_parameters * 2.0  # engines keep them in 16 bits
        split = (experts / self.ep + rest / cut.tp) * self.formats.weight_bytes + vocabulary / cut.tp
        return np.asarray(split / cut.pp, float)

    @property
    def state_bytes(self) -> Floats:
        """Bytes of a sequence's states of gated delta-nets on one device of each stage; engines keep them in fp32."""
        return np.asarray(4 * self.work.delta_layers * self.work.delta_state / self.cut.tp / self.cut.pp, float)

    @property
    def workspace_bytes(self) -> Floats:
        """Bytes of activations, graphs and collectives' buffers on one device."""
        work = self.work
        # The hidden state and its residual, gate and up of a feed-forward and their product.
        widths = 2 * work.width + 3 * work.widest_ffn / self.cut.tp
        more = np.maximum(0.0, np.asarray(self.options.chunk) - CHUNK_TOKENS) * widths * ACTIVATION_BYTES
        return np.asarray(WORKSPACE_BYTES + more, float)

    def room(self, tokens: Numbers) -> Floats:
        """Return how many sequences of `tokens` have their cache in memory; below 1 if weights leave too little."""
        free = ENGINE_MEMORY_SHARE * self.rates.memory_bytes - self.weights_bytes - self.workspace_bytes
        return np.asarray(free / (self.token_cache_bytes * tokens + self.state_bytes), float)

    def pass_s(self, tokens: Numbers, sequences: Numbers, span: Numbers, cached: Numbers) -> Floats:
        """Return the seconds of a pass through all layers.

        tokens: new tokens of all sequences; sequences: those that get a token; span: tokens that a new one attends to
        and that are computed with (prefill), 0 in decode; cached: tokens whose cache is read.
        """
        return np.asarray(sum(self.pass_parts(tokens, sequences, span, cached).values()))

    def pass_parts(self, tokens: Numbers, sequences: Numbers, span: Numbers, cached: Numbers) -> dict[str, Floats]:
        """Return the seconds of a pass by what they are spent on."""
        parts = {
            "weights": self._matmul_s(tokens, sequences),
            "attention": self._attention_s(tokens, sequences, span, cached),
            "exchange": self._exchange_s(tokens),
        }
        parts = {name: np.asarray(seconds * self.constants.compute) for name, seconds in parts.items()}
        overhead = self._overhead_s(sequences) * self.constants.overhead
        is_eager = (np.asarray(span) > 0) | (np.asarray(self.options.eager) > 0)
        launched = np.where(is_eager, self.work.layers * self.constants.eager_layer_s, 0.0)
        whole = sum(parts.values()) + overhead
        ends = np.where(np.asarray(self.options.gaps) > 0, whole + launched, _soft_max(whole, launched))
        return parts | {"overhead": np.asarray(overhead + ends - whole)}

    def _matmul_s(self, tokens: Numbers, sequences: Numbers) -> Floats:
        """Return the seconds of reading weights and multiplying with them."""
        work, rates, constants, formats, tp = self.work, self.rates, self.constants, self.formats, self.cut.tp
        filled = 1 / (1 + constants.half_tokens / tokens)
        full = formats.flops_per_s * constants.matmul * np.where(np.asarray(formats.narrow) > 0, constants.narrow, 1.0)
        rate, untuned = full * filled, self.options.untuned
        of_dense = np.minimum(rate, full / untuned)
        reads = rates.memory_bytes_per_s * constants.bandwidth * self.options.reads
        shared = work.moe_layers * work.router_and_shared_parameters
        dense = work.layers * work.attention_parameters + work.dense_layers * work.ffn_parameters + shared
        seconds = _soft_max(2 * tokens * dense / tp / of_dense, dense * formats.weight_bytes / tp / reads)
        head = work.vocabulary_parameters / tp
        seconds += _soft_max(2 * sequences * head * untuned / (rates.half * constants.matmul), head * 2.0 / reads)
        chosen = work.experts_per_token / np.maximum(1.0, work.experts)
        # Of attention for sequences of its own, each device sends its tokens to all: experts see those of all devices.
        routed = tokens * np.maximum(1.0, self.ep / tp)
        hit = 1 - (1 - chosen) ** routed
        of_experts = work.moe_layers * work.expert_parameters
        # All wait for the busiest device that whole experts are dealt to: the largest of so many normal numbers.
        dealt = np.where(np.asarray(self.ep) > np.asarray(tp), self.ep, 1.0)
        busiest = 1 + UNEVEN * np.sqrt(2 * np.log(dealt) * dealt / np.maximum(1.0, work.experts))
        computed = busiest * 2 * routed * of_experts * chosen / self.ep / (rate * constants.experts)
        return np.asarray(seconds + _soft_max(computed, of_experts * hit * formats.weight_bytes / self.ep / reads))

    def _attention_s(self, tokens: Numbers, sequences: Numbers, span: Numbers, cached: Numbers) -> Floats:
        """Return the seconds of attention, of reading the cache, and of what moves through memory outside matmuls."""
        work, rates, constants, tp = self.work, self.rates, self.constants, self.cut.tp
        widths = work.heads * (work.key_width + work.value_width) * self.scored_layers
        flops = 2 * tokens * span * widths + tokens * work.delta_layers * work.delta_flops_per_token
        rate = tp * rates.half * rates.achieved_half * constants.attention
        scores = flops / rate
        read = self._rereads(sequences, span) * cached * self.token_cache_bytes + 2 * sequences * self.state_bytes
        cache = read * self.cut.pp / (rates.memory_bytes_per_s * constants.cache)
        # Each head of latent attention multiplies with the whole latent, so that decoding may be bound by it.
        latent = np.where(np.asarray(work.kv_rank) > 0, 2 * work.kv_rank + work.rope_width, 0.0)
        decoded = 2 * cached * tokens / sequences * work.heads * latent * self.cached_layers
        cache = _soft_max(cache, np.where(np.asarray(span) > 0, 0.0, decoded / rate))
        moved = tokens * work.width * work.layers * ACTIVATION_BYTES * constants.pointwise / tp
        return np.asarray(scores + cache + moved / rates.memory_bytes_per_s)

    def _rereads(self, sequences: Numbers, span: Numbers) -> Floats:
        """Return how often a pass reads the cache."""
        heads = np.maximum(1.0, self.work.heads / self.cut.tp)
        of_key = heads / self.work.kv_heads_on(self.cut.tp, cached=True)
        apart = (np.asarray(span) == 0) & (sequences * heads > np.asarray(self.options.sharing_heads))
        return np.where(apart & (np.asarray(self.work.kv_rank) == 0), of_key, 1.0)

    def _exchange_s(self, tokens: Numbers) -> Floats:
        """Return the seconds of two sums over tp ranks in each layer, of tokens' way to experts, and between stages."""
        work, rates, constants, tp, pp = self.work, self.rates, self.constants, self.cut.tp, self.cut.pp
        message = tokens * work.width * ACTIVATION_BYTES
        across = np.asarray(tp * 1.0 > rates.node)
        # A ring across nodes leaves each by all of its network cards: one channel for each (NCCL).
        cards = rates.nic_bytes_per_s * np.minimum(rates.node, tp)
        ring = np.where(across, np.minimum(cards, rates.link_bytes_per_s), rates.link_bytes_per_s)
        starts = constants.sum_s + constants.sum_hops * rates.link_latency_s + np.where(across, constants.nic_s, 0.0)
        starts = starts + self.options.library_sums * constants.library_s
        starts = starts * constants.overhead / constants.compute  # kernels for small messages are the engine's
        of_sum = np.where(np.asarray(tp) > 1, starts + 2 * (tp - 1) / tp * message / (ring * constants.link), 0.0)
        dealt = np.asarray(self.ep) > np.asarray(tp)
        # Engines gather the tokens of all devices on each, and scatter the sums: vLLM's and TensorRT-LLM's default.
        to_experts = 2 * message * (self.ep - 1) / (rates.link_bytes_per_s * constants.link) + 2 * starts
        sends = (pp - 1) * (starts + message / (ring * constants.link))
        return np.asarray(2 * work.layers * of_sum + np.where(dealt, work.moe_layers * to_experts, 0.0) + sends)

    def _overhead_s(self, sequences: Numbers) -> Floats:
        work, constants = self.work, self.constants
        gaps = work.layers * constants.layer_s + work.moe_layers * constants.moe_layer_s
        # Each stage of a pipeline prepares the pass on its host before it computes it.
        return np.asarray(gaps + self.cut.pp * (constants.pass_s + constants.sequence_s * sequences))

    def prefill_s(self, sequences: Numbers, prompt: Numbers) -> Floats:
        """Return the seconds of the prompts of `sequences`, in passes of `ServingOptions.chunk` tokens at most.

        A pass reads the cache of those before it of the same prompt; stages of a pipeline compute several at a time.
        """
        tokens, chunk = sequences * prompt, self.options.chunk
        passes = np.maximum(1.0, tokens / chunk)
        before = np.maximum(0.0, prompt - chunk) / 2
        turns = (passes + self.cut.pp - 1) / self.cut.pp
        return turns * self.pass_s(tokens / passes, sequences / passes, prompt / 2, before)

    def decode_s(self, sequences: Numbers, context: Numbers) -> Floats:
        """Return the seconds of one token for each of `sequences`, which have `context` tokens each.

        With a draft it is the mean: a pass checks the drafted tokens of each sequence and keeps those accepted.
        """
        return np.asarray(sum(self.decode_parts(sequences, context).values()))

    def decode_parts(self, sequences: Numbers, context: Numbers) -> dict[str, Floats]:
        """Return the seconds of `decode_s` by what they are spent on."""
        draft = self.draft
        group = np.maximum(1.0, sequences / self.cut.pp)  # pipeline stages compute for other groups meanwhile
        parts = self.pass_parts(group * (1 + draft.tokens), group, 0.0, group * context)
        if draft.tokens:
            parts["draft"] = draft.tokens * draft.cost * np.asarray(sum(parts.values()))
        return {name: seconds / draft.kept for name, seconds in parts.items()}

    def latencies(self, traffic: ServingLoad) -> Latencies:
        """Return the latencies of requests that come so that `traffic.sequences` are on the way at any time."""
        prompt, output = traffic.prompt, np.maximum(1.0, traffic.output)
        wanted, together = np.asarray(traffic.sequences, float), np.asarray(traffic.together) > 0
        # Engines reserve room for whole answers of a fixed batch; in a steady state, answers are at half on average.
        room = np.maximum(1.0, self.room(prompt + output * np.where(together, 1.0, 0.5)))
        turns = np.where(together, np.ceil(wanted / room - 1e-9), 1.0)
        active = np.where(together, wanted / turns, np.minimum(wanted, room))
        decode = self.decode_s(active, prompt + output / 2)  # linear in the context, nearly
        # As many prompts share a pass as come between two: all of a fixed batch, else one for each that ends.
        share = np.where(together, active, np.maximum(1.0, active / output))
        whole = active / share * self.prefill_s(share, prompt)
        # With a cache in pages a prompt is let in once it fits with a little of its answer; others are evicted.
        first_turns = np.ceil(wanted / np.maximum(1.0, self.room(prompt + ADMITTED * output)) - 1e-9)
        own = self.prefill_s(np.where(together, wanted / first_turns, 1.0), prompt)
        # Each of the others is prefilled once while this one is answered.
        others = whole * (active - 1) / active
        # Half of the others are prefilled before one of those that come at once, and pause its answer no more.
        first = np.where(np.asarray(traffic.first) < 0, 2 * self.constants.burst, traffic.first)
        tpot = np.where(together, decode, decode + (1 - np.minimum(1.0, first) / 2) * others / output)
        busy = others / (own + others + (output - 1) * decode)
        queued = np.where(active > 1, decode / 2, 0.0) + own * busy / (2 * (1 - busy))
        comes = own + queued + first / 2 * others + self.constants.request_s
        begins = np.where(together, whole, comes)
        answers = begins + (output - 1) * tpot
        # A fixed batch takes turns. Else, by Little's law, requests wait for room as long as those before them hold it.
        excess = np.where(together, turns - 1, wanted / active - 1)
        waits = excess * answers
        return Latencies(
            ttft_s=np.where(together, own + (first_turns - 1) * answers / 2, comes + waits),
            tpot_s=tpot,
            e2e_s=answers + waits,
            tokens_per_s=active * output / (whole + (output - 1) * decode),
            room=room,
        )


def _soft_max(one: Numbers, other: Numbers) -> Floats:
    return np.asarray((one**SOFTNESS + other**SOFTNESS) ** (1 / SOFTNESS))


def formats_of(device: Device, rates: Rates, weights: str, cache: str) -> Formats:
    """Return the bytes and the matmul rate of weights in one of `BYTES_OF_WEIGHT` with a cache in one of `CACHES`.

    Formats that the device has no matmuls for are only stored: they are multiplied in 16 bits.
    """
    if weights == "fp32":
        return Formats(4.0, 4.0 if cache == "16" else CACHES[cache], float(rates.fp32 * rates.achieved_fp32))
    for computed in NARROW_ACTIVATIONS:
        if computed == weights and computed in device.formats:
            return Formats(BYTES_OF_WEIGHT[weights], CACHES[cache], device.matmul_flops_per_s(computed), 1.0)
    return Formats(BYTES_OF_WEIGHT[weights], CACHES[cache], float(rates.half * rates.achieved_half))
