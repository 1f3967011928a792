"""The run file: every key, its type, its range and its meaning, said once.

The options of the command line, their help, the editor's JSON schema, `argosy config show` and the error messages
all come from these classes. A key that is not here is refused. Units stand in the names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

import tyro
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from argosy.config.batch_ramp import BatchSizes, BatchStage, check_ramp
from argosy.config.cache import CacheConfig
from argosy.config.extend import ExtendConfig
from argosy.config.filters import FiltersConfig
from argosy.config.lease_url import LeaseUrl
from argosy.config.mup import MuPConfig
from argosy.config.observe import ObserveConfig
from argosy.config.section import Section
from argosy.config.sites import SiteConfig, check_fragments, check_sites
from argosy.config.sync import SyncConfig
from argosy.extend.declared import Declaration

OPTIMIZERS = ("adamw", "lion", "muon")
LOSSES = ("cross_entropy",)
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


def one_of_or_own(*names: str) -> WithJsonSchema:
    """Return the JSON schema of a key that takes one of `names`, or a name that the table `extend` brings."""
    return WithJsonSchema({"anyOf": [{"enum": list(names)}, {"type": "string"}]})


class RopeScaling(Section):
    """Stretching of rotary frequencies, so that a model reads longer contexts than it was trained on."""

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    """none; linear: position interpolation; llama3: as Llama 3.1, by wavelength; yarn: Peng et al. 2023."""
    factor: PositiveFloat = 1.0
    """New context length over the original one."""
    original_max_seq_len: PositiveInt = 8192
    """Context length before stretching (llama3, yarn)."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths longer than original_max_seq_len / this are stretched fully."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths shorter than original_max_seq_len / this stay as they are."""
    beta_fast: PositiveFloat = 32.0
    """yarn: dimensions that turn more often than this over the original context stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """yarn: dimensions that turn less often than this over the original context are stretched fully."""


class MoEConfig(Section):
    """Mixture of experts in place of feed-forward layers, as in Mixtral, Qwen3-MoE and DeepSeek-V3."""

    experts: NonNegativeInt = 0
    """Routed experts of a layer; 0 makes every layer dense."""
    experts_per_token: PositiveInt = 2
    """Routed experts per token."""
    expert_ffn_width: PositiveInt = 704
    """Hidden width of one expert, a SwiGLU."""
    shared_experts: NonNegativeInt = 0
    """Experts that every token goes to as well; together one feed-forward of this times expert_ffn_width."""
    first_dense_layers: NonNegativeInt = 0
    """Number of first layers that keep a feed-forward of ffn_width."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become scores: softmax over all experts, or a sigmoid for each (DeepSeek-V3)."""
    normalize_weights: bool = True
    """Scale the weights of a token's experts so that they add up to 1."""
    routed_scale: PositiveFloat = 1.0
    """Factor on those weights."""
    groups: PositiveInt = 1
    """Number of groups of experts; a token's experts come from the best top_groups of them (DeepSeek-V3)."""
    top_groups: PositiveInt = 1
    """Groups that the experts of one token may come from."""
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
        if self.groups > 1 and group < 2:
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


class MLAConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are kept as one narrow vector a token."""

    kv_rank: NonNegativeInt = 0
    """Width of that vector; 0 is ordinary attention."""
    q_rank: NonNegativeInt = 0
    """Width of the latent that queries are made from; 0 makes them from the hidden state."""
    rope_width: PositiveInt = 64
    """Width of the rotated part of a query or key head; must be even and equal to model.head_width."""
    nope_width: PositiveInt = 128
    """Width of the part that is not rotated."""
    value_width: PositiveInt = 128
    """Width of a value head; at most nope_width + rope_width."""

    @property
    def key_width(self) -> int:
        """Width of one query or key head."""
        return self.nope_width + self.rope_width

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.kv_rank and self.rope_width % 2:
            raise ValueError(f"rope_width = {self.rope_width} must be even: rotary embedding turns pairs")
        if self.kv_rank and self.value_width > self.key_width:
            raise ValueError(
                f"value_width = {self.value_width} is more than nope_width + rope_width = {self.key_width}; "
                f"try {self.key_width} or less"
            )
        return self


class ModelConfig(Section):
    """The decoder: Llama 3, Qwen2, Qwen3, Mixtral and DeepSeek-V3 families. Sizes are data; a preset gives the rest."""

    preset: str | None = None
    """Model size: a preset, e.g. llama-5m or llama3-8b (`argosy config presets` lists them); keys beside it override
    it. A preset given as an option replaces the whole model of the file."""
    weights: Path | None = None
    """Fine-tuning: start from these pretrained weights, a run folder or checkpoint, e.g. what `argosy checkpoint
    import` wrote. Without a preset, sizes that are not given are those of the weights."""
    family: Annotated[str, one_of_or_own(*FAMILIES)] = "llama"
    """The Hugging Face classes and weight names that the model maps to on export and import; or a family of your own,
    by its name (docs/extending.md)."""
    layers: PositiveInt = 4
    """Number of layers (decoder blocks)."""
    width: PositiveInt = 256
    """Hidden size: width of the residual stream."""
    heads: PositiveInt = 4
    """Number of attention (query) heads."""
    kv_heads: PositiveInt = 4
    """Key/value heads; fewer than `heads` is grouped-query attention."""
    head_width: PositiveInt = 64
    """Width of one head; must be even (rotary pairs). With mla: width of the rotated part, mla.rope_width."""
    ffn_width: PositiveInt = 704
    """Intermediate size: hidden width of the SwiGLU feed-forward of dense layers."""
    ffn_gate: bool = True
    """false: a feed-forward of two matrices, without a gate, which some families of your own have."""
    moe: MoEConfig = MoEConfig()
    mla: MLAConfig = MLAConfig()
    mup: MuPConfig = MuPConfig()
    vocab_size: NonNegativeInt = 0
    """Tokens in the vocabulary; 0 takes the size of the prepared data's tokenizer."""
    max_seq_len: PositiveInt = 8192
    """Longest sequence of the model; data.seq_len may not exceed it."""
    rope_theta: PositiveFloat = 500_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = False
    """RMSNorm on each query and key head (Qwen3)."""
    attention_bias: bool = False
    """Biases on the q, k, v and o projections."""
    qkv_bias: bool = False
    """Biases on the q, k and v projections and none on o (Qwen2)."""
    tie_embeddings: bool = False
    """The head uses the embedding's weight."""
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
        return self

    @model_validator(mode="after")
    def _experts_and_latents_fit(self) -> Self:
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

    def is_moe_layer(self, layer: int) -> bool:
        """Return True if block `layer` (from 0) has experts in place of a feed-forward."""
        return self.moe.experts > 0 and layer >= self.moe.first_dense_layers


class PrepareConfig(Section):
    """Text in, token shards out; the same keys are the options of `argosy prepare`."""

    input: tuple[str, ...] = ()
    """Text to train on: files, folders, globs, URLs, or builtin:python; .txt .md .py ... .jsonl .parquet, also
    .gz/.zst."""
    extensions: tuple[str, ...] = ()
    """File extensions that folders and globs are searched for as well, beside the known ones: .log; * reads every
    file."""
    out: Path = Path("data/prepared")
    """Folder for the shards and their manifest."""
    remote: str = ""
    """URL of a folder in an object store, e.g. s3://bucket/web, to which the prepared data are copied, their manifest
    last; data.sources may name it."""
    tokenizer: Path | None = None
    """A tokenizer.json to use; without one a byte-level BPE is trained on the input."""
    vocab_size: PositiveInt = 4096
    """Size of the BPE that is trained when no tokenizer is given."""
    field: str = "text"
    """Field of a JSONL record, or column of a Parquet file, that holds the text."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.01
    """Share of the documents held out for evaluation, chosen by a hash of their text."""
    max_text_bytes: PositiveInt | None = None
    """Stop after this much text (UTF-8 bytes)."""
    max_document_bytes: PositiveInt = 256 * 2**20
    """Longest document (JSONL line, Parquet value, file of text that is compressed or whose size the server does not
    say) that is read into memory; a longer one is an error, as a small file may unpack to any size."""
    shard_tokens: PositiveInt = 100_000_000
    """Tokens per shard file."""
    on_bad_input: Literal["skip", "refuse"] = "skip"
    """Broken UTF-8, a broken record or one without `field`: skip and count it, or stop."""
    processes: NonNegativeInt = 0
    """Worker processes, which read and tokenize; 0 takes one per core."""
    engine: Literal["auto", "huggingface", "fastokens"] = "auto"
    """Tokenizer engine; auto takes fastokens if installed and identical to Hugging Face on a sample."""
    filters: FiltersConfig = FiltersConfig()
    """Which documents are left out."""


class DataStage(Section):
    """From `from_step` on, draw from these sources instead."""

    from_step: PositiveInt
    """First step (0-based) of the stage."""
    sources: dict[str, PositiveFloat]
    """Prepared folder -> weight."""


class DataConfig(Section):
    """What the model reads."""

    seq_len: PositiveInt = 512
    """Sequence length (context length): tokens per sample."""
    sources: dict[str, PositiveFloat] = {}
    """Datasets: prepared folder, or its URL in an object store (s3://bucket/folder), -> weight; weights are scaled to
    add up to 1. Empty: `prepare.out`."""
    stages: Annotated[tuple[DataStage, ...], tyro.conf.Suppress] = ()
    """Mixtures that replace `sources` from a given step on."""
    on_bad_shard: Literal["stop", "skip"] = "stop"
    """A token shard is cut off, does not match its checksum or has tokens outside of the vocabulary. stop: the run
    ends; skip: it goes on, with other samples of the same source in place of those from the shard."""
    cache: CacheConfig = CacheConfig()
    prepare: PrepareConfig = PrepareConfig()
    """If its `input` is given, the run first prepares the data, once."""


class OptimizerGroup(Section):
    """Parameters with settings of their own."""

    match: str
    """Names of the parameters; * stands for any characters, e.g. "*_norm.weight" or "head.*"."""
    lr_factor: NonNegativeFloat = 1.0
    """Factor on the learning rate; 0 freezes them."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of these parameters; none given: the default."""


class OptimizerConfig(Section):
    """The optimizer."""

    kind: Annotated[str, one_of_or_own(*OPTIMIZERS)] = "adamw"
    """adamw; lion (Chen et al. 2023; needs a 3 to 10 times lower lr); muon (Jordan 2024), adamw beside it; or one of
    your own, by its name (docs/extending.md)."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    beta1: Beta = 0.9
    """adamw: decay of the first moment; lion: share of the momentum in a step."""
    beta2: Beta = 0.95
    """adamw: decay of the second moment; lion: decay of the momentum."""
    momentum: Beta = 0.95
    """muon: decay of the momentum."""
    eps: PositiveFloat = 1e-8
    """adamw: added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only (not on norms, biases)."""
    state: Literal["fp32", "int8"] = "fp32"
    """Moments of adamw and lion: 4 bytes per number, or 1 (blocks of 256; Dettmers et al. 2022)."""
    groups: Annotated[tuple[OptimizerGroup, ...], tyro.conf.Suppress] = ()
    """Parameters with a learning rate or weight decay of their own; the first group that matches a name applies."""
    grad_clip: NonNegativeFloat = 1.0
    """Gradient clipping: largest global gradient norm; 0 does not clip."""


class ScheduleConfig(Section):
    """The schedule of the learning rate over the run, as a share of optimizer.lr."""

    kind: Literal["cosine", "wsd", "constant"] = "wsd"
    """cosine; wsd: warmup, stable, linear decay (Hu et al. 2024); constant after warmup."""
    warmup_steps: NonNegativeInt = 20
    """Warmup: steps in which the learning rate rises linearly."""
    decay_fraction: Fraction = 0.3
    """wsd: share of the run that decays."""
    final_ratio: Fraction = 0.1
    """Learning rate at the end over its peak."""


class TrainConfig(Section):
    """The length and the batch of the run."""

    steps: NonNegativeInt = 0
    """Length of the run in optimizer steps (epochs times the tokens of the data, over batch size times sequence
    length); 0: as many as fit in `minutes`, decided once from the speed of the first steps."""
    minutes: NonNegativeFloat = 0.0
    """Length of the run in minutes, used when steps = 0."""
    global_batch: PositiveInt = 16
    """Batch size: sequences per optimizer step, over all processes and accumulated microbatches."""
    batch_ramp: Annotated[tuple[BatchStage, ...], tyro.conf.Suppress] = ()
    """Batch-size ramp: stages of first steps with smaller batches, which grow up to global_batch."""
    deterministic: bool = False
    """Use deterministic kernels only: the same numbers again, slower on a GPU."""
    loss: Annotated[str, one_of_or_own(*LOSSES)] = "cross_entropy"
    """Training loss: cross_entropy, or one of your own, by its name (docs/extending.md)."""
    pause_at: NonNegativeInt = 0
    """Save and stop after this many steps, with the schedule of the whole run; 0 does not stop."""

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if not self.steps and not self.minutes:
            raise ValueError("steps = 0 and minutes = 0: say how long, e.g. steps = 1000 or minutes = 10")
        check_ramp(self.batch_ramp, self.global_batch, self.steps)
        return self

    @property
    def batches(self) -> BatchSizes:
        """The batch of each step, and the samples before it."""
        return BatchSizes(self.global_batch, tuple((s.until_step, s.global_batch) for s in self.batch_ramp))


class EvaluateConfig(Section):
    """Loss on the held-out split while training."""

    every_steps: NonNegativeInt = 100
    """Steps between evaluations on held-out text (validation loss); 0: only at the end."""
    tokens: PositiveInt = 100_000
    """Held-out tokens per evaluation (fewer if the split is smaller)."""
    sample_prompt: str | None = None
    """If given and not empty, the run ends with a sample that continues this text."""


class CheckpointConfig(Section):
    """When state is saved, and which saves are kept."""

    every_steps: NonNegativeInt = 0
    """Steps between checkpoints; 0 does not save by steps."""
    every_minutes: NonNegativeFloat = 10.0
    """Minutes between checkpoints; 0 does not save by time."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep; the two newest that were read back and found whole are always kept."""
    keep_every: NonNegativeInt = 0
    """Checkpoints at multiples of this many steps are never deleted; 0: none."""
    background: bool = True
    """Write while training goes on; false: training waits for the disk."""
    remote: str = ""
    """Place that verified checkpoints are copied to in the background, and read from if those here are lost or damaged:
    a URL that fsspec knows, e.g. s3://bucket/folder, or a path; the run's name is added."""


class LaunchConfig(Section):
    """The machines of the run, and the processes on each."""

    processes: NonNegativeInt = 0
    """Number of GPUs to use on each machine, one worker process for each; 0: as many as the plan says; with auto all
    GPUs, or one process without GPUs."""
    threads: NonNegativeInt = 0
    """CPU threads per worker; 0 divides the cores equally."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers."""
    max_restarts: NonNegativeInt = 3
    """Number of times in a row that lost workers are replaced without progress in between."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of a coordinator on this machine if `coordinator` is not given; 0: a free one."""
    nodes: PositiveInt = 1
    """Number of machines; start the same command on each of them, with the same `coordinator` or `lease`."""
    coordinator: Annotated[str, Field(pattern=r"^$|^[^\s:]+:\d{1,5}$")] = ""
    """HOST:PORT of the coordinator; the agent on the machine that HOST names starts it there."""
    lease: str = ""
    """In place of `coordinator`: where the agents agree on which of them starts it, and which other one if its machine
    is lost. etcd://HOST:PORT,HOST:PORT,HOST:PORT (etcds://... for TLS), kubernetes://NAMESPACE/NAME, or folder: the
    run's folder."""
    address: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]*$", max_length=255)] = ""
    """Address at which the others reach a coordinator that `lease` has started on this machine; empty: the one from
    which it reaches etcd or Kubernetes, or that of its host name."""
    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*$", max_length=255)] = ""
    """Name of this machine among the nodes; empty: its host name."""
    tls: bool = False
    """Encrypt what agents and coordinator say to each other. Without it, others on the network can read it, but without
    the run's secret they can neither take part nor change anything."""
    tls_certificate: str = ""
    """PEM file of the certificate that all nodes of the run show; empty: one that is made for the run."""
    tls_key: str = ""
    """PEM file of its private key."""
    timeout_s: PositiveFloat = 600.0
    """Longest time that a collective may wait for a peer."""
    cluster: str = ""
    """Cluster that predictions are made for: NxDEVICE, a preset or a file; empty: ./cluster.toml if `argosy probe`
    wrote it on this machine, else the catalogue's figures for the devices at hand."""

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if self.lease:
            LeaseUrl.parse(self.lease)
        if self.lease and self.coordinator:
            raise ValueError(
                "lease and coordinator are both given; give one: coordinator is a fixed place, lease lets the agents "
                "choose one"
            )
        return self

    @model_validator(mode="after")
    def _certificate_has_key(self) -> Self:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together; give both, or none: one is made for the run")
        if self.tls_key and not self.tls:
            raise ValueError("tls_certificate and tls_key have no effect without tls = true; add it")
        return self


class ResilienceConfig(Section):
    """Detection of failures, and recovery from them."""

    node_check_s: NonNegativeFloat = 0.5
    """Duration of the node health check, before a machine takes part in the run and when a rank on it is in doubt:
    products whose bits are known, memory, speed, on all its cores and GPUs at once; 0 checks nothing."""
    grace_s: PositiveFloat = 60.0
    """Time to save the state after SIGTERM, SIGINT or SIGUSR1; then processes are killed."""
    wait_for_nodes_s: NonNegativeFloat = 60.0
    """Time to wait for a lost node before the run goes on without it, under another plan."""
    coordinator_timeout_s: PositiveFloat = 600.0
    """Time that an agent tries to reach a lost coordinator, and that a new run waits for all its nodes."""
    hang_s: NonNegativeFloat = 0.0
    """A rank that the others have waited for this long is killed and replaced; 0: ten median steps, at least 30 s."""
    heartbeat_timeout_s: PositiveFloat = 10.0
    """A process without a heartbeat for this long, stopped or holding Python's lock, is killed and replaced."""
    first_step_s: PositiveFloat = 600.0
    """Longest time for what may compile or wait for a disk: first steps, recovery, saving."""
    straggler_factor: Annotated[float, Field(gt=1.0)] = 1.5
    """A step is slow on a rank if its own work takes this many times as long as its peers'."""
    straggler_steps: PositiveInt = 20
    """A rank that is always slow is reported after this many steps; one that is often slow, within ten times that."""
    straggler_s: NonNegativeFloat = 10.0
    """Least time that those steps span: shorter slowness is no reason to act."""
    on_bad_step: Literal["skip", "rewind", "stop"] = "skip"
    """A step whose loss or gradient norm is not finite, or an outlier, changes nothing, and its samples are skipped.
    rewind: after `rewind_after` in a row the run also goes back to its newest checkpoint; stop: the first ends it."""
    rewind_after: PositiveInt = 3
    """Bad steps in a row after which on_bad_step = "rewind" goes back to a checkpoint."""
    spike_window: PositiveInt = 128
    """Number of past steps whose median, and median distance from it, a loss and a gradient norm are compared with."""
    spike_warmup_steps: PositiveInt = 64
    """First steps of the run, and of each of data.stages, of which only those that are not finite are bad."""
    loss_spike_sigmas: NonNegativeFloat = 10.0
    """A loss this many standard deviations above the median is a spike; 0 turns this off."""
    norm_outlier_sigmas: NonNegativeFloat = 15.0
    """A gradient norm whose logarithm is this many standard deviations above the median is an outlier; 0: off."""
    fingerprint_every_steps: NonNegativeInt = 1
    """Steps between comparisons of the replicas of weights and optimizer state, by fingerprints; 0: never."""
    replay_check_every_steps: NonNegativeInt = 0
    """Steps between replay checks: other replicas compute one replica's loss and gradient again, and compare the bits;
    0 makes none."""
    check_collectives: bool = False
    """Check the gradient all-reduces with checksums that travel beside them (not under zero = 3)."""
    memory_checkpoint_every_steps: NonNegativeInt | Literal["auto"] = "auto"
    """Steps between in-memory checkpoints of a state that has parts without a replica on another node; 0 makes none;
    auto: the interval that costs least, by the measured cost of one and the devices' rate of failures."""
    migrate: bool = True
    """Leave a slow node out, or take another plan where a link became slow, if the planner says that it pays; false
    only reports them."""

    rebalance: bool = False
    """Deal microbatches out to data-parallel replicas by their measured speed, if that saves a twentieth of a step. The
    order in which gradients are summed then depends on measured times, and losses do not repeat to the bit."""

    @field_validator("memory_checkpoint_every_steps", mode="before")
    @classmethod
    def _is_auto_or_steps(cls, value: object) -> object:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError('must be "auto", or a whole number of steps (0 makes none)')
        return value


class RunConfig(Section):
    """One training run, complete."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """The run's name; its folder is runs/NAME."""
    seed: NonNegativeInt = 0
    """Random seed of initial weights and sample order."""
    plan: Annotated[str, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = "auto"
    """Parallelism, micro batch size, precision: auto, or axes such as "dp_replicate=2,microbatch=4";
    "auto,precision=fp32" pins a part."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig(steps=1000)
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    sync: SyncConfig = SyncConfig()
    observe: ObserveConfig = ObserveConfig()
    extend: ExtendConfig = ExtendConfig()
    sites: Annotated[tuple[SiteConfig, ...], tyro.conf.Suppress] = ()
    """Places that train this run together, each with processes and a plan of its own (docs/thin-links.md)."""
    site: str = ""
    """Which of `sites` this is; empty: all of them, on this machine."""

    @model_validator(mode="after")
    def _sites_are_told_apart(self) -> Self:
        check_sites(self.sites, self.site, self.sync.quorum)
        check_fragments(self.sync, self.model.layers)
        return self

    @model_validator(mode="after")
    def _samples_have_a_prompt(self) -> Self:
        if self.observe.sample_every_steps and not self.evaluate.sample_prompt:
            raise ValueError(
                f"observe.sample_every_steps = {self.observe.sample_every_steps} needs evaluate.sample_prompt, the "
                "text that samples continue"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all devices; during a batch-size ramp steps have fewer (`tokens_at`)."""
        return self.train.global_batch * self.data.seq_len

    def tokens_at(self, step: int) -> int:
        """Return the tokens of `step` (0-based), over all devices."""
        return self.train.batches.at(step) * self.data.seq_len

    def tokens_before(self, step: int) -> int:
        """Return the tokens of all steps before `step`: those of a run of so many steps."""
        return self.train.batches.before(step) * self.data.seq_len

    @property
    def not_deterministic(self) -> tuple[Declaration, ...]:
        """The user's code that the run's numbers depend on and that is declared not to repeat itself."""
        loss = self.extend.declared("loss").get(self.train.loss)
        optimizer = self.extend.declared("optimizer").get(self.optimizer.kind)
        return tuple(d for d in (loss, optimizer) if d is not None and not d.facts["deterministic"])

    @model_validator(mode="after")
    def _own_names_are_declared(self) -> Self:
        self.extend.check_name("optimizer.kind", self.optimizer.kind, "optimizer", OPTIMIZERS)
        self.extend.check_name("train.loss", self.train.loss, "loss", LOSSES)
        self.extend.check_name("model.family", self.model.family, "family", FAMILIES)
        own = self.extend.declared("family").get(self.model.family)
        gated = own is None or own.facts["gated"]
        if self.model.ffn_gate != gated:
            has, value = ("a", "true") if gated else ("no", "false")
            raise ValueError(
                f"model.ffn_gate = {str(self.model.ffn_gate).lower()}: the family {self.model.family} has {has} gate; "
                f"set ffn_gate = {value}"
            )
        if own is not None and self.model.moe.experts:
            raise ValueError(
                f"model.moe.experts = {self.model.moe.experts}: experts are SwiGLU, and not of the family "
                f"{self.model.family}; set experts = 0"
            )
        if self.optimizer.kind not in OPTIMIZERS and self.optimizer.state != "fp32":
            raise ValueError(
                f'optimizer.state = "{self.optimizer.state}": an optimizer of your own keeps fp32; set fp32'
            )
        if self.optimizer.kind not in OPTIMIZERS and self.model.mup.base_width:
            raise ValueError(
                f"model.mup.base_width = {self.model.mup.base_width}: how the step of an optimizer of your own grows "
                f"with the width is not known; set base_width = 0, or optimizer.kind to one of {', '.join(OPTIMIZERS)}"
            )
        return self

    @model_validator(mode="after")
    def _sequences_fit(self) -> Self:
        seq_len, longest = self.data.seq_len, self.model.max_seq_len
        if seq_len > longest:
            raise ValueError(
                f"data.seq_len = {seq_len} is more than model.max_seq_len = {longest}; try {longest} or less"
            )
        return self
