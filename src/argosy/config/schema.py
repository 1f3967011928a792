"""The run file: every key, its type, its range and its meaning, said once.

The options of the command line, their help, the editor's JSON schema, `argosy config show` and the error messages
all come from `RunConfig` and the classes of its tables, the larger of which have files of their own beside this one. A
key that is in none is refused. Units stand in the names."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from argosy.config.data import DataConfig
from argosy.config.extend import ExtendConfig
from argosy.config.launch import LaunchConfig
from argosy.config.model import FAMILIES, UNGATED, ModelConfig
from argosy.config.observe import ObserveConfig
from argosy.config.optimizer import OPTIMIZERS, OptimizerConfig, ScheduleConfig
from argosy.config.section import Mark, PositiveSeconds, Seconds, Section
from argosy.config.sync import SiteConfig, SyncConfig, check_fragments, check_sites
from argosy.config.train import BUILTIN_LOSSES, LoraConfig, PreferenceConfig, TrainConfig
from argosy.extend.declared import Declaration

SIGMAS_OF_MAD = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation: those of the keys below."""


class ResilienceConfig(Section):
    """Detection of failures, and recovery from them."""

    node_check_s: Seconds = 0.5
    """Duration of the node health check, before a machine takes part in the run and when a rank on it is in doubt:
    products whose bits are known, memory, speed, on all its cores and GPUs at once; 0 checks nothing."""
    grace_s: PositiveSeconds = 60.0
    """Time to save the state after SIGTERM, SIGINT, SIGUSR1 or SIGHUP; then processes are killed."""
    wait_for_nodes_s: Seconds = 60.0
    """Time to wait for a lost node before the run goes on without it, under another plan."""
    coordinator_timeout_s: PositiveSeconds = 600.0
    """Time that an agent tries to reach a lost coordinator, and that a new run waits for all its nodes."""
    hang_s: Seconds = 0.0
    """A rank that the others have waited for this long is killed and replaced; 0: ten median steps, at least 30 s."""
    heartbeat_timeout_s: PositiveSeconds = 10.0
    """A process without a heartbeat for this long, stopped or holding Python's lock, is killed and replaced."""
    first_step_s: PositiveSeconds = 600.0
    """Longest time for what may compile or wait for a disk: first steps, recovery, saving."""
    straggler_factor: Annotated[float, Field(gt=1.0)] = 1.5
    """A step is slow on a rank if its own work takes this many times as long as its peers'."""
    straggler_steps: PositiveInt = 20
    """A rank that is always slow is reported after this many steps; one that is often slow, within ten times that."""
    straggler_s: Seconds = 10.0
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
    """Deal microbatches out to data-parallel replicas by their measured speed, if that saves a twentieth of a step, and
    layers to pipeline stages, if that saves a tenth. The order in which gradients are summed then depends on measured
    times, and losses do not repeat to the bit."""

    @field_validator("memory_checkpoint_every_steps", mode="before")
    @classmethod
    def _is_auto_or_steps(cls, value: object) -> object:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError('must be "auto", or a whole number of steps (0 makes none)')
        return value


class EvaluateConfig(Section):
    """Loss on the held-out split while training, and scores of tasks."""

    every_steps: NonNegativeInt = 100
    """Steps between evaluations on held-out text (validation loss); 0: only at the end."""
    tokens: PositiveInt = 100_000
    """Held-out tokens per evaluation (fewer if the split is smaller)."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval to score with each evaluation: names, or files (*.yaml) (docs/scores.md)."""
    task_limit: NonNegativeInt = 0
    """Largest number of documents of each task; 0: all."""
    task_fewshot: NonNegativeInt | None = None
    """Examples before each question of a task; none: as the task says."""
    sample_prompt: str | None = None
    """If given and not empty, the run ends with a sample that continues this text."""


class CheckpointConfig(Section):
    """The times of checkpoints, and which are kept."""

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


class RunConfig(Section):
    """One training run, complete."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """The run's name; its folder is runs/NAME."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Random seed of initial weights and sample order."""
    plan: Annotated[str, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = "auto"
    """Parallelism, micro batch size, precision: auto, or axes such as "dp_replicate=2,microbatch=4";
    "auto,precision=fp32" pins a part."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig(steps=1000)
    preference: PreferenceConfig = PreferenceConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    sync: SyncConfig = SyncConfig()
    observe: ObserveConfig = ObserveConfig()
    extend: ExtendConfig = ExtendConfig()
    sites: Annotated[tuple[SiteConfig, ...], Mark.NO_OPTION] = ()
    """Places that train this run together, each with processes and a plan of its own (docs/sites.md)."""
    site: str = ""
    """Name of this site among `sites`; empty: all of them, on this machine."""

    @model_validator(mode="after")
    def _sites_are_told_apart(self) -> Self:
        check_sites(self.sites, self.site, self.sync.quorum)
        check_fragments(self.sync, self.model.layers)
        return self

    @model_validator(mode="after")
    def _objective_can_be_checked(self) -> Self:
        every, objective = self.resilience.replay_check_every_steps, self.train.objective
        if self.train.has_preferences and every:
            raise ValueError(
                f"resilience.replay_check_every_steps = {every}: a replay does not know what "
                f'train.objective = "{objective}" takes from the whole batch; set it to 0'
            )
        if self.train.has_preferences and self.model.mtp.modules:
            raise ValueError(
                f"model.mtp.modules = {self.model.mtp.modules}: they predict tokens one by one, and train.objective = "
                f'"{objective}" compares whole answers; set 0'
            )
        if objective == "reward" and not self.model.score:
            raise ValueError(
                'model.score = false: train.objective = "reward" trains a head that gives one number; set score = true'
            )
        if objective == "reward" and (self.evaluate.sample_prompt or self.evaluate.tasks):
            raise ValueError(
                "evaluate.sample_prompt and evaluate.tasks ask for words, and a reward model ends with a score; leave "
                "them out"
            )
        if objective == "reward" and self.lora.rank:
            raise ValueError(
                f'lora.rank = {self.lora.rank} with train.objective = "reward": the head is trained whole, and '
                "checkpoints of adapters have no place for it; set rank = 0"
            )
        if self.train.has_preferences and self.sites:
            raise ValueError(
                f'train.objective = "{objective}" with [[sites]]: each site would compare with a start of its own; '
                'leave the sites out, or set objective = "sft"'
            )
        return self

    @model_validator(mode="after")
    def _warmup_has_a_length(self) -> Self:
        if self.schedule.warmup_fraction and not (self.train.steps or self.train.epochs):
            raise ValueError(
                f"schedule.warmup_fraction = {self.schedule.warmup_fraction:g} with train.minutes: how many steps fit "
                "is known at the end of the warmup; set schedule.warmup_steps, and warmup_fraction = 0"
            )
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
    def _user_names_are_declared(self) -> Self:
        self.extend.check_name("optimizer.kind", self.optimizer.kind, "optimizer", OPTIMIZERS)
        self.extend.check_name("train.loss", self.train.loss, "loss", BUILTIN_LOSSES)
        self.extend.check_name("model.family", self.model.family, "family", FAMILIES)
        own = self.extend.declared("family").get(self.model.family)
        gated = self.model.family not in UNGATED if own is None else own.facts["gated"]
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
