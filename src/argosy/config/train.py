"""The run file's tables `train`, `preference` and `lora`: the length of a run, its batch, and what is learned.

The batch may grow while a run goes on. `preference` holds what the objectives that learn from preferences can be set
to, `lora` a low-rank adapter that is trained in place of the weights.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from argosy.config.data import Objective
from argosy.config.extend import one_of_or_declared
from argosy.config.section import Mark, Section
from argosy.errors import UserError


class BatchStage(Section):
    """Steps with a smaller batch than train.global_batch."""

    until_step: PositiveInt
    """First step (0-based) with the next stage's batch; after the last stage, that is train.global_batch."""
    global_batch: PositiveInt
    """Batch size of the steps before it."""


def check_ramp(stages: Sequence[BatchStage], global_batch: int, steps: int) -> None:
    """Raises: ValueError if the stages do not ascend to `global_batch`, or the run has no length in steps."""
    if not stages:
        return
    ends, sizes = [stage.until_step for stage in stages], [*(stage.global_batch for stage in stages), global_batch]
    if ends != sorted(set(ends)):
        raise ValueError(f"batch_ramp: until_step = {ends} must ascend; put the stages in order of until_step")
    if sizes != sorted(set(sizes)):
        raise ValueError(
            f"batch_ramp: the batch must grow from stage to stage up to global_batch = {global_batch}, and is {sizes}"
        )
    if not steps:
        raise ValueError(
            "batch_ramp needs the run's length in steps: how many fit into some minutes is told by the first steps, "
            "which are shorter than the others; set steps"
        )
    if ends[-1] >= steps:
        raise ValueError(
            f"batch_ramp: until_step = {ends[-1]} leaves none of steps = {steps} to global_batch; end it before"
        )


@dataclass(frozen=True)
class BatchSizes:
    """The global batch of each step, and the samples before it: pure functions of the step."""

    largest: int
    """The batch after the last stage."""
    stages: tuple[tuple[int, int], ...] = ()
    """(First step after the stage, batch of its steps)."""

    @cached_property
    def _ends(self) -> list[int]:
        return [end for end, _ in self.stages]

    @cached_property
    def _before(self) -> list[int]:
        """Samples before each stage, and before the steps after the last one."""
        before, start = [0], 0
        for end, batch in self.stages:
            before.append(before[-1] + (end - start) * batch)
            start = end
        return before

    @property
    def all(self) -> tuple[int, ...]:
        """Every size that a step has, the smallest first."""
        return (*(batch for _, batch in self.stages), self.largest)

    def at(self, step: int) -> int:
        """Return the samples of `step` (0-based)."""
        stage = bisect_right(self._ends, step)
        return self.stages[stage][1] if stage < len(self.stages) else self.largest

    def before(self, step: int) -> int:
        """Return the samples of all steps before `step`, in O(log stages) time."""
        stage = bisect_right(self._ends, step)
        start = self._ends[stage - 1] if stage else 0
        return self._before[stage] + (step - start) * self.at(step)

    def steps_like(self, step: int, start: int, stop: int) -> float:
        """Return how many steps with the batch of `step` have the samples of those from `start` to `stop`."""
        return (self.before(stop) - self.before(start)) / self.at(step)

    def steps_of(self, steps: int) -> list[tuple[int, int]]:
        """Return (batch, number of steps with it) for a run of so many steps."""
        starts = [0, *self._ends]
        ends = [*self._ends, steps]
        return [
            (batch, min(end, steps) - start)
            for batch, start, end in zip(self.all, starts, ends, strict=True)
            if min(end, steps) > start
        ]


BUILTIN_LOSSES = ("cross_entropy",)


class TrainConfig(Section):
    """The length and the batch of the run."""

    objective: Objective = "pretrain"
    """pretrain learns each token of text; sft the answers of conversations, and text that is mixed in; dpo, ipo, simpo,
    orpo and kto which answers are preferred; reward a score that is higher for these (docs/fine-tuning.md)."""
    steps: NonNegativeInt = 0
    """Length of the run in optimizer steps; 0: as many as `epochs` need, or fit in `minutes`, decided once from the
    speed of the first steps."""
    minutes: Annotated[NonNegativeFloat, Field(le=1e7)] = 0.0
    """Length of the run in minutes, used when steps = 0 and epochs = 0."""
    epochs: Annotated[NonNegativeFloat, Field(le=1e6)] = 0.0
    """Length of the run in epochs, passes over the data, used when steps = 0; the last step is a whole one."""
    global_batch: Annotated[PositiveInt, Field(le=2**30)] = 16
    """Batch size: sequences per optimizer step, over all processes and accumulated microbatches."""
    batch_ramp: Annotated[tuple[BatchStage, ...], Mark.NO_OPTION] = ()
    """Batch-size ramp: stages of first steps with smaller batches, which grow up to global_batch."""
    deterministic: bool = False
    """Use deterministic kernels only: the same numbers again, slower on a GPU."""
    loss: Annotated[str, one_of_or_declared(*BUILTIN_LOSSES)] = "cross_entropy"
    """Training loss: cross_entropy, or one of your own, by its name (docs/extending.md)."""
    frozen: tuple[str, ...] = ()
    """Parameters that keep their values, by name or module; * stands for any characters, e.g. "embedding",
    "blocks.0", "*.router". No gradient is computed and no optimizer state is kept for them."""
    pause_at: NonNegativeInt = 0
    """Save and stop after this many steps, with the schedule of the whole run; 0 does not stop."""

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if not self.steps and not self.minutes and not self.epochs:
            raise ValueError("steps = 0 and minutes = 0: say how long, e.g. steps = 1000, minutes = 10 or epochs = 2")
        if self.epochs and self.batch_ramp:
            raise ValueError(f"epochs = {self.epochs:g} with batch_ramp, whose stages are counted in steps: set steps")
        check_ramp(self.batch_ramp, self.global_batch, self.steps)
        return self

    @property
    def has_preferences(self) -> bool:
        """True if whole answers are compared, not tokens learned one by one."""
        return self.objective not in ("pretrain", "sft")

    @model_validator(mode="after")
    def _loss_is_of_tokens(self) -> Self:
        if self.has_preferences and self.loss not in BUILTIN_LOSSES:
            raise ValueError(
                f'loss = "{self.loss}" is of tokens, and objective = "{self.objective}" compares whole answers; set '
                'loss = "cross_entropy"'
            )
        return self

    @property
    def batches(self) -> BatchSizes:
        """The batch of each step, and the samples before it."""
        return BatchSizes(self.global_batch, tuple((s.until_step, s.global_batch) for s in self.batch_ramp))


BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1}
"""The published beta of each objective: Rafailov et al. 2023 (section 6), TRL's of IPO, Meng et al. 2024 (section 4),
Hong et al. 2024 (its lambda, section 6.1), Ethayarajh et al. 2024 (section 4.3)."""


class PreferenceConfig(Section):
    """Strength with which preferences are followed (docs/fine-tuning.md)."""

    beta: NonNegativeFloat = 0.0
    """dpo, ipo, kto: how much it costs to leave the reference; simpo: scale of the reward; orpo: weight of the odds
    ratio. 0: 0.1, of simpo 2."""
    margin: NonNegativeFloat = 1.0
    """simpo: by how much the chosen side's reward should be higher (half of beta: Meng et al. 2024)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """dpo: share of pairs whose sides are thought to be swapped."""
    desirable_weight: NonNegativeFloat = 1.0
    """kto: weight of desirable answers."""
    centring: NonNegativeFloat = 0.0
    """reward: weight of the squared sum of a pair's scores, which keeps their mean near 0 (Eisenstein et al. 2023, and
    TRL's center_rewards_coefficient, with 0.01)."""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto: weight of undesirable answers; with many more of one kind, raise the weight of the other."""

    def beta_of(self, objective: str) -> float:
        """Return beta, or the published one; of a score, which is no log-probability, it is 1."""
        return 1.0 if objective == "reward" else self.beta or BETAS[objective]


ALL_LINEAR = "all-linear"
BASE_BLOCK = 64
"""Numbers of a row that share a scale, where the weights beside an adapter are quantised (Dettmers et al. 2023)."""
BASE_BITS = {"nf4": 4, "int8": 8}
LoraBase = Literal["auto", "nf4", "int8"]


class LoraConfig(Section):
    """A low-rank adapter (LoRA, Hu et al. 2021): model.weights stay as they are, and two narrow matrices beside each
    target are trained. rank = 0: there is none, and the weights are trained."""

    rank: NonNegativeInt = 0
    """Rank of the adapter: each target of N outputs and M inputs gets rank * (N + M) parameters."""
    alpha: PositiveFloat = 32.0
    """The adapter's part is multiplied by alpha / rank. With 32 the best learning rate hardly depends on the rank
    (Schulman et al. 2025, "LoRA Without Regret")."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = (ALL_LINEAR,)
    """Linear layers that get an adapter: all-linear (of blocks, experts included; Dettmers et al. 2023 and Schulman et
    al. 2025 find that attention alone is worse), or names such as "q", "attention.*", "blocks.0.mlp.down"; * stands for
    any characters."""
    kind: Literal["lora", "rslora", "dora"] = "lora"
    """lora; rslora: the factor is alpha / sqrt(rank) (Kalajdzievski 2023); dora: the length of each output's weights
    is trained apart from their direction (Liu et al. 2024)."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """First values of the inner matrix: within 1/sqrt(inputs), as PEFT and Schulman et al. 2025; or normal with a
    standard deviation of 1/rank. The outer one begins with zeros."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that are zeros in a training step, drawn anew for each token and target (Hu et al.
    2021). The draws follow from seed, step, row and token alone. Not on experts."""
    base: LoraBase = "auto"
    """Format of the matrices of linear layers beside the adapter: auto: in bf16 where the plan multiplies in bf16,
    else as plan.weights says; nf4 (QLoRA, Dettmers et al. 2023) in 4.5 bits and int8 in 8.5 bits for each number, and
    dequantised wherever they are multiplied."""

    @model_validator(mode="after")
    def _only_what_is_not_trained_is_quantised(self) -> Self:
        if self.base != "auto" and not self.rank:
            raise ValueError(
                f'base = "{self.base}" with lora.rank = 0: weights that are trained are not quantised; set lora.rank = '
                '16, say, or base = "auto"'
            )
        return self

    @property
    def scale(self) -> float:
        """The factor on the adapter's part."""
        return self.alpha / (self.rank**0.5 if self.kind == "rslora" else self.rank)

    @property
    def is_quantised(self) -> bool:
        """True if the matrices beside the adapter are held in fewer bits than they are multiplied in."""
        return self.rank > 0 and self.base in BASE_BITS

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a quantised row: of each block that it begins, an fp32 scale and the codes."""
        return math.ceil(columns / BASE_BLOCK) * (4 + BASE_BLOCK * BASE_BITS[self.base] // 8)

    def has_target(self, module: str) -> bool:
        """Return True if a linear layer of this name, such as blocks.0.attention.q, gets an adapter."""
        return any(_matches(module, target) for target in self.targets)


def _matches(module: str, target: str) -> bool:
    if target == ALL_LINEAR:
        return True
    # Not fnmatch: a list in quotes, '["nothing_proj"]', would be a set of characters, and match a layer `o`.
    pattern = ".*".join(re.escape(part) for part in target.split("*"))
    return re.fullmatch(rf"(.*\.)?{pattern}", module) is not None


def check_targets(lora: LoraConfig, modules: Collection[str]) -> None:
    """Check `lora.targets` against the names of all linear layers. Raises: UserError if one matches none, or one
    that is of experts with `lora.dropout`."""
    for target in lora.targets if lora.rank else ():
        if not any(_matches(module, target) for module in modules):
            names, last = sorted({m.split(".", 2)[-1] for m in modules}), target.rpartition(".")[2]
            as_in_peft = [name for name in names if f"{name.rpartition('.')[2]}_proj" == last]  # its q_proj is q here
            near = as_in_peft or get_close_matches(target, names, n=3, cutoff=0.0)
            raise UserError(
                f'lora.targets: "{target}" matches no linear layer. The nearest names are {", ".join(near)}; '
                f'"{ALL_LINEAR}" takes all.'
            )
    experts = [module for module in modules if ".experts." in module and lora.has_target(module)]
    if lora.rank and lora.dropout and experts:
        raise UserError(
            f"lora.dropout = {lora.dropout:g}: lora.targets has experts ({experts[0]}), whose adapters drop nothing. "
            'Set lora.dropout = 0, or name targets beside experts, such as "attention.*".'
        )
