"""The work of a step, as numbers that the cost model multiplies: the model's sizes and the batch.

All fields are plain numbers, or tuples of them, so that many jobs can be stacked into one of arrays
(`quantities.stack`) and predicted in one go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.plan.layer_spec import DELTA_CHUNK, layer_kinds, mean_sizes, passed_over
from argosy.plan.parameters import (
    NORMS_OF_PLACE,
    Stage,
    Table,
    adapter_of,
    adapter_sizes,
    quantised_shares,
    reached_layers,
    run_table,
    shared_width,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = float | NDArray[Any]
    """One number, or one for each of many jobs."""
else:
    Numbers = float  # in a report there is one job: the schema of `argosy plan --json` is made from this


@dataclass(frozen=True)
class Workload:
    """The sizes of a model, and the batch."""

    layers: Numbers
    """All of them, those of modules of multi-token prediction included."""
    width: Numbers
    heads: Numbers
    kv_heads: Numbers
    key_width: Numbers
    """Width of one query or key head."""
    value_width: Numbers
    kv_width: Numbers
    """Widths of a key and a value head together."""
    core_width: Numbers
    """Width of all heads where context-parallel ranks exchange them: the narrower ones are filled up."""
    ffn_width: Numbers
    """Width of a dense layer's feed-forward."""
    widest_ffn: Numbers
    """Width of the widest feed-forward."""
    ffn_matrices: Numbers
    """Matrices of a dense layer's feed-forward: 3 with a gate (SwiGLU), 2 without one (GELU)."""
    vocab_size: Numbers
    tied: Numbers
    """1 if the head uses the embedding's weight."""
    seq_len: Numbers
    global_batch: Numbers
    """Sequences in a step."""
    attention_span: Numbers
    """Tokens that a token attends to, on average over a sequence and the layers: half of a causal sequence."""
    cached_share: Numbers = 1
    """Share of a sequence whose keys and values a cache holds, on average over the layers: less with windows."""
    kv_groups: tuple[tuple[Numbers, Numbers, Numbers], ...] = ()
    """Groups of layers that differ in key/value heads: their number of heads, and the share of all keys and values, and
    of those that a cache holds, that such layers have. All others have `kv_heads`."""
    norms: Numbers = 2
    """Norms of a layer over the model's width."""
    streams: Numbers = 2
    """Hidden states that a layer's matrices read: 1 if attention and feed-forward read the same."""
    normed: Numbers = 0
    """Numbers of a token's queries, keys, values or latents that go through a norm; the mean over layers."""
    rms_norms: Numbers = 1
    """1: norms are RMSNorms; 0: LayerNorms."""
    trained_norms: Numbers = 1
    """Share of the layers' norms that is trained."""
    ffn_results: Numbers = 4
    """Results of a dense layer's feed-forward, as wide as its inside, that eager autograd keeps."""
    unprojected: Numbers = 0
    """Numbers of a layer's values that no projection computes, since they are its keys; the mean over layers."""
    gates: Numbers = 0
    """Gates for each number of attention's results: 1, or less if one is for a whole head."""
    further: Numbers = 0
    """Modules of multi-token prediction: each has a projection and computes the head once more."""
    moe_layers: Numbers = 0
    experts: Numbers = 0
    experts_per_token: Numbers = 0
    expert_ffn_width: Numbers = 0
    shared_ffn_width: Numbers = 0
    """Width of all shared experts of a layer together."""
    shared_gate: Numbers = 0
    """1 if the shared experts' result has a gate."""
    expert_matrices: Numbers = 3
    """Matrices of an expert, shared or not: Argosy's have a gate."""
    expert_results: Numbers = 4
    """Results of an expert that eager autograd keeps."""
    expert_biases: Numbers = 0
    """1 if experts add biases to the results of their matrices."""
    q_rank: Numbers = 0
    """Rank of latent attention's queries; 0: they come from the hidden state."""
    kv_rank: Numbers = 0
    """Rank of latent attention's keys and values; 0: ordinary attention."""
    rope_width: Numbers = 0
    """Width of the rotated part of latent attention's keys."""
    delta_layers: Numbers = 0
    """Layers with a gated delta-net in place of attention."""
    delta_after: Numbers = 0
    """Layers after the last of these."""
    delta_heads: Numbers = 0
    """Value heads of one; each has a state."""
    delta_key_heads: Numbers = 0
    delta_key_width: Numbers = 0
    delta_value_width: Numbers = 0
    trained_dense: Numbers = 1
    """Share of the layers' matrices that is trained, routed experts apart (they follow): the rest is frozen."""
    trained_experts: Numbers = 1
    trained_embedding: Numbers = 1
    """1 if the embedding is trained."""
    trained_head: Numbers = 1
    scored: Numbers = 0
    """1 if the head gives a score, one number, in place of logits; `tied` is 1 then."""
    passed_over: tuple[tuple[Numbers, Numbers, Numbers], ...] = ()
    """Values of `recompute_every`, each with the shares of layers with experts, and with a delta-net, among those that
    are not recomputed, if these differ from the shares among all."""
    reached: Numbers = 1
    """Share of the layers that backward reaches."""
    read_dense: Numbers = 1
    """Share of the layers' matrices whose inputs are kept for gradients, of their own or of their adapter."""
    read_experts: Numbers = 1
    adapter_rank: Numbers = 0
    """Rank of the adapter that is trained beside the weights; 0: there is none. The next are means over the layers."""
    adapter_whole: Numbers = 0
    """Parameters of a layer's adapters outside routed experts that tensor parallelism leaves whole on each rank."""
    adapter_cut: Numbers = 0
    """Parameters of adapters that tensor parallelism cuts."""
    adapter_experts_whole: Numbers = 0  # the same of all routed experts
    adapter_experts_cut: Numbers = 0
    adapter_inputs: Numbers = 0
    """Numbers that a layer's adapters read for a token."""
    adapter_outputs: Numbers = 0
    """Numbers that they add to for a token."""
    adapters: Numbers = 0
    """Adapters that a token goes through in a layer."""
    adapter_kept: Numbers = 0
    """Numbers that they keep besides: outputs that are multiplied by lengths (DoRA), and an expert's lengths."""
    dropped_whole: Numbers = 0
    """Inputs that dropout leaves, and they keep: those that each tensor-parallel rank has whole, and the others."""
    dropped_cut: Numbers = 0
    quantised_dense: Numbers = 0
    """Share of the layers' matrices that is quantised, routed experts apart (they follow), and each number's bytes."""
    quantised_experts: Numbers = 0
    quantised_bytes: Numbers = 0

    @classmethod
    def of(cls, run: RunConfig) -> Workload:
        """Return the workload of a step of `run`."""
        whole = cls.of_model(run.model, run.data.seq_len, run.train.global_batch)
        if not (run.train.frozen or run.lora.rank):
            return whole
        table = run_table(run)
        matrices = {n: p for n, p in table.items() if n.startswith("blocks.") and len(p.shape) > 1 and not p.is_adapter}
        dense, experts = ({n: p for n, p in matrices.items() if p.is_expert == of} for of in (False, True))
        norms = {name: p for name, p in table.items() if name.startswith("blocks.") and name.endswith("norm.weight")}
        head = "score" if run.model.score else "embedding" if run.model.tie_embeddings else "head"
        return replace(
            whole,
            **adapter_sizes(run, table) | quantised_shares(run, table),
            trained_dense=_share(dense, lambda name: table[name].is_trained),
            trained_experts=_share(experts, lambda name: table[name].is_trained),
            read_dense=_share(dense, lambda name: _is_read(name, table, run)),
            read_experts=_share(experts, lambda name: _is_read(name, table, run)),
            trained_embedding=table["embedding.weight"].is_trained,
            trained_head=table[f"{head}.weight"].is_trained,
            trained_norms=_share(norms, lambda name: table[name].is_trained),
            reached=len(reached_layers(run, Stage(range(run.model.layers)))) / run.model.all_layers,
        )

    @classmethod
    def of_model(cls, model: ModelConfig, seq_len: int, global_batch: int) -> Workload:
        """Return the workload of a step of `global_batch` sequences of `seq_len` tokens."""
        latent, moe = bool(model.mla.kv_rank), model.moe
        moe_layers = sum(model.is_moe_layer(layer) for layer in range(model.all_layers))
        deltas = [n for spec, layers in layer_kinds(model).items() if spec.delta_net is not None for n in layers]
        sizes, of_gated = mean_sizes(model, seq_len), 7 if model.ffn_limit else 4
        gates = {"number": 1.0, "head": 1 / sizes["value_width"]}[model.attention.gate_over] * model.attention.gate
        return cls(
            **sizes,
            layers=model.all_layers,
            width=model.width,
            ffn_matrices=3 if model.ffn_gate else 2,
            norms=len(NORMS_OF_PLACE[model.norms.place]),
            streams=1 if model.norms.place == "parallel" else 2,
            rms_norms=float(model.norms.kind == "rms"),
            ffn_results=of_gated if model.ffn_gate else 2,
            vocab_size=model.vocab_size,
            tied=float(model.tie_embeddings or model.score),
            scored=float(model.score),
            seq_len=seq_len,
            global_batch=global_batch,
            gates=gates,
            further=model.mtp.modules,
            passed_over=passed_over(model),
            moe_layers=moe_layers,
            experts=moe.experts,
            experts_per_token=moe.experts_per_token if moe.experts else 0,
            expert_ffn_width=moe.expert_ffn_width if moe.experts else 0,
            shared_ffn_width=shared_width(model) if moe.experts else 0,
            shared_gate=float(moe.shared_gate),
            expert_results=of_gated,
            expert_biases=float(moe.expert_bias),
            q_rank=model.mla.q_rank if latent else 0,
            kv_rank=model.mla.kv_rank,
            rope_width=model.mla.rope_width if latent else 0,
            delta_layers=len(deltas),
            delta_after=model.all_layers - 1 - max(deltas, default=model.all_layers - 1),
            delta_heads=model.delta_net.value_heads,
            delta_key_heads=model.delta_net.key_heads,
            delta_key_width=model.delta_net.key_width if model.delta_net.key_heads else 0,
            delta_value_width=model.delta_net.value_width if model.delta_net.key_heads else 0,
        )

    @property
    def dense_layers(self) -> Numbers:
        """Layers without routed experts."""
        return self.layers - self.moe_layers

    def kv_heads_on(self, tp: Numbers, cached: bool = False) -> Numbers:
        """Return the key/value heads of a layer on one of `tp` ranks, which has at least one: the mean over keys and
        values, or over those that a cache holds.

        Shape: that of `tp`. A layer with fewer heads than ranks has each on several.
        """
        groups = [(heads, of_cache if cached else of_all) for heads, of_all, of_cache in self.kv_groups]
        groups.append((self.kv_heads, 1 - sum(share for _, share in groups)))
        copies = sum(share * ((tp > heads) * (tp / heads - 1) + 1) for heads, share in groups)
        return self.kv_heads / tp * copies

    @property
    def scaled_norms(self) -> Numbers:
        """Share of the norms that keep their results before the factors, for the gradients of these: RMSNorms do."""
        return self.rms_norms * self.trained_norms

    @property
    def delta_share(self) -> Numbers:
        """Share of the layers that have a gated delta-net."""
        return self.delta_layers / (self.layers + (self.layers == 0))  # a stage may have none

    @property
    def delta_streams(self) -> Numbers:
        """Numbers that a gated delta-net computes from each token: queries, keys, values, gates, and both rates."""
        keys, values = self.delta_key_heads * self.delta_key_width, self.delta_heads * self.delta_value_width
        return 2 * (keys + values + self.delta_heads)

    @property
    def delta_state(self) -> Numbers:
        """Numbers of the states of one gated delta-net, for a sequence."""
        return self.delta_heads * self.delta_key_width * self.delta_value_width

    @property
    def delta_flops_per_token(self) -> Numbers:
        """FLOPs of one gated delta-net's forward, in chunks, beside its matrices: products of keys and of queries with
        keys, the triangular system, what chunks read of themselves and of the state, and the state's way over them."""
        both = self.delta_key_width + self.delta_value_width
        in_chunk = DELTA_CHUNK * (both + 2 * self.delta_value_width) * self.delta_heads
        return 4 * DELTA_CHUNK * self.delta_key_heads * self.delta_key_width + in_chunk + 6 * self.delta_state

    @property
    def delta_solve_flops_per_token(self) -> Numbers:
        """FLOPs of its triangular system, whose backward takes three times them."""
        return DELTA_CHUNK * (self.delta_key_width + self.delta_value_width) * self.delta_heads

    @property
    def attention_parameters(self) -> Numbers:
        """Parameters of one layer's attention or gated delta-net, matrices only; the mean over layers."""
        queries, values = self.heads * self.key_width, self.heads * self.value_width
        keys_and_values = self.kv_heads * self.kv_width - self.unprojected
        plain = self.width * (queries + self.gates * values + keys_and_values)
        has_q_rank = self.q_rank > 0
        q = has_q_rank * self.q_rank * (self.width + queries) + (1 - has_q_rank) * self.width * queries
        unrotated = self.key_width - self.rope_width
        kv = self.width * (self.kv_rank + self.rope_width) + self.kv_rank * self.heads * (unrotated + self.value_width)
        is_latent = self.kv_rank > 0
        attention = is_latent * (q + kv) + (1 - is_latent) * plain + values * self.width
        delta = self.width * (self.delta_streams + self.delta_heads * self.delta_value_width)
        return (1 - self.delta_share) * attention + self.delta_share * delta

    @property
    def tp_replicated_parameters(self) -> Numbers:
        """Parameters of a layer's attention and router that tensor parallelism leaves whole on each rank."""
        latent = self.width * (self.q_rank + self.kv_rank + self.rope_width)
        return (self.kv_rank > 0) * latent + self.moe_layers / self.layers * self.width * self.experts

    @property
    def expert_parameters(self) -> Numbers:
        """Parameters of all routed experts of one layer."""
        return self.experts * self.expert_matrices * self.width * self.expert_ffn_width

    @property
    def router_and_shared_parameters(self) -> Numbers:
        """Parameters of the router and the shared experts of one layer with experts."""
        return self.width * (self.experts + self.shared_gate + self.expert_matrices * self.shared_ffn_width)

    @property
    def ffn_parameters(self) -> Numbers:
        """Parameters of a dense layer's feed-forward."""
        return self.ffn_matrices * self.width * self.ffn_width

    @property
    def vocabulary_parameters(self) -> Numbers:
        """Parameters of the embedding; the head has as many."""
        return self.width * self.vocab_size

    @property
    def head_outputs(self) -> Numbers:
        """Numbers that the head gives for a token."""
        return self.scored + (1 - self.scored) * self.vocab_size

    @property
    def further_parameters(self) -> Numbers:
        """Parameters of the projections of multi-token prediction."""
        return 2 * self.further * self.width**2

    @property
    def matrix_parameters(self) -> Numbers:
        """Parameters of all matrices; `parameters` counts norms and biases too (below 0.1 %)."""
        return (
            self.layers * self.attention_parameters
            + self.dense_layers * self.ffn_parameters
            + self.moe_layers * (self.expert_parameters + self.router_and_shared_parameters)
            + self.further_parameters
            + (2 - self.tied) * self.vocabulary_parameters
        )

    @property
    def trained_parameters(self) -> Numbers:
        """Parameters of `matrix_parameters` that are trained."""
        experts = self.moe_layers * self.expert_parameters
        ends = (2 - self.tied) * self.vocabulary_parameters
        trained = self.trained_dense * (self.matrix_parameters - experts - ends) + self.trained_experts * experts
        return trained + self.trained_ends + self.adapter_parameters

    @property
    def trained_ends(self) -> Numbers:
        """Parameters of embedding and head that are trained."""
        return (self.trained_embedding + (1 - self.tied) * self.trained_head) * self.vocabulary_parameters

    @property
    def adapter_parameters(self) -> Numbers:
        """Parameters of the adapter, of all layers."""
        dense, experts = self.adapter_whole + self.adapter_cut, self.adapter_experts_whole + self.adapter_experts_cut
        return self.layers * (dense + experts)

    @property
    def saved_parameters(self) -> Numbers:
        """Parameters that checkpoints hold: the adapter alone, if there is one."""
        has_adapter = self.adapter_rank > 0
        return has_adapter * self.adapter_parameters + (1 - has_adapter) * self.matrix_parameters

    @property
    def matmul_parameters(self) -> Numbers:
        """Parameters that take part in a matmul with each token ("active parameters").

        These are all but the embedding lookup, norms, biases and idle experts: of the routed experts, as many count as
        one token goes to.
        """
        active = self.expert_matrices * self.width * self.expert_ffn_width * self.experts_per_token
        return (
            self.layers * self.attention_parameters
            + self.dense_layers * self.ffn_parameters
            + self.moe_layers * (active + self.router_and_shared_parameters)
            + self.further_parameters
            + self.head_parameters
        )

    @property
    def head_parameters(self) -> Numbers:
        """Parameters of the head, as often as each token meets them."""
        return (1 + self.further) * self.width * self.head_outputs

    @property
    def trained_matmul_parameters(self) -> Numbers:
        """Those of the layers that are trained."""
        active = self.moe_layers * self.expert_matrices * self.width * self.expert_ffn_width * self.experts_per_token
        dense = self.matmul_parameters - self.head_parameters - active
        return self.trained_dense * dense + self.trained_experts * active

    @property
    def matmul_flops_per_token(self) -> tuple[Numbers, Numbers]:
        """FLOPs of matmuls in layers, and of the head: 2 N forward, 2 N for the inputs' gradients as far as backward
        goes, 2 N for those of weights that are trained."""
        in_layers, in_head = self.matmul_parameters - self.head_parameters, self.head_parameters
        of_adapter = self.layers * self.adapter_rank * (self.adapter_inputs + self.adapter_outputs)
        layers = 2 * ((1 + self.reached) * in_layers + self.trained_matmul_parameters + 3 * of_adapter)
        return layers, 2 * (2 + self.trained_head) * in_head

    @property
    def train_flops_per_token(self) -> Numbers:
        """Model FLOPs of forward and backward: 6 N + 6 L s a d (`train_flops_per_token`), less what is not
        computed of frozen parameters."""
        per_pass = 2 * self.layers * self.attention_span * self.heads * (self.key_width + self.value_width)
        per_pass = per_pass + self.delta_layers * self.delta_flops_per_token
        third = self.reached * self.delta_layers * self.delta_solve_flops_per_token
        return sum(self.matmul_flops_per_token) + (1 + 2 * self.reached) * per_pass + third


def _share(parameters: Table, counts: Callable[[str], bool]) -> float:
    """Return the share of the elements that are in parameters whose name counts; 1 if there are no parameters."""
    sizes = {name: math.prod(parameter.shape) for name, parameter in parameters.items()}
    return sum(size for name, size in sizes.items() if counts(name)) / sum(sizes.values()) if sizes else 1.0


def _is_read(name: str, table: Table, run: RunConfig) -> bool:
    if run.lora.dropout:  # then the adapter reads what dropout leaves
        return table[name].is_trained
    inner = table.get(f"{adapter_of(name)}.a")
    return table[name].is_trained or (inner is not None and inner.is_trained)


def train_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return the model FLOPs of forward and backward per token: 6 N + 6 L s a d (the causal half counted).

    N: `Workload.matmul_parameters`; L layers, s `seq_len`, a heads, d head width (with latent attention the mean of a
    key's and a value's). PaLM (Chowdhery et al. 2022, appendix B) with causal attention counted once, as
    Megatron-Bridge does. A gated delta-net counts as it is computed, in chunks (`Workload.delta_flops_per_token`).
    Packed documents shorter than the sequence do less attention than this; the formula counts whole sequences,
    so that runs compare. Balance losses, dropped tokens and padding are not counted either.
    """
    return float(Workload.of_model(model, seq_len, global_batch=1).train_flops_per_token)
