"""The run file: every key, its type, its range and its meaning, said once.

The options of the command line, their help, the editor's JSON schema, `argosy config show` and the error messages
all come from `RunConfig` and the classes of its tables, the larger of which have files of their own beside this one. A
key that is in none is refused. Units stand in the names.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import tyro
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)

from argosy.config.address import LeaseUrl, OptionalAddress
from argosy.config.batch_ramp import BatchSizes, BatchStage, check_ramp
from argosy.config.data import DataConfig
from argosy.config.extend import ExtendConfig, one_of_or_own
from argosy.config.model import FAMILIES, ModelConfig
from argosy.config.observe import ObserveConfig
from argosy.config.resilience import ResilienceConfig
from argosy.config.section import Section
from argosy.config.sites import SiteConfig, check_fragments, check_sites
from argosy.config.sync import SyncConfig
from argosy.extend.declared import Declaration

OPTIMIZERS = ("adamw", "lion", "muon")
LOSSES = ("cross_entropy",)
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerGroup(Section):
    """Parameters with settings of their own."""

    match: str
    """Names of the parameters; * stands for any characters, e.g. "*_norm.weight" or "head.*"."""
    lr_factor: NonNegativeFloat = 1.0
    """Factor on the learning rate. To freeze parameters, name them in train.frozen: that also saves the work."""
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
    frozen: tuple[str, ...] = ()
    """Parameters that keep their values, by name or module; * stands for any characters, e.g. "embedding",
    "blocks.0", "*.router". No gradient is computed and no optimizer state is kept for them."""
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
    coordinator: OptionalAddress = ""
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
    allow_memory: bool = False
    """Start even if the plan is predicted to need more memory than devices and host have."""

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
    """Places that train this run together, each with processes and a plan of its own (docs/sites.md)."""
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
