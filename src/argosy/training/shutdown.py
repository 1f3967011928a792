"""The ways in which a process leaves its world: with its last state saved, after holding it for others, or at once."""

from __future__ import annotations

from pathlib import Path

from argosy.errors import StorageError
from argosy.observe.heartbeat import Heartbeat
from argosy.training.bad_steps import BadStepPolicy
from argosy.training.batches import Batches
from argosy.training.checkpointer import Checkpointer
from argosy.training.memory_checkpoints import MemoryCheckpointing
from argosy.training.restore import Restorer
from argosy.training.state import Survivor, TrainState
from argosy.training.stop import HOLD_S, StopSignal


class Shutdown:
    """Ends one process's part of a world."""

    def __init__(
        self,
        run_dir: Path,
        state: TrainState,
        survivor: Survivor,
        stop: StopSignal,
        checkpointer: Checkpointer,
        memory: MemoryCheckpointing,
        restorer: Restorer,
        batches: Batches,
        bad_steps: BadStepPolicy,
        heartbeat: Heartbeat,
    ):
        self._run_dir, self._state, self._survivor, self._stop = run_dir, state, survivor, stop
        self._checkpointer, self._memory, self._restorer = checkpointer, memory, restorer
        self._batches, self._bad_steps, self._heartbeat = batches, bad_steps, heartbeat

    def save_last_state(self) -> None:
        """Read no more, save the state if it is not saved yet, and wait for the disk. All processes call it together.

        Raises: StorageError if the state cannot be saved.
        """
        self._heartbeat.enter("finishing")
        self._batches.close()
        self._restorer.make_replicas_agree()
        if error := self._checkpointer.finish(self._state):
            raise StorageError(
                f"{self._run_dir}: the state after step {self._state.step} could not be saved ({error}). Mend that, "
                "and run the same command again to go on from the newest checkpoint."
            )

    def close(self) -> None:
        """Wait until what was saved is verified and copied away as well; nothing can be saved after that."""
        self._memory.wait()
        self._checkpointer.close()

    def hold(self) -> None:
        """Stand still, with the state where others can take it over, until this world is over. Raises: WorldIsOver.

        Returns if a signal comes, or nothing ends the world within HOLD_S.
        """
        self._memory.wait()
        self._restorer.show_safe_step()
        self._heartbeat.enter("waiting")
        self._stop.hold(HOLD_S)

    def abandon(self) -> None:
        """Leave at once, after an error here or in another process, with no thread or process of this one left behind.

        The next world goes on from what the survivor keeps.
        """
        self._survivor.bad_steps = self._bad_steps.counts()
        self._checkpointer.abandon()
        self._survivor.last_save_s = self._checkpointer.last_save_s
        self._memory.abandon()
        self._batches.close()
