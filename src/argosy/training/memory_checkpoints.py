"""When in-memory checkpoints are saved: so often that saving them and losing the steps between them cost least.

If one holds training up for c seconds, and a failure comes every M seconds on average, one is saved every sqrt(2 c M)
seconds of work (Young 1974; to higher order Daly 2006: `plan.cost.economy`), or more often as long as they take no more
than a thousandth of the time. c is measured with each of them, M follows from the devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from argosy.checkpoint.exchange import travels
from argosy.checkpoint.memory import MemoryCheckpointer, memory_folder
from argosy.checkpoint.shards import box_bytes
from argosy.plan.cost.economy import HOST_COPY_BYTES_PER_S, memory_checkpoint_interval_s
from argosy.training.parts import Parts

TOLD_AGAIN = 2.0
"""The interval is reported again when it has changed by this factor."""


class MemoryCheckpointing:
    """One rank's part in the in-memory checkpoints of its world; where no folder is given to them, it does nothing."""

    def __init__(self, parts: Parts):
        self._run, self._state, self._world, self._records = parts.run, parts.state, parts.world, parts.records
        self._checkpointer: MemoryCheckpointer | None = None
        self._pace: MemoryCheckpointPace | None = None
        """Only rank 0, which says when, has one."""

    def begin(self) -> None:
        """Begin with checkpoints of the state's present history. All ranks call it together."""
        self.wait()
        self._checkpointer = self._pace = None
        folder, every = memory_folder(), self._run.resilience.memory_checkpoint_every_steps
        if folder is None or not every:
            return
        boxes, events = [box for box in self._state.boxes() if travels(box)], self._records.events

        def failed(why: str) -> None:
            events.write("memory_checkpoint_failed", why=why)

        self._checkpointer = MemoryCheckpointer(folder, boxes, self._world, self._state.history, failed)
        if self._world.is_first:
            copy_s = sum(map(box_bytes, boxes)) / HOST_COPY_BYTES_PER_S
            self._pace = MemoryCheckpointPace(every, self._records.mtbf_s(), copy_s, events.write)

    @property
    def step(self) -> int | None:
        """Step of the newest in-memory checkpoint that all ranks have; None before the first."""
        return None if self._checkpointer is None else self._checkpointer.step

    def is_due(self, done: int, step_s: float | None) -> bool:
        """True if this rank says when, and one is due after `done` steps. `step_s`: the usual seconds of a step."""
        if self._checkpointer is None or self._pace is None or not self._checkpointer.is_on:
            return False
        return self._pace.is_due(done, step_s, self._checkpointer.stall_s)

    def save(self) -> None:
        """Save the state. Returns when this rank's part is copied."""
        if self._checkpointer is not None:
            self._checkpointer.save(self._state.position, self._state.boxes())
        if self._pace is not None:
            self._pace.saved(self._state.step)

    def wait(self) -> None:
        """Wait for the save in flight, if any."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def abandon(self) -> None:
        """Let go of the save in flight: its world is over."""
        if self._checkpointer is not None:
            self._checkpointer.abandon()


class MemoryCheckpointPace:
    """When one is due. One rank asks; the others hear of it in the step's exchange (`training.step.Requests`)."""

    def __init__(
        self, every_steps: int | Literal["auto"], mtbf_s: float, predicted_s: float, tell: Callable[..., None]
    ):
        """`mtbf_s`: seconds between failures of the job; `predicted_s`: how long one takes, until one was measured.

        tell: is called with the interval that was chosen, as facts of an event.
        """
        self._fixed = None if every_steps == "auto" else every_steps
        self._mtbf_s, self._predicted_s, self._tell = mtbf_s, predicted_s, tell
        self._saved: int | None = None
        self._told: int | None = None

    def is_due(self, done: int, step_s: float | None, measured_s: float | None) -> bool:
        """True if the state after `done` steps is to be saved.

        step_s: usual seconds of a step; measured_s: seconds of the newest save; None: not known yet. With "auto" the
        first is due at once: it shows how long one takes, and a new world may have lost those of the one before.
        """
        if self._fixed is not None:
            return done % self._fixed == 0
        if self._saved is None or step_s is None:
            return self._saved is None
        return done - self._saved >= self._every(step_s, measured_s)

    def saved(self, done: int) -> None:
        """Note that the state after `done` steps was saved."""
        self._saved = done

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
