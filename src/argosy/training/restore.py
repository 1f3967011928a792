"""Restoring the state: from the newest there is when a world begins, from a checkpoint when the run rewinds."""

from __future__ import annotations

import time

from argosy.checkpoint.memory import memory_folder
from argosy.errors import Retryable, RunFailed
from argosy.observe.clock import forget_peak_memory
from argosy.parallel.world import give_back_freed_memory
from argosy.training.bad_steps import MOST_REWINDS, REMEDY, BadStepCounts, BadStepPolicy
from argosy.training.integrity import Integrity
from argosy.training.memory_checkpoints import MemoryCheckpointing
from argosy.training.parts import Parts
from argosy.training.recovery import recover


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
        if self.is_new and self._run.model.weights is not None:
            self._checkpointer.read_weights(state, self._run.model.weights)
        self._batches.follow()
        self._memory.begin()
        self._records.introduce()
        if not self.is_new:
            self._records.recovered(found)
        if world.is_first:
            self._records.metrics.forget_from(state.step)
            if found.last_update is not None:
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
                f"skipped other samples. {REMEDY}"
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
        self._memory.begin()
        self._batches.follow()
        if self._world.is_first:
            self._records.metrics.forget_from(state.step)
        self._records.tell("rewind", step=left, to_step=state.step)
        self._records.progress.say(f" back from step {left} to {state.step}: {checkpoint.folder}")
        return True

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
