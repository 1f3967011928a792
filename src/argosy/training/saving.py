"""A rank's saves: those that are due, the last one, and the ways in which it leaves its world."""

from __future__ import annotations

from argosy.errors import StorageError
from argosy.training.bad_steps import BadStepPolicy
from argosy.training.memory_checkpoints import MemoryCheckpointing
from argosy.training.parts import Parts
from argosy.training.restore import Restorer
from argosy.training.step import Requests
from argosy.training.stop import HOLD_S


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

    def save_last_state(self) -> None:
        """Read no more, save the state if it is not saved yet, and wait for the disk.

        Raises: StorageError if the state cannot be saved.
        """
        self._parts.heartbeat.enter("finishing")
        self._parts.batches.close()
        self._restorer.make_replicas_agree()
        error = self._checkpointer.finish(self._state)
        self._parts.heartbeat.has_written(self._checkpointer.written_bytes)
        if error:
            raise StorageError(
                f"{self._parts.run_dir}: the state after step {self._state.step} could not be saved ({error}). Mend "
                "that, and run the same command again to go on from the newest checkpoint."
            )

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
