"""How often the state is copied to host memory: so often that copies and what is lost between them cost least.

With copies that hold training up for c seconds, and a failure every M seconds on average, copies are made every
sqrt(2 c M) seconds of work (Young 1974; to higher order Daly 2006: `plan.cost.goodput`), or more often as long as they
take no more than a thousandth of the time. c is measured with each copy, M follows from the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from argosy.checkpoint.exchange import travels
from argosy.checkpoint.history import Position
from argosy.checkpoint.memory import MemoryCheckpointer, memory_folder
from argosy.checkpoint.shards import box_bytes
from argosy.config.schema import RunConfig
from argosy.parallel.world import World
from argosy.plan.cost.goodput import HOST_COPY_BYTES_PER_S, memory_checkpoint_interval_s
from argosy.training.records import Records
from argosy.training.state import TrainState

TOLD_AGAIN = 2.0
"""The interval is told of again when it has changed by this factor."""


class MemoryCheckpointing:
    """One process's part in the copies that one world makes of its state; without any, it does nothing."""

    def __init__(self, copies: MemoryCheckpointer | None = None, pace: MemoryCheckpointPace | None = None):
        """`pace`: on the process that says when."""
        self._copies, self._pace = copies, pace

    @classmethod
    def begin(cls, run: RunConfig, state: TrainState, world: World, records: Records) -> MemoryCheckpointing:
        """From now on copies are of the present history. All processes call it together."""
        folder, every = memory_folder(), run.resilience.memory_checkpoint_every_steps
        if folder is None or not every:
            return cls()
        boxes = [box for box in state.boxes() if travels(box)]

        def failed(why: str) -> None:
            records.events.write("memory_checkpoint_failed", why=why)

        copies = MemoryCheckpointer(folder, boxes, world, state.history, failed)
        if not world.is_first:
            return cls(copies)
        copy_s = sum(map(box_bytes, boxes)) / HOST_COPY_BYTES_PER_S
        return cls(copies, MemoryCheckpointPace(every, records.mtbf_s(), copy_s, records.events.write))

    @property
    def step(self) -> int | None:
        """Of the newest copy that all processes have."""
        return None if self._copies is None else self._copies.step

    def is_due(self, done: int, step_s: float | None) -> bool:
        """Whether this process, which is to know, says that the state after `done` steps is to be copied."""
        if self._copies is None or self._pace is None or not self._copies.is_on:
            return False
        return self._pace.is_due(done, step_s, self._copies.stall_s)

    def make(self, state: TrainState) -> None:
        """Copy the state: returns when this process's part is copied."""
        if self._copies is not None:
            self._copies.save(Position(state.step, state.tokens, state.skipped), state.boxes())
        if self._pace is not None:
            self._pace.made(state.step)

    def wait(self) -> None:
        """Wait for the copy under way, if any."""
        if self._copies is not None:
            self._copies.wait()

    def abandon(self) -> None:
        """Let go of the copy under way: the world that it is of is over."""
        if self._copies is not None:
            self._copies.abandon()


class MemoryCheckpointPace:
    """When a copy is due. One rank asks it; the others hear of it in the step's exchange (`training.step.Wishes`)."""

    def __init__(
        self, every_steps: int | Literal["auto"], mtbf_s: float, predicted_s: float, tell: Callable[..., None]
    ):
        """`mtbf_s`: seconds between failures of the job; `predicted_s`: what a copy takes, until one was measured.

        tell: hears of the interval that was chosen, as facts of an event.
        """
        self._fixed = None if every_steps == "auto" else every_steps
        self._mtbf_s, self._predicted_s, self._tell = mtbf_s, predicted_s, tell
        self._made: int | None = None
        self._told: int | None = None

    def is_due(self, done: int, step_s: float | None, measured_s: float | None) -> bool:
        """Whether the state after `done` steps is to be copied.

        step_s: of a step, as a rule; measured_s: what the newest copy took; None: not known yet. By the measure, the
        first is due at once: it shows what copies take, and a new world may have lost those of the one before.
        """
        if self._fixed is not None:
            return done % self._fixed == 0
        if self._made is None or step_s is None:
            return self._made is None
        return done - self._made >= self._every(step_s, measured_s)

    def made(self, done: int) -> None:
        """The state after `done` steps was copied."""
        self._made = done

    def _every(self, step_s: float, measured_s: float | None) -> int:
        copy_s = self._predicted_s if measured_s is None else measured_s
        seconds = float(memory_checkpoint_interval_s(copy_s, self._mtbf_s))
        every = max(1, round(seconds / step_s))
        told = self._told
        if measured_s is not None and (told is None or not told / TOLD_AGAIN < every < told * TOLD_AGAIN):
            self._told = every
            facts: dict[str, Any] = {"copy_s": round(copy_s, 6), "step_s": round(step_s, 6), "mtbf_s": self._mtbf_s}
            self._tell("memory_checkpoint_interval", steps=every, seconds=round(every * step_s, 3), **facts)
        return every
