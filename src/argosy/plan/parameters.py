"""The one table of the decoder's parameters: name, shape, how tensor and expert parallelism cut it, initial value, and
whether a run trains it.

The modules (`models`) read their sizes here, the initialiser the values, tensor and expert parallelism
(`parallel.tensor`, `parallel.expert`) the cuts, the planner (`plan.cost`) bytes and operations, and `models.hf` the
weights that a Hugging Face folder must have. `parallel.apply` freezes what is not trained; gradients, optimizer and
planner follow.

`plan` is the lowest room that needs the table, so it is here, without torch, and the rooms above import it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from argosy.config.model import ModelConfig
from argosy.config.optimizer import is_frozen
from argosy.config.schema import RunConfig
from argosy.config.train import LoraConfig
from argosy.plan.layer_spec import layer_kinds, layer_spec

Initial = Literal["normal", "into_residual", "ones", "zeros", "uniform", "gaussian", "log_rates"]
"""Initial values: N(0, init_std); the same over sqrt(2 * layers), for projections into the residual stream, so that
its variance does not grow with depth (GPT-2, Radford et al. 2019, section 2.3); a constant; those of an adapter's
inner matrix (`config.train`), of which "uniform" is also that of a short convolution; or the logarithms of U(0.01, 16)
(Gated DeltaNet, Mamba 2)."""

OUTPUTS, INPUTS = 0, 1
"""The dims of a linear layer's weight. Each rank computes some of the outputs ("column parallel" in Shoeybi et al.
2019), or reads some of the inputs ("row parallel")."""


NORMS_OF_PLACE = {
    "before": ("attention_norm", "mlp_norm"),
    "after": ("attention_post_norm", "mlp_post_norm"),
    "around": ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
    "parallel": ("attention_norm",),
}
"""`model.norms.place` -> the norms of a block."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model."""

    shape: tuple[int, ...]
    tp_dim: int | None = None
    """The dim that tensor parallelism cuts. None: each tp rank has it whole, and a part of its gradient's sum."""
    is_expert: bool = False
    """Dim 0 counts experts: expert parallelism cuts it, and fewer ranks share it."""
    initial: Initial = "normal"
    is_trained: bool = True
    """False if the run freezes it: gradients pass through it, and there is none of it, nor optimizer state."""
    is_linear: bool = False
    """The weight of a linear layer of a block, or a stack of experts' such weights: it can have an adapter."""
    is_adapter: bool = False
    """A part of an adapter: checkpoints hold these in place of the weights."""


Table = dict[str, Parameter]
"""Parameters by their names, in the model's order."""


@dataclass(frozen=True)
class Stage:
    """The part of the decoder that one pipeline stage holds; without pipelining, all of it."""

    layers: Sequence[int]
    first: bool = True
    """True if the stage takes tokens, through the embedding; others take the hidden states of the one before."""
    last: bool = True
    """True if the stage ends with the norm and the head; other stages give hidden states."""


def parameter_table(model: ModelConfig, stage: Stage | None = None, tp: int = 1) -> Table:
    """The parameters of a stage, by default of the whole decoder. `tp` matters only above `model.kv_heads`."""
    stage = stage or Stage(range(model.layers))
    vocabulary = Parameter((model.vocab_size, model.width), tp_dim=OUTPUTS)
    table: Table = {}
    if stage.first or (stage.last and model.embeds_at_both_ends):  # a tied head is the embedding itself
        table["embedding.weight"] = vocabulary
    for layer in stage.layers:
        table |= _prefixed(f"blocks.{layer}", block_table(model, layer, tp))
    if stage.last:
        table |= _norm("norm", model.width, model)
        if model.score:  # every rank has it whole, and scores its own tokens
            table["score.weight"] = Parameter((1, model.width))
        elif not model.tie_embeddings:
            table["head.weight"] = vocabulary
        for layer in range(model.layers, model.all_layers):
            table |= _prefixed(f"blocks.{layer}", block_table(model, layer, tp))
            table |= _prefixed(f"mtp.{layer}", prediction_table(model))
    return table


def run_table(run: RunConfig, stage: Stage | None = None, tp: int = 1) -> Table:
    """The same with the run's adapter (`lora`) beside the weights, and with what it freezes marked: `train.frozen`, and
    under an adapter all that is not part of it."""
    table, frozen = parameter_table(run.model, stage, tp), run.train.frozen
    if run.lora.rank:
        whole: Table = {}
        for name, parameter in table.items():
            whole |= {name: replace(parameter, is_trained=False)} | adapter_table(name, parameter, run.lora)
        table = whole
    if not frozen:
        return table
    return {name: replace(p, is_trained=p.is_trained and not is_frozen(name, frozen)) for name, p in table.items()}


def adapter_table(name: str, weight: Parameter, lora: LoraConfig) -> Table:
    """The adapter of the weight `name`, if it gets one: an inner matrix [rank, inputs] and an outer one [outputs, rank]
    (A and B of Hu et al. 2021), of an expert too. DoRA's `magnitude` [outputs] is what the length of each output's
    weights has grown by since the start, so that it begins with zeros.

    Where tensor parallelism cuts the outputs, it cuts the outer matrix alike; where it cuts the inputs, the inner one.
    """
    module = linear_name(name)
    if not weight.is_linear or not lora.has_target(module):
        return {}
    *stack, outputs, inputs = weight.shape
    ndim, is_expert, cut = len(weight.shape), weight.is_expert, weight.tp_dim
    of_inputs, of_outputs = cut if cut == ndim - 1 else None, cut if cut == ndim - 2 else None
    prefix = adapter_of(name)
    table = {
        f"{prefix}.a": Parameter((*stack, lora.rank, inputs), of_inputs, is_expert, lora.init, is_adapter=True),
        f"{prefix}.b": Parameter((*stack, outputs, lora.rank), of_outputs, is_expert, "zeros", is_adapter=True),
    }
    if lora.kind == "dora":
        table[f"{prefix}.magnitude"] = Parameter((*stack, outputs), of_outputs, is_expert, "zeros", is_adapter=True)
    return table


def linear_name(weight: str) -> str:
    """Return the name of the linear layer, or stack of them, that a weight is of."""
    return weight.removesuffix(".weight")


def adapter_of(weight: str) -> str:
    """Return the name of the module that holds the adapter of a weight: blocks.0.attention.q.lora of .q.weight."""
    return f"{weight.removesuffix('.weight')}.lora" if weight.endswith(".weight") else f"{weight}_lora"


def linear_names(model: ModelConfig) -> list[str]:
    """Return the names of all linear layers that can have an adapter."""
    return [linear_name(name) for name, parameter in parameter_table(model).items() if parameter.is_linear]


def trained_shapes(run: RunConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of the whole decoder that the run trains, by name."""
    return {name: parameter.shape for name, parameter in run_table(run).items() if parameter.is_trained}


def quantised_shares(run: RunConfig, table: Table) -> dict[str, float]:
    """Return what of the layers' matrices is quantised (`lora.base`), as the workload calls it: the shares outside and
    inside of routed experts, and the bytes of each of their numbers."""
    if not run.lora.is_quantised:
        return {}
    matrices = [p for n, p in table.items() if n.startswith("blocks.") and len(p.shape) > 1 and not p.is_adapter]
    linear = [p for p in matrices if p.is_linear]
    size = sum(math.prod(p.shape[:-1]) * run.lora.row_bytes(p.shape[-1]) for p in linear)
    dense = sum(math.prod(p.shape) for p in matrices if not p.is_expert)
    return {
        "quantised_dense": sum(math.prod(p.shape) for p in linear if not p.is_expert) / dense,
        "quantised_experts": float(run.model.moe.experts > 0),
        "quantised_bytes": size / sum(math.prod(p.shape) for p in linear),
    }


def adapter_sizes(run: RunConfig, table: Table) -> dict[str, Any]:
    """Return the sizes of the run's adapter, as the workload calls them: means over the layers."""
    parts = {name: p for name, p in table.items() if p.is_adapter}
    layers, each = run.model.all_layers, run.model.moe.experts_per_token

    def parameters(is_expert: bool, is_cut: bool) -> float:
        some = (p for p in parts.values() if (p.is_expert, p.tp_dim is not None) == (is_expert, is_cut))
        return sum(math.prod(p.shape) for p in some) / layers

    def numbers(part: str, dim: int, is_cut: Collection[bool] = (False, True)) -> float:
        """Numbers of a token at this dim of these parts; an expert's as often as a token goes to one, lengths twice."""
        of_part = (p for n, p in parts.items() if n.endswith(f".{part}") and (p.tp_dim is not None) in is_cut)
        return sum((each * (1 + (part == "magnitude")) if p.is_expert else 1) * p.shape[dim] for p in of_part) / layers

    return {
        "adapter_rank": run.lora.rank,
        "adapter_whole": parameters(is_expert=False, is_cut=False),
        "adapter_cut": parameters(is_expert=False, is_cut=True),
        "adapter_experts_whole": parameters(is_expert=True, is_cut=False),
        "adapter_experts_cut": parameters(is_expert=True, is_cut=True),
        "adapter_inputs": numbers("a", -1),
        "adapter_outputs": numbers("b", -2),
        "adapters": numbers("a", -2) / max(1, run.lora.rank),
        "adapter_kept": numbers("magnitude", -1),
        "dropped_whole": numbers("a", -1, [False]) if run.lora.dropout else 0,
        "dropped_cut": numbers("a", -1, [True]) if run.lora.dropout else 0,
    }


def layers_on(model: ModelConfig, stage: Stage) -> tuple[int, ...]:
    """Return the layers that a stage computes in training: the last one also those of multi-token prediction."""
    return (*stage.layers, *(range(model.layers, model.all_layers) if stage.last else ()))


def reached_layers(run: RunConfig, stage: Stage) -> list[int]:
    """Return the stage's layers whose backward is computed: none comes before the first that the run trains."""
    first = first_reached(run, stage)
    return [layer for layer in layers_on(run.model, stage) if first is not None and layer >= first]


def first_reached(run: RunConfig, stage: Stage) -> int | None:
    """Return the first layer that backward reaches, -1 if it goes on through all; None if it reaches none.

    Stages after the first compute the gradient of what they receive in any case.
    """
    if not (run.train.frozen or run.lora.rank) or not stage.first:
        return -1
    for name, parameter in run_table(run, stage).items():
        if parameter.is_trained and name.startswith("blocks."):
            return int(name.split(".")[1])
        if parameter.is_trained and name == "embedding.weight":
            return -1
    return None


def state_table(model: ModelConfig) -> Table:
    """The whole decoder's parameters, and the biases by which routers choose (`moe.balance` = "bias"): its state."""
    table: Table = {}
    for name, parameter in parameter_table(model).items():
        table[name] = parameter
        if name.endswith(".router.weight") and model.moe.balance == "bias":
            table[name.removesuffix("weight") + "bias"] = Parameter((model.moe.experts,), initial="zeros")
    return table


def block_table(model: ModelConfig, layer: int, tp: int = 1) -> Table:
    """The parameters of block `layer`."""
    if layer_spec(model, layer).delta_net is not None:
        attention = delta_net_table(model)
    elif model.mla.kv_rank:
        attention = latent_attention_table(model)
    else:
        attention = attention_table(model, layer, tp)
    feed_forward = moe_table(model) if model.is_moe_layer(layer) else dense_table(model, layer)
    norms = {name: _norm(name, model.width, model) for name in NORMS_OF_PLACE[model.norms.place]}
    return (
        norms.get("attention_norm", {})
        | _prefixed("attention", attention)
        | norms.get("attention_post_norm", {})
        | norms.get("mlp_norm", {})
        | _prefixed("mlp", feed_forward)
        | norms.get("mlp_post_norm", {})
        | ({"layer_scale": Parameter((1,), initial="ones", is_trained=False)} if model.layer_scale else {})
    )


def attention_table(model: ModelConfig, layer: int, tp: int = 1) -> Table:
    """The parameters of `models.attention.Attention`."""
    spec, settings, width = layer_spec(model, layer), model.attention, model.width
    queries, keys = spec.heads * spec.head_width, spec.kv_heads * spec.head_width
    results, values = spec.heads * spec.value_width, spec.kv_heads * spec.value_width
    gates = settings.gate * (results if settings.gate_over == "number" else spec.heads)
    bias, qkv_bias = model.attention_bias, model.attention_bias or model.qkv_bias
    keys_dim = OUTPUTS if spec.kv_heads >= tp else None  # with fewer heads than ranks, each rank computes all of them
    if not spec.has_qk_norm or not settings.norm_weights:
        norms: Table = {}
    elif settings.norm_over == "all":
        norms = _norm("q_norm", queries, model, OUTPUTS) | _norm("k_norm", keys, model, keys_dim)
    else:
        norms = _norm("q_norm", spec.head_width, model) | _norm("k_norm", spec.head_width, model)
    return (
        _linear("q", queries, width, OUTPUTS, qkv_bias)
        | _linear("k", keys, width, keys_dim, qkv_bias)
        | (_linear("v", values, width, keys_dim, qkv_bias) if spec.has_values else {})
        | _linear("o", width, results, INPUTS, bias, "into_residual")
        | norms
        | (_linear("out_gate", gates, width, OUTPUTS, qkv_bias and settings.gate_kind == "sigmoid") if gates else {})
        | ({"sinks": Parameter((spec.heads,), OUTPUTS, initial="zeros")} if spec.has_sinks else {})
    )


def latent_attention_table(model: ModelConfig) -> Table:
    """The parameters of `models.mla.LatentAttention`: what all heads share is whole on each tp rank."""
    mla, heads, width, bias = model.mla, model.heads, model.width, model.attention_bias
    if mla.q_rank:
        queries = (
            _linear("q_down", mla.q_rank, width, None, bias)
            | _norm("q_norm", mla.q_rank)
            | _linear("q_up", heads * mla.key_width, mla.q_rank, OUTPUTS)
        )
    else:
        queries = _linear("q", heads * mla.key_width, width, OUTPUTS)
    return (
        queries
        | _linear("kv_down", mla.kv_rank + mla.rope_width, width, None, bias)
        | _norm("kv_norm", mla.kv_rank)
        | _linear("kv_up", heads * (mla.nope_width + mla.value_width), mla.kv_rank, OUTPUTS)
        | _linear("o", width, heads * mla.value_width, INPUTS, bias, "into_residual")
    )


def delta_net_table(model: ModelConfig) -> Table:
    """The parameters of `models.delta_net.GatedDeltaNet`; the norm of its results is over each head."""
    net, width = model.delta_net, model.width
    keys, values = net.key_heads * net.key_width, net.value_heads * net.value_width
    kernels = {
        f"{name}_conv": Parameter((channels, 1, net.conv_width), OUTPUTS, initial="uniform")
        for name, channels in (("q", keys), ("k", keys), ("v", values))
    }
    return (
        _linear("q_in", keys, width, OUTPUTS)
        | _linear("k_in", keys, width, OUTPUTS)
        | _linear("v_in", values, width, OUTPUTS)
        | _linear("gate_in", values, width, OUTPUTS)
        | _linear("beta_in", net.value_heads, width, OUTPUTS)
        | _linear("decay_in", net.value_heads, width, OUTPUTS)
        | kernels
        | {"decay_log": Parameter((net.value_heads,), OUTPUTS, initial="log_rates")}
        | {"decay_bias": Parameter((net.value_heads,), OUTPUTS, initial="ones")}
        | _norm("out_norm", net.value_width)
        | _linear("out", width, values, INPUTS, initial="into_residual")
    )


def dense_table(model: ModelConfig, layer: int) -> Table:
    """The parameters of the feed-forward of block `layer`, which has no experts."""
    return feed_forward_table(model.width, layer_spec(model, layer).ffn_width, model.ffn_gate, model.ffn_bias)


def feed_forward_table(width: int, hidden: int, gated: bool = True, bias: bool = False) -> Table:
    """The parameters of `models.layers.FeedForward`."""
    return (
        (_linear("gate", hidden, width, OUTPUTS, bias) if gated else {})
        | _linear("up", hidden, width, OUTPUTS, bias)
        | _linear("down", width, hidden, INPUTS, bias, initial="into_residual")
    )


def moe_table(model: ModelConfig) -> Table:
    """The parameters of `models.experts.MoE`; router and gate work on each tp rank's own tokens."""
    moe, width, hidden = model.moe, model.width, model.moe.expert_ffn_width
    table = {"router.weight": Parameter((moe.experts, width))}
    if moe.router_bias:
        table["router.logit_bias"] = Parameter((moe.experts,), initial="zeros")
    table |= {
        "experts.gate": Parameter((moe.experts, hidden, width), 1, is_expert=True, is_linear=True),
        "experts.up": Parameter((moe.experts, hidden, width), 1, is_expert=True, is_linear=True),
        "experts.down": Parameter((moe.experts, width, hidden), 2, True, "into_residual", is_linear=True),
    }
    if moe.expert_bias:  # that of `down` is added once, whatever the number of ranks that add up their results
        table |= {
            "experts.gate_bias": Parameter((moe.experts, hidden), 1, is_expert=True, initial="zeros"),
            "experts.up_bias": Parameter((moe.experts, hidden), 1, is_expert=True, initial="zeros"),
            "experts.down_bias": Parameter((moe.experts, width), is_expert=True, initial="zeros"),
        }
    if shared := shared_width(model):
        table |= _prefixed("shared", feed_forward_table(width, shared))
        if moe.shared_gate:
            table["shared_gate.weight"] = Parameter((1, width))
    return table


def shared_width(model: ModelConfig) -> int:
    """Return the width of the feed-forward that all tokens of a layer with experts go to."""
    moe = model.moe
    return (moe.shared_ffn_width or moe.shared_experts * moe.expert_ffn_width) if moe.shared_experts else 0


def prediction_table(model: ModelConfig) -> Table:
    """The parameters of `models.mtp.PredictionModule`, which work on each tp rank's own tokens."""
    return (
        _norm("embedding_norm", model.width, model)
        | _norm("hidden_norm", model.width, model)
        | _linear("projection", model.width, 2 * model.width, None)
        | _norm("norm", model.width, model)
    )


def parameters(model: ModelConfig) -> int:
    return sum(times * math.prod(parameter.shape) for parameter, times in _parameters(model))


def active_parameters(model: ModelConfig) -> int:
    """Return the number of parameters without the routed experts that one token does not go to."""
    idle = sum(
        times * math.prod(parameter.shape[1:]) * (model.moe.experts - model.moe.experts_per_token)
        for parameter, times in _parameters(model)
        if parameter.is_expert
    )
    return parameters(model) - idle


def _parameters(model: ModelConfig) -> Iterator[tuple[Parameter, int]]:
    """Each parameter outside blocks, and those of one block of each kind with the number of such blocks."""
    yield from ((parameter, 1) for parameter in parameter_table(model, Stage(layers=())).values())
    for layers in layer_kinds(model).values():
        yield from ((parameter, len(layers)) for parameter in block_table(model, layers[0]).values())


def inside(table: Mapping[str, Parameter], module: str) -> Table:
    """The parameters of one module of `table`, by their names in it."""
    return {name.removeprefix(f"{module}."): p for name, p in table.items() if name.startswith(f"{module}.")}


def _prefixed(module: str, table: Mapping[str, Parameter]) -> Table:
    return {f"{module}.{name}": parameter for name, parameter in table.items()}


def _linear(
    name: str, outputs: int, inputs: int, tp_dim: int | None, bias: bool = False, initial: Initial = "normal"
) -> Table:
    """A linear layer; its bias goes with the outputs, so it is cut only where these are."""
    table = {f"{name}.weight": Parameter((outputs, inputs), tp_dim, initial=initial, is_linear=True)}
    if bias:
        table[f"{name}.bias"] = Parameter((outputs,), OUTPUTS if tp_dim == OUTPUTS else None, initial="zeros")
    return table


def _norm(name: str, width: int, model: ModelConfig | None = None, tp_dim: int | None = None) -> Table:
    """A norm; without `model`, a plain RMSNorm."""
    zeros = model is not None and model.norms.zero_centered
    table = {f"{name}.weight": Parameter((width,), tp_dim, initial="zeros" if zeros else "ones")}
    if model is not None and model.norms.bias:
        table[f"{name}.bias"] = Parameter((width,), tp_dim, initial="zeros")
    return table
