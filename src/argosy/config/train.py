"""The run file's table `train`: the length of a run, and its batch, which may grow while it goes on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Self

import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from argosy.config.data import Objective
from argosy.config.extend import one_of_or_own
from argosy.config.section import Section


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

    def steps_of(self, steps: int) -> list[tuple[int, int]]:
        """Return (batch, number of steps with it) for a run of so many steps."""
        starts = [0, *self._ends]
        ends = [*self._ends, steps]
        return [
            (batch, min(end, steps) - start)
            for batch, start, end in zip(self.all, starts, ends, strict=True)
            if min(end, steps) > start
        ]


LOSSES = ("cross_entropy",)


class TrainConfig(Section):
    """The length and the batch of the run."""

    objective: Objective = "pretrain"
    """pretrain learns each token of text; sft the answers of conversations, and text that is mixed in; dpo, ipo, simpo,
    orpo and kto which answers are preferred; reward a score that is higher for these (docs/fine-tuning.md)."""
    steps: NonNegativeInt = 0
    """Length of the run in optimizer steps; 0: as many as `epochs` need, or fit in `minutes`, decided once from the
    speed of the first steps."""
    minutes: NonNegativeFloat = 0.0
    """Length of the run in minutes, used when steps = 0 and epochs = 0."""
    epochs: NonNegativeFloat = 0.0
    """Length of the run in epochs, passes over the data, used when steps = 0; the last step is a whole one."""
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
        if self.has_preferences and self.loss not in LOSSES:
            raise ValueError(
                f'loss = "{self.loss}" is of tokens, and objective = "{self.objective}" compares whole answers; set '
                'loss = "cross_entropy"'
            )
        return self

    @property
    def batches(self) -> BatchSizes:
        """The batch of each step, and the samples before it."""
        return BatchSizes(self.global_batch, tuple((s.until_step, s.global_batch) for s in self.batch_ramp))
