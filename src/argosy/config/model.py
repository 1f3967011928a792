"""The run file's table `model`: the decoder's sizes and parts, which of them go together, and muP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from argosy.config.attention import AttentionConfig, DeltaNetConfig, MLAConfig, NormConfig, RopeScaling
from argosy.config.extend import one_of_or_declared
from argosy.config.section import Section

T = TypeVar("T")


class MuPConfig(Section):
    """Maximal update parametrization (Yang & Hu 2021, Tensor Programs V): the learning rate that is best for a narrow
    model is best for wide ones too. A size of the base model that is 0 follows from this model's."""

    base_width: NonNegativeInt = 0
    """Width of the narrow model for which optimizer.lr and init_std hold as they are; 0: the usual parametrization."""
    base_head_width: NonNegativeInt = 0
    """Width of its heads; 0: that of this model, so that wider models have more heads."""
    base_ffn_width: NonNegativeInt = 0
    """Its ffn_width; 0: in proportion to the width."""
    base_expert_ffn_width: NonNegativeInt = 0
    """Its moe.expert_ffn_width; 0: in proportion to the width."""
    base_kv_rank: NonNegativeInt = 0
    """Its mla.kv_rank; 0: in proportion to the width."""
    base_q_rank: NonNegativeInt = 0
    """Its mla.q_rank; 0: in proportion to the width."""

    @model_validator(mode="after")
    def _has_a_width(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name)]
        if given and not self.base_width:
            raise ValueError(f"{given[0]} = {getattr(self, given[0])} has no effect without base_width; give it too")
        return self


MOST_LAYERS, MOST_HEADS, MOST_EXPERTS, MOST_STACKED = 2**13, 2**16, 2**16, 2**18
"""Limits of layers, heads, experts of a layer, and experts of all layers: tables of parameters are made of them, also
of models in files of others. The largest models have a tenth of each at most."""
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4", "granite",
    "smollm3", "cwm", "glm", "glm4", "phi3", "cohere", "cohere2", "seed_oss", "nemotron", "ernie4_5",
    "hunyuan_v1_dense", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "glm4_moe", "dots1",
    "deepseek_v2", "deepseek_v3", "kimi_k2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "mimo_v2_flash", "laguna", "gemma4_text", "llama4_text",
)  # fmt: skip
"""The model types that export and import know."""
UNGATED = ("nemotron",)
"""Families whose feed-forward has no gate."""


class MoEConfig(Section):
    """Mixture of experts in place of feed-forward layers, as in Mixtral, Qwen3-MoE and DeepSeek-V3."""

    experts: Annotated[NonNegativeInt, Field(le=MOST_EXPERTS)] = 0
    """Routed experts of a layer; 0 makes every layer dense."""
    experts_per_token: PositiveInt = 2
    """Routed experts per token."""
    expert_ffn_width: PositiveInt = 704
    """Hidden width of one expert, a SwiGLU."""
    shared_experts: NonNegativeInt = 0
    """Experts that every token goes to as well; together one feed-forward of this times expert_ffn_width."""
    shared_ffn_width: NonNegativeInt = 0
    """Width of that feed-forward; 0: as said."""
    shared_gate: bool = False
    """A gate on its result, by a sigmoid of the layer's input (Qwen2-MoE)."""
    first_dense_layers: NonNegativeInt = 0
    """Number of first layers that keep a feed-forward of ffn_width."""
    every: PositiveInt = 1
    """One layer in this many has experts; the others are dense (decoder_sparse_step)."""
    dense_layers: tuple[NonNegativeInt, ...] = ()
    """Further layers, counted from 0, that are dense."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """The function from logits to scores: softmax over all experts, or a sigmoid for each (DeepSeek-V3)."""
    router_bias: bool = False
    """A learned bias on the router's logits (gpt-oss)."""
    expert_bias: bool = False
    """Biases on the matrices of experts (gpt-oss)."""
    normalize_weights: bool = True
    """Scale the weights of a token's experts so that they add up to 1."""
    routed_scale: PositiveFloat = 1.0
    """Factor on those weights."""
    weigh: Literal["results", "inputs"] = "results"
    """They multiply the results of experts, or what experts read (Llama 4)."""
    groups: PositiveInt = 1
    """Number of groups of experts; a token's experts come from the best top_groups of them (DeepSeek-V3)."""
    top_groups: PositiveInt = 1
    """Groups that the experts of one token may come from."""
    group_score: Literal["best_two", "best"] = "best_two"
    """A group is judged by the sum of its two best scores (DeepSeek-V3), or by its best (DeepSeek-V2)."""
    balance: Literal["none", "aux", "bias"] = "aux"
    """aux: a loss per sequence; bias: a bias on the scores that choose experts (Wang et al. 2024), and that loss."""
    aux_coefficient: NonNegativeFloat = 1e-3
    """aux, bias: weight of the balance loss of each sequence (DeepSeek-V3, equations 17 to 20)."""
    bias_rate: NonNegativeFloat = 1e-3
    """bias: change of an expert's bias in a step, up if it got too few tokens, down if too many."""
    z_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared log-sum-exp of a token's router logits (ST-MoE, Zoph et al. 2022)."""
    capacity_factor: NonNegativeFloat = 0.0
    """An expert takes this times its even share of a row's tokens and drops later ones in training; 0 drops none."""

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if not self.experts:
            return self
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is more than experts = {self.experts}; "
                f"try {self.experts} or less"
            )
        if self.experts % self.groups:
            raise ValueError(
                f"groups = {self.groups} does not divide experts = {self.experts}; "
                f"try one of {[n for n in range(1, self.experts + 1) if self.experts % n == 0]}"
            )
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups = {self.top_groups} is more than groups = {self.groups}; try {self.groups}")
        group = self.experts // self.groups
        if self.groups > 1 and group < 2 and self.group_score == "best_two":
            raise ValueError(
                f"groups = {self.groups} leaves {group} expert in a group, and a group is judged by its best two; "
                f"try {max(1, self.experts // 2)} or less"
            )
        if self.experts_per_token > self.top_groups * group:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is more than the {self.top_groups * group} experts of "
                f"top_groups = {self.top_groups}; try top_groups = {-(-self.experts_per_token // group)}"
            )
        return self


def repeated(values: Sequence[T], layer: int, otherwise: T) -> T:
    """Return the value of block `layer` in a list that is repeated; if it is empty, `otherwise`."""
    return values[layer % len(values)] if values else otherwise


class MTPConfig(Section):
    """Multi-token prediction (DeepSeek-V3, 2024, section 2.2): modules after the last layer, each of which predicts one
    token further than the one before."""

    modules: Annotated[NonNegativeInt, Field(le=16)] = 0
    """Modules, each with one more layer; 0: none. Trained, imported and exported; generation leaves them out."""
    loss_weight: NonNegativeFloat = 0.3
    """Weight of the mean of their losses beside the loss of the next token (DeepSeek-V3: 0.3, at the end 0.1)."""


class ModelConfig(Section):
    """The decoder. Families (docs/families.md) are settings of it; a preset gives the sizes of a published model."""

    preset: str | None = None
    """Model size: a preset, e.g. llama-5m or llama3-8b (`argosy config presets` lists them); keys beside it override
    it. A preset given as an option replaces the whole model of the file."""
    weights: Path | None = None
    """Fine-tuning: start from these pretrained weights: a run folder, a checkpoint, a Hugging Face folder or its URL
    (hf://OWNER/NAME, s3://...). Without a preset, sizes that are not given are those of the weights."""
    family: Annotated[str, one_of_or_declared(*FAMILIES)] = "llama"
    """The Hugging Face classes and weight names that the model maps to on export and import; or a family of your own,
    by its name (docs/extending.md)."""
    layers: Annotated[PositiveInt, Field(le=MOST_LAYERS)] = 4
    """Number of layers (decoder blocks)."""
    width: PositiveInt = 256
    """Hidden size: width of the residual stream."""
    heads: Annotated[PositiveInt, Field(le=MOST_HEADS)] = 4
    """Number of attention (query) heads."""
    kv_heads: PositiveInt = 4
    """Key/value heads; fewer than `heads` is grouped-query attention."""
    head_width: PositiveInt = 64
    """Width of one head; must be even (rotary pairs). With mla: width of the rotated part, mla.rope_width."""
    ffn_width: PositiveInt = 704
    """Intermediate size: hidden width of the SwiGLU feed-forward of dense layers."""
    ffn_widths: tuple[PositiveInt, ...] = ()
    """Those of the layers, where they are not all ffn_width; a list is repeated."""
    ffn_gate: bool = True
    """false: a feed-forward of two matrices, without a gate, which some families of your own have."""
    ffn_bias: bool = False
    """Biases on the feed-forward's matrices."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"] = "silu"
    """Of the gate (silu: SwiGLU, gelu: GeGLU) or, without one, of the hidden values. clamped_swiglu: (up + 1) gate
    sigmoid(1.702 gate), both clamped to ffn_limit (gpt-oss). A family of your own brings its own."""
    ffn_limit: NonNegativeFloat = 0.0
    """clamped_swiglu: the limit."""
    moe: MoEConfig = MoEConfig()
    attention: AttentionConfig = AttentionConfig()
    norms: NormConfig = NormConfig()
    mla: MLAConfig = MLAConfig()
    delta_net: DeltaNetConfig = DeltaNetConfig()
    mtp: MTPConfig = MTPConfig()
    mup: MuPConfig = MuPConfig()
    vocab_size: NonNegativeInt = 0
    """Tokens in the vocabulary; 0 takes the size of the prepared data's tokenizer."""
    max_seq_len: Annotated[PositiveInt, Field(le=2**40)] = 8192
    """Longest sequence of the model; data.seq_len may not exceed it."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in norms."""
    qk_norm: bool = False
    """A norm on each query and key head (Qwen3); see attention.norm_over."""
    attention_bias: bool = False
    """Biases on the q, k, v and o projections."""
    qkv_bias: bool = False
    """Biases on the q, k and v projections and none on o (Qwen2)."""
    tie_embeddings: bool = False
    """The head uses the embedding's weight."""
    score: bool = False
    """The head gives one number, the score of a reward model, in place of logits (transformers' classes
    ForSequenceClassification with num_labels = 1). train.objective = "reward" sets it."""
    embedding_scale: PositiveFloat = 1.0
    """Factor on the embedding's vectors (Gemma, Granite)."""
    layer_scale: bool = False
    """A number for each layer that its whole result is multiplied by; it is not trained (Gemma 4)."""
    residual_scale: PositiveFloat = 1.0
    """Factor on what attention and feed-forward add to the residual stream (Granite)."""
    logit_scale: PositiveFloat = 1.0
    """Factor on logits (Granite, Cohere)."""
    logit_softcap: NonNegativeFloat = 0.0
    """Logits are logit_softcap * tanh(logits / logit_softcap) (Gemma 2); 0: as they are."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights; divided by sqrt(2*layers) for projections into the residual stream."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}; "
                f"try one of {[k for k in range(1, self.heads + 1) if self.heads % k == 0]}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width = {self.head_width} must be even: rotary embedding turns pairs")
        for layer in range(self.layers if self.attention.heads or self.attention.kv_heads else 0):
            heads, kv_heads = self.heads_of(layer)
            if heads % kv_heads:
                raise ValueError(
                    f"layer {layer} has {heads} heads and {kv_heads} key/value heads (attention.heads, "
                    "attention.kv_heads, or model's where these are empty): the latter must divide the former"
                )
        return self

    @model_validator(mode="after")
    def _experts_and_latents_fit(self) -> Self:
        if self.layers * self.moe.experts > MOST_STACKED:
            raise ValueError(
                f"moe.experts = {self.moe.experts} with layers = {self.layers} makes "
                f"{self.layers * self.moe.experts} experts; try {MOST_STACKED // self.layers} or less"
            )
        if self.moe.experts and self.moe.first_dense_layers >= self.layers:
            raise ValueError(
                f"moe.first_dense_layers = {self.moe.first_dense_layers} leaves none of layers = {self.layers} to "
                f"moe.experts = {self.moe.experts}; try {self.layers - 1} or less, or experts = 0"
            )
        if not self.mla.kv_rank:
            return self
        if self.kv_heads != self.heads:
            raise ValueError(
                f"kv_heads = {self.kv_heads} with mla.kv_rank = {self.mla.kv_rank}: latent attention has a key for "
                f"each query head; set kv_heads = {self.heads}"
            )
        if self.head_width != self.mla.rope_width:
            raise ValueError(
                f"head_width = {self.head_width} and mla.rope_width = {self.mla.rope_width}: with latent attention "
                f"both are the width that is rotated; set head_width = {self.mla.rope_width}"
            )
        if self.qk_norm:
            raise ValueError("qk_norm = true with mla: the latents have norms of their own; set qk_norm = false")
        if self.qkv_bias:
            raise ValueError("qkv_bias = true with mla: latent attention has no q, k and v alike; set qkv_bias = false")
        if self.attention != AttentionConfig():
            raise ValueError("attention with mla: latent attention has none of these settings; leave the table out")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        narrowest = min(self.attention.head_widths, default=self.head_width)
        for key in ("rotary_width", "sliding_rotary_width"):
            if (width := getattr(self.attention, key)) > narrowest:
                raise ValueError(f"attention.{key} = {width} is more than head_width = {narrowest}; leave it out")
        divisors = self.rope_scaling.short_divisors
        rotated = self.mla.rope_width if self.mla.kv_rank else self.attention.rotary_width or self.head_width
        if divisors and (2 * len(divisors) != rotated or self.attention.head_widths):
            raise ValueError(
                f"rope_scaling.short_divisors has {len(divisors)} numbers, and heads of one width, of which {rotated} "
                f"numbers are rotated, need {rotated // 2}"
            )
        differing = [key for key in ("heads", "kv_heads", "head_widths") if getattr(self.attention, key)]
        if self.mup.base_width and (differing or self.ffn_widths):
            key = f"attention.{differing[0]}" if differing else "ffn_widths"
            raise ValueError(
                f"{key} with mup.base_width = {self.mup.base_width}: layers of different sizes are not known to muP; "
                "leave one out"
            )
        if ("linear" in self.attention.layers) != bool(self.delta_net.key_heads):
            raise ValueError(
                f"delta_net.key_heads = {self.delta_net.key_heads} and attention.layers = "
                f"{list(self.attention.layers)}: layers are linear if and only if delta_net says their heads; "
                'give both, e.g. layers = ["linear", "linear", "linear", "full"], or neither'
            )
        if self.delta_net.key_heads and self.mtp.modules:
            raise ValueError(
                f"mtp.modules = {self.mtp.modules} with delta_net.key_heads = {self.delta_net.key_heads}: modules that "
                "predict further tokens are not supported beside linear layers; set mtp.modules = 0"
            )
        if (self.activation == "clamped_swiglu") != bool(self.ffn_limit):
            raise ValueError(
                f"ffn_limit = {self.ffn_limit:g} and activation = {self.activation}: clamped_swiglu needs a limit, "
                "and no other activation has one"
            )
        if self.moe.experts and not any(map(self.is_moe_layer, range(self.layers))):
            raise ValueError(
                f"moe.every and moe.dense_layers leave none of layers = {self.layers} to moe.experts = "
                f"{self.moe.experts}; set experts = 0"
            )
        return self

    @model_validator(mode="after")
    def _base_has_these_parts(self) -> Self:
        mup = self.mup
        if mup.base_head_width and self.mla.kv_rank:
            raise ValueError(
                f"mup.base_head_width = {mup.base_head_width} with mla: the widths of latent heads do not grow with "
                "the model; leave it out"
            )
        parts = {
            "base_expert_ffn_width": ("moe.experts", self.moe.experts),
            "base_kv_rank": ("mla.kv_rank", self.mla.kv_rank),
            "base_q_rank": ("mla.q_rank", self.mla.q_rank if self.mla.kv_rank else 0),
        }
        for key, (part, size) in parts.items():
            if getattr(mup, key) and not size:
                raise ValueError(f"mup.{key} = {getattr(mup, key)} has no effect with {part} = 0; leave it out")
        return self

    def without_further(self) -> ModelConfig:
        """Return the model as it generates: without modules that predict further tokens."""
        return self.model_copy(update={"mtp": MTPConfig()}) if self.mtp.modules else self

    @property
    def all_layers(self) -> int:
        """Number of layers, those of modules that predict further tokens included: they are the last."""
        return self.layers + self.mtp.modules

    @property
    def embeds_at_both_ends(self) -> bool:
        """True if the last pipeline stage needs the embedding too: as the head, or for tokens of further prediction."""
        return (self.tie_embeddings and not self.score) or self.mtp.modules > 0

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return the query heads and the key/value heads of block `layer` (from 0)."""
        attention = self.attention
        return repeated(attention.heads, layer, self.heads), repeated(attention.kv_heads, layer, self.kv_heads)

    def is_moe_layer(self, layer: int) -> bool:
        """Return True if block `layer` (from 0) has experts in place of a feed-forward."""
        moe = self.moe
        has_turn = layer >= moe.first_dense_layers and (layer + 1) % moe.every == 0
        return moe.experts > 0 and has_turn and layer not in moe.dense_layers
