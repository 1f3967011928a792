"""The state of one rank, saved and restored: in memory, on disk, when a world begins or ends, when the run rewinds.

In-memory checkpoints are saved so often that saving them and losing the steps between them cost least. If one holds
training up for c seconds, and a failure comes every M seconds on average, one is saved every sqrt(2 c M) seconds of
work (Young 1974; to higher order Daly 2006: `plan.cost.economy`), or more often as long as they take no more than a
thousandth of the time. c is measured with each of them, M follows from the devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from argosy.accelerator import forget_peak_memory
from argosy.checkpoint.exchange import travels
from argosy.checkpoint.memory import MemoryCheckpointer, memory_folder
from argosy.checkpoint.shards import box_bytes
from argosy.checkpoint.store import not_saved
from argosy.errors import Retryable, RunFailed
from argosy.parallel.world import give_back_freed_memory
from argosy.plan.cost.economy import HOST_COPY_BYTES_PER_S, memory_checkpoint_interval_s
from argosy.training.bad_steps import BAD_STEPS_REMEDY, MOST_REWINDS, BadStepCounts, BadStepPolicy
from argosy.training.integrity import Integrity
from argosy.training.parts import Parts
from argosy.training.recovery import recover
from argosy.training.step import Requests
from argosy.training.stop import HOLD_S

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
        before = self._checkpointer
        self._checkpointer = self._pace = None
        folder, every = memory_folder(), self._run.resilience.memory_checkpoint_every_steps
        if folder is None or not every:
            return
        boxes, events = [box for box in self._state.to_save() if travels(box)], self._records.events

        def failed(why: str) -> None:
            events.write("memory_checkpoint_failed", why=why)

        self._checkpointer = MemoryCheckpointer(folder, boxes, self._world, self._state.history, failed)
        if before is not None:
            before.close()  # not sooner: only now have all ranks ended their saves
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
            self._checkpointer.save(self._state.position, self._state.to_save())
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
    """The schedule of saves. One rank asks; the others hear of it in the step's exchange (`training.step.Requests`)."""

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


class Restorer:
    """Restores the state of one process. All processes call each method together, unless it says otherwise."""

    def __init__(self, parts: Parts, memory: MemoryCheckpointing, integrity: Integrity, bad_steps: BadStepPolicy):
        self._run, self._state, self._survivor, self._world = parts.run, parts.state, parts.survivor, parts.world
        self._checkpointer, self._batches, self._records = parts.checkpointer, parts.batches, parts.records
        self._heartbeat = parts.heartbeat
        self._memory, self._integrity, self._bad_steps = memory, integrity, bad_steps
        self.is_new = False
        """True once the state was found nowhere: the run begins with its initial weights."""
        self.is_survivors = False
        """True once it was found with survivors: what was due after its last step may have been interrupted."""

    def restore_or_initialize(self) -> None:
        """Go on from the newest state there is: of survivors, in memory, on disk; or from the initial weights."""
        state, world = self._state, self._world
        found = recover(state, self._survivor.state, self._checkpointer, memory_folder(), world)
        self.is_new, self.is_survivors = found.tier == "none", found.tier == "live"
        self._read_weights()
        self._batches.follow()
        self._memory.begin()
        self._records.introduce()
        if not self.is_new:
            self._records.recovered(found)
        if world.is_first:
            self._records.metrics.forget_from(state.step)
            if found.last_update is not None and found.last_update.has_loss:
                self._records.write_missing_line(found.last_update, state.tokens, self._batches.line)
        self._bad_steps.load_newest(world.gather(self._bad_steps.counts(), BadStepCounts))
        if not self.is_survivors:
            self._bad_steps.forget_bad_steps()
        self._bad_steps.remember(self._records.last_steps())
        self._replace_survivor()
        self._records.started(state.step)

    def rewind(self) -> None:
        """Go back to the newest checkpoint, as the step at hand is bad again and again; stay if there is none.

        Raises: RunFailed if the run went back there too often.
        """
        step = self._state.step
        if not self._restore_checkpoint():
            return
        if not self._bad_steps.rewound(self._state.step):
            raise RunFailed(
                f"step {step} is bad again after the run went back to step {self._state.step} {MOST_REWINDS} times and "
                f"skipped other samples. {BAD_STEPS_REMEDY}"
            )
        self._bad_steps.remember(self._records.last_steps())

    def make_replicas_agree(self) -> None:
        """Heal replicas that differ, so that what is saved or scored next is clean as far as that can be known."""
        if self._integrity.replicas_differ():
            self.heal_replicas()

    def heal_replicas(self) -> None:
        """Replace replicas that differ from most others; where no majority is right, go back to a checkpoint.

        Raises: Retryable if there is neither a majority nor a checkpoint.
        """
        found, are_healed = self._integrity.heal()
        if not are_healed:
            if not self._restore_checkpoint():
                self._survivor.state = None  # it is not to be trusted
                raise Retryable(
                    f"{found[0].name} differs between ranks {found[0].ranks}, there is no telling which is right, and "
                    "no checkpoint was saved yet. The same command starts from the beginning."
                )
            self._bad_steps.forget_bad_steps()
            self._bad_steps.remember(self._records.last_steps())
        self._integrity.suspect({rank for corrupt in found for rank in corrupt.ranks})

    def show_safe_step(self) -> None:
        """Show which step the run would go back to if everything were lost now. Each process does so for itself."""
        in_memory = self._memory.step
        steps = [*self._checkpointer.committed, *([] if in_memory is None else [in_memory])]
        if steps:
            self._heartbeat.can_go_back_to(max(steps))

    def _restore_checkpoint(self) -> bool:
        """Take the state back from the newest checkpoint, which was clean when it was saved; False if there is none.

        Samples that were skipped stay skipped.
        """
        state = self._state
        skipped, history, left = state.skipped, state.history, state.step
        state.in_update = True
        checkpoint = self._checkpointer.restore(state, at_most=left)
        state.in_update = False
        if checkpoint is None:
            return False
        state.skipped, state.last_update = skipped, None
        state.history = history.turned_back(state.step)
        self._read_weights()
        self._memory.begin()
        self._batches.follow()
        if self._world.is_first:
            self._records.metrics.forget_from(state.step)
        self._records.tell("rewind", step=left, to_step=state.step)
        self._records.progress.say(f" back from step {left} to {state.step}: {checkpoint.folder}")
        return True

    def _read_weights(self) -> None:
        """Read the weights that a new run starts from; those beside an adapter in any case, as no state holds them."""
        weights = self._run.model.weights
        if weights is not None and (self.is_new or self._state.model.has_adapter):
            self._checkpointer.read_weights(self._state, weights, before_each=self._heartbeat.advance)

    def _replace_survivor(self) -> None:
        """Make this state the one that survives the world, and count on the time since the last save of any rank."""
        before, self._survivor.state = self._survivor.state, self._state
        saved_s = self._survivor.last_save_s
        unsaved_s = max(self._world.gather(0.0 if saved_s is None else time.monotonic() - saved_s, float))
        self._checkpointer.last_save_s -= unsaved_s
        if before is not None:  # two states were in memory, which no step needs
            del before
            give_back_freed_memory()
            forget_peak_memory(self._world.device)


class Saving:
    """Saves the state on disk and in memory, before a world ends too. All ranks call each method together, but for
    `abandon`.
    """

    def __init__(self, parts: Parts, memory: MemoryCheckpointing, restorer: Restorer, bad_steps: BadStepPolicy):
        self._parts, self._state, self._checkpointer = parts, parts.state, parts.checkpointer
        self._memory, self._restorer, self._bad_steps = memory, restorer, bad_steps
        self._in_background = parts.run.checkpoint.background

    def save_if_due(self, requests: Requests) -> bool:
        """Save by steps, by minutes or for a world that is to end. Returns True if it was on disk.

        A run that is asked to stop saves nothing here: `save_last_state` does, and waits for it.
        """
        if requests.stop:
            return False
        with self._parts.clock.time("checkpoint"):
            on_disk = requests.save or self._checkpointer.is_due_by_steps(self._state.step)
            in_memory = requests.memory_checkpoint or requests.hold
            if on_disk or in_memory:
                self._parts.show("saving")
                self._restorer.make_replicas_agree()
            if on_disk:
                self._checkpointer.save(self._state, self._in_background and not requests.hold)
            if in_memory:
                self._memory.save()
            if on_disk or in_memory:
                self._parts.show("")
        return on_disk

    def repeat_save(self) -> None:
        """Save again what was to be saved before the last world ended, and was interrupted."""
        if self._restorer.is_survivors and self._checkpointer.has_missed(self._state.step):
            with self._parts.clock.time("checkpoint"):
                self._restorer.make_replicas_agree()
                self._checkpointer.save(self._state, self._in_background)

    def poll(self) -> None:
        """Report what has become of saves, and show how far they lead. Each process does so for itself."""
        self._checkpointer.poll()
        self._parts.heartbeat.has_written(self._checkpointer.written_bytes)
        self._restorer.show_safe_step()

    def save_last_state(self) -> bool:
        """Read no more, save the state if it is not saved yet, and wait for the disk. Returns False if it was saved.

        Raises: StorageError if the state cannot be saved.
        """
        self._parts.heartbeat.enter("finishing")
        self._parts.batches.close()
        self._restorer.make_replicas_agree()
        before_s = self._checkpointer.last_save_s
        error = self._checkpointer.finish(self._state)
        self._parts.heartbeat.has_written(self._checkpointer.written_bytes)
        if error:
            raise not_saved(self._parts.run_dir, self._state.step, error)
        return self._checkpointer.last_save_s > before_s

    def close(self) -> None:
        """Wait until what was saved is verified and copied away as well; nothing can be saved after that."""
        self._memory.wait()
        self._checkpointer.close()

    def hold(self) -> None:
        """Stand still, with the state where others can take it over, until this world is over. Raises: WorldIsOver.

        Returns if a signal comes, or nothing ends the world within HOLD_S.
        """
        self._parts.show("waiting for processes to join")
        self._memory.wait()
        self._restorer.show_safe_step()
        self._parts.heartbeat.enter("waiting")
        self._parts.stop.hold(HOLD_S)

    def abandon(self) -> None:
        """Leave at once, after an error here or in another process, with no thread or process of this one left behind.

        The next world goes on from what the survivor keeps.
        """
        survivor = self._parts.survivor
        survivor.bad_steps = self._bad_steps.counts()
        self._checkpointer.abandon()
        survivor.last_save_s = self._checkpointer.last_save_s
        self._memory.abandon()
        self._parts.batches.close()
        self._parts.show("")
