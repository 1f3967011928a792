"""The checkpointer: it decides when a checkpoint is due, saves the state, and restores it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from argosy.checkpoint import fence, store
from argosy.checkpoint.adapter import check_folder, find_weights
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.checksums import DamagedCheckpoint
from argosy.checkpoint.load import boxes_in, first_of, load_into, missing_from, problem_of, unusable
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.rank_writer import words
from argosy.checkpoint.remote import Remote
from argosy.checkpoint.save import Saver
from argosy.checkpoint.shards import TensorsToSave
from argosy.checkpoint.store import Checkpoint, Choice
from argosy.checkpoint.weights import MODEL_PREFIX, SCORE, fill_from_checkpoint, fill_from_folder
from argosy.checkpoint.writer import Upkeep
from argosy.config.schema import CheckpointConfig
from argosy.data.stores.model_folder import is_model_folder
from argosy.errors import ArgosyError, StorageError, UserError
from argosy.faults import fault
from argosy.observe.events import Events
from argosy.observe.screen import Progress
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.state import TrainState, generators, set_generators
from argosy.training.sync_memory import SavedSyncState

SAME_MODEL = "Use the model section that it was saved with, or another --run-dir to start anew."
SIZES_OF_WEIGHTS = "Leave out the sizes in the model section: those of model.weights are taken then."


class Checkpointer:
    """Saves a run's state by steps, by minutes and on request, and restores it."""

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointConfig,
        plan: Plan,
        data_identity: str,
        world: World,
        events: Events,
        progress: Progress,
        config_sha256: str = "",
        check: Callable[[], None] = lambda: None,
    ):
        """`check()` is called while a save is waited for, and may raise.

        Raises: UserError, the same on all processes, if checkpoint.remote cannot be used.
        """
        self._run_dir, self._settings, self._plan = run_dir, settings, plan
        self._data_identity, self._config_sha256 = data_identity, config_sha256
        self._world, self._events, self._progress = world, events, progress
        self._remote = Remote(settings.remote, run_dir) if settings.remote else None
        upkeep = Upkeep(settings.keep_last, settings.keep_every, settings.remote)
        self._saver = Saver(run_dir, world, self._hear, upkeep, check)
        self.last_save_s = self._save_before_s = time.monotonic()
        """Start of the last save that was not interrupted."""

    @property
    def committed(self) -> Collection[int]:
        """Steps whose checkpoints are known to be committed."""
        return self._saver.committed

    @property
    def is_due_by_time(self) -> bool:
        """True once checkpoint.every_minutes have passed, on rank 0, which keeps the time."""
        minutes = self._settings.every_minutes
        return bool(minutes) and self._world.is_first and time.monotonic() - self.last_save_s >= minutes * 60

    @property
    def written_bytes(self) -> int:
        """Bytes of checkpoints that this process has written."""
        return self._saver.written_bytes

    def is_due_by_steps(self, done: int) -> bool:
        """True if a checkpoint is due after `done` steps."""
        return bool(self._settings.every_steps) and done % self._settings.every_steps == 0

    def has_missed(self, done: int) -> bool:
        """True if the newest checkpoint that was due by steps within `done` steps is missing.

        Then the world ended while it was written. All processes call it together.
        """
        every = self._settings.every_steps
        due = done // every * every if every else 0
        return self._world.share_first(lambda: store.saved_step(self._run_dir), int) < due

    def save(self, state: TrainState, background: bool) -> None:
        """Save `state`; all processes call it together. Without `background`, wait until this one's part is written."""
        manifest = CheckpointManifest(
            step=state.step,
            tokens=state.tokens,
            skipped=state.skipped,
            rounds=state.rounds,
            history=state.history,
            saved_at_s=time.time(),
            plan=str(self._plan),
            data_identity=self._data_identity,
            config_sha256=self._config_sha256,
            base_sha256=state.base_sha256,
            has_optimizer=True,
            files={},
        )
        self._saver.save(TensorsToSave(state.to_save(), generators(self._world)), manifest, state.in_flight())
        self._save_before_s, self.last_save_s = self.last_save_s, time.monotonic()
        if not background:
            self._saver.wait()

    def replan(self, plan: Plan) -> None:
        """Note the plan in force, which the next checkpoints tell."""
        self._plan = plan

    def poll(self) -> None:
        """Report what has become of checkpoints meanwhile, without waiting."""
        self._saver.poll()

    def finish(self, state: TrainState) -> str | None:
        """Save `state`, the run's last, if it is not saved yet, and wait until it is committed.

        If a writer hung or died over it, it is saved once more, by others. All processes call it together. Returns why
        it could not be saved, the same on all; None if it was.
        """
        error = self._save_last(state)
        if error and any(self._world.gather(self._saver.writer_pid is None, bool)):
            error = self._save_last(state)
        return error

    def _save_last(self, state: TrainState) -> str | None:
        self._saver.wait()
        there = self._world.share_first(lambda: Checkpoint(store.step_folder(self._run_dir, state.step)).is_there, bool)
        if not there:
            self._saver.committed.discard(state.step)
            self.save(state, background=False)
        return next((e for e in self._world.gather(None if there else self._saver.last_error, str | None) if e), None)

    def forget_from(self, step: int) -> None:
        """Delete the checkpoints of `step` and later ones: the run turns away from them. All call it together.

        They lose their names, and the next save removes them. None is set aside: where all are later ones, a run that
        is started again would take them for damaged.
        """
        self._saver.wait()

        def forget() -> bool:
            for checkpoint in store.committed(self._run_dir):
                if checkpoint.step >= step:
                    fence.take_name(checkpoint.folder)
            self._forget_copies(step - 1)
            return True

        self._world.share_first(forget, bool)
        self._saver.committed = {saved for saved in self._saver.committed if saved < step}

    def close(self) -> None:
        """Wait until what was saved is verified, and in the remote place as well; nothing can be saved after that."""
        self._saver.close()

    def abandon(self) -> None:
        """Let go of the save in flight: its world is over, and it will not be committed."""
        if self._saver.is_in_flight:
            self.last_save_s = self._save_before_s
        self._saver.abandon()

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, here or in the remote place; None if there is none.

        It may turn out to be damaged. All processes call it together.
        """
        return self._world.share_first(self._newest_step, int | None)

    def restore(self, state: TrainState, at_most: int | None = None) -> Checkpoint | None:
        """Restore `state` from the newest whole checkpoint; None if the run has none. All processes call it together.

        at_most: only from one of that step or an earlier one; later ones are withdrawn, since the run turns away from
        them.

        Raises: UserError if the checkpoint is of another model; StorageError if all checkpoints are damaged.
        """
        self._saver.wait()
        try:
            here, failure = self._newest_here(at_most), None
        except StorageError as problem:
            here, failure = None, problem
        found = self._world.share_first(
            lambda: self._newest(here, failure, at_most), tuple[Checkpoint, list[int]] | None
        )
        if found is None:
            return None
        checkpoint, steps = found
        self._saver.committed = set(steps)
        there = boxes_in(checkpoint)
        weights, boxes, random = state.weights(), state.boxes(SavedSyncState.of(there)), generators(self._world)
        _check_fits(weights, checkpoint)
        fault("load", step=checkpoint.step)
        load_into(boxes | state.in_flight_before(there) | random, checkpoint)
        state.restored(boxes)
        set_generators(random, self._world)
        manifest = checkpoint.manifest
        state.step, state.tokens, state.rounds = manifest.step, manifest.tokens, manifest.rounds
        state.skipped, state.history, state.base_sha256 = manifest.skipped, manifest.history, manifest.base_sha256
        changed = self._config_sha256 not in ("", manifest.config_sha256)
        changed |= manifest.data_identity not in ("", self._data_identity)
        facts = {"config_changed": True} if changed else {}
        self._events.write("resume", step=state.step, checkpoint=str(checkpoint.folder), **facts)
        return checkpoint

    def read_weights(self, state: TrainState, folder: Path, before_each: Callable[[], None]) -> None:
        """Read only the weights, from a checkpoint, run or Hugging Face folder at `folder`: of a run with an adapter,
        those beside it, which must be those that the adapter has been trained with. before_each: is called before each
        tensor of a folder, which may be far away. Raises: UserError."""
        is_beside = state.model.has_adapter
        weights, quantised = state.base() if is_beside else state.weights(), state.quantised_base()
        if is_model_folder(folder):
            sha256 = self._world.share_first(lambda: check_folder(folder, state.base_sha256), str) if is_beside else ""
            fill_from_folder({**weights, **quantised}, folder, before_each)
        else:
            checkpoint = self._world.share_first(lambda: find_weights(folder, state.base_sha256), Checkpoint)
            _check_fits(_but_a_new_score({**weights, **quantised}, checkpoint), checkpoint, SIZES_OF_WEIGHTS)
            load_into(weights, checkpoint)
            fill_from_checkpoint(quantised, checkpoint, before_each)
            sha256 = checkpoint.manifest.sha256
        state.model.after_update()
        if is_beside:
            state.base_sha256 = sha256

    def _newest_step(self) -> int | None:
        here = max((c.step for c in store.committed(self._run_dir)), default=None)
        there = None if self._remote is None else self._newest_copy(self._remote, may_fail=here is not None)
        return max((step for step in (here, there) if step is not None), default=None)

    def _newest_here(self, at_most: int | None) -> Choice | None:
        """Return the newest whole one in the run's folder. Each process reads a share of the files that are checked."""
        world = self._world

        def check(checkpoint: Checkpoint) -> str | None:
            found = world.gather(problem_of(checkpoint, world.rank, world.size), str | None)
            return next((problem for problem in found if problem), None)

        there = world.share_first(lambda: store.committed(self._run_dir), list[Checkpoint])
        return store.newest_whole(self._run_dir, at_most, there, check)

    def _newest(
        self, here: Choice | None, failure: StorageError | None, at_most: int | None
    ) -> tuple[Checkpoint, list[int]] | None:
        """Return the checkpoint to go on from, and the steps of all that are left then.

        It is `here`, unless the remote place has a newer one. Raises: `failure`, why there is none here, if there is
        none there either.
        """
        choice = here if self._remote is None else self._newer_remote(self._remote, here, at_most)
        if choice is None:
            if failure is not None:
                raise failure
            return None
        for problem in choice.damaged:
            self._events.write("damaged_checkpoint", problem=problem)
        if choice.damaged:
            self._progress.say(str(choice))
        for newer in store.committed(self._run_dir):
            if newer.step > choice.checkpoint.step:
                store.withdraw(newer)  # or its step would count as saved, and as one to keep
        if at_most is not None:
            self._forget_copies(at_most)
        choice.checkpoint.mark_verified()
        return choice.checkpoint, [c.step for c in store.committed(self._run_dir)]

    def _newer_remote(self, remote: Remote, here: Choice | None, at_most: int | None) -> Choice | None:
        """Bring the newest whole one of the remote place here, if it is newer than `here`; otherwise return `here`.

        Raises: StorageError if that cannot be told and there is none here; UserError if it is of other data, which
        nobody who found none here has accepted.
        """
        damaged = here.damaged if here else ()
        before = math.inf if at_most is None else at_most + 1
        while (step := self._newest_copy(remote, here is not None, before)) is not None:
            if here and step <= here.checkpoint.step:
                break
            before = step
            try:
                checkpoint = remote.fetch(step, fence.own_generation())
            except DamagedCheckpoint as problem:
                damaged = (*damaged, str(problem))
                continue
            except ArgosyError:
                raise
            except Exception as problem:  # of any of fsspec's file systems
                unread = f"{self._settings.remote}: the checkpoint of step {step} cannot be read ({words(problem)})"
                if here is None:
                    raise StorageError(
                        f"checkpoint.remote = {unread}. Mend that; or delete that copy, to go on from an older one."
                    ) from None
                self._progress.say(f"checkpoint.remote = {unread}; going on from that of step {here.checkpoint.step}.")
                break
            if why := unusable(checkpoint):
                store.withdraw(checkpoint)
                damaged = (*damaged, why)
                continue
            self._events.write("fetched", step=step, remote=self._settings.remote)
            theirs = checkpoint.manifest.data_identity
            if here is None and theirs not in ("", self._data_identity) and not self._is_accepted():
                raise UserError(
                    f"checkpoint.remote = {self._settings.remote}: step {step} was trained with prepared data {theirs} "
                    f"and these are {self._data_identity}. Prepare the same data again; or, now that it is here, give "
                    "--accept-changes to go on from it with these."
                )
            return Choice(checkpoint, damaged)
        if here is None and damaged:  # a run never silently starts again
            raise StorageError(
                "\n".join(damaged) + f"\n  No checkpoint of checkpoint.remote = {self._settings.remote} is whole. "
                "Restore one, or leave the key out to start without what is there."
            )
        return Choice(here.checkpoint, damaged) if here else None

    def _is_accepted(self) -> bool:
        """Return True if the run was started to go on with its data, whatever it was trained with before."""
        try:
            return (self._run_dir / store.ACCEPTED).read_text() == self._data_identity
        except OSError:
            return False

    def _forget_copies(self, after: int) -> None:
        """Delete the copies of steps after `after`, if the remote place can be reached. Only one process calls it."""
        if self._remote is None:
            return
        try:
            self._remote.forget_after(after)
        except UserError:  # the copies there are another run's
            raise
        except Exception as problem:  # of any of fsspec's file systems
            self._progress.say(
                f"checkpoint.remote = {self._settings.remote}: its checkpoints after step {after}, which the run has "
                f"gone back from, could not be deleted ({problem}). Delete them there."
            )

    def _newest_copy(self, remote: Remote, may_fail: bool, before: float = math.inf) -> int | None:
        """Return the newest step before `before` of which there is a copy in the remote place."""
        try:
            return remote.newest(before)
        except UserError:  # the copies there are another run's
            raise
        except Exception as problem:  # of any of fsspec's file systems
            if not may_fail:
                raise StorageError(
                    f"checkpoint.remote = {self._settings.remote}: cannot be read ({problem}), and {self._run_dir} has "
                    "no whole checkpoint. Mend that, or leave the key out to start without what is there."
                ) from None
            self._progress.say(f"checkpoint.remote = {self._settings.remote} cannot be read: {problem}")
            return None

    def _hear(self, news: str, /, **facts: Any) -> None:
        """Record what has become of a checkpoint, and tell the user if it failed."""
        self._events.write(news, **facts)
        if news == "save_failed":
            self._progress.say(
                f"checkpoint of step {facts['step']} FAILED: {facts['error']}\n"
                "  Training goes on, and the earlier checkpoints are as they were. Free some space, or stop the run."
            )
        elif news == "drain_failed":
            self._progress.say(
                f"the checkpoint of step {facts['step']} could not be copied to {self._settings.remote}: "
                f"{facts['error']}\n  It is whole in {self._run_dir}. The next one will be copied again."
            )
        elif news == "upkeep_failed":
            self._progress.say(f"looking after the checkpoints failed: {facts['error']}")
        elif news == "damaged_checkpoint":
            self._progress.say(
                f"{facts['problem']}\n  It was found when the checkpoint was read back, which is withdrawn."
            )


def _but_a_new_score(weights: Mapping[Box, Any], checkpoint: Checkpoint) -> dict[Box, Any]:
    """Return `weights` without the head of a reward model, if the checkpoint is of a model without one."""
    has_one = any(box.name == MODEL_PREFIX + SCORE for box in boxes_in(checkpoint))
    return {box: part for box, part in weights.items() if has_one or box.name != MODEL_PREFIX + SCORE}


def _check_fits(weights: Mapping[Box, Any], checkpoint: Checkpoint, remedy: str = SAME_MODEL) -> None:
    problems = missing_from(weights, checkpoint)
    if problems:
        raise UserError(f"{checkpoint.folder} is of another model: {first_of(problems)}.\n  {remedy}")
