"""Keeping a run's state safe: when a checkpoint is due, what is in it, where a run goes on from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from argosy.checkpoint import store
from argosy.checkpoint.load import load_into, missing_from
from argosy.checkpoint.save import Saver, SaveResult
from argosy.checkpoint.store import Checkpoint, CheckpointManifest
from argosy.config.schema import CheckpointConfig
from argosy.errors import UserError
from argosy.observe.events import Events
from argosy.observe.progress import Progress
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.state import TrainState


class Keeper:
    """Saves a run's state by steps, by minutes and on request, and finds it again."""

    def __init__(
        self,
        run_dir: Path,
        settings: CheckpointConfig,
        plan: Plan,
        data_identity: str,
        world: World,
        events: Events,
        progress: Progress,
    ):
        self._run_dir, self._settings, self._plan, self._data_identity = (
            run_dir,
            settings,
            plan,
            data_identity,
        )
        self._world, self._events, self._progress = world, events, progress
        self._saver = Saver(run_dir, world, self._ended)
        self._last_save = time.monotonic()
        self.last_error: str | None = None
        """Why the newest save failed; None if it did not."""

    @property
    def is_due_by_time(self) -> bool:
        """Whether checkpoint.every_minutes have passed on the process that keeps the time."""
        minutes = self._settings.every_minutes
        return bool(minutes) and self._world.is_first and time.monotonic() - self._last_save >= minutes * 60

    def is_due_by_steps(self, done: int) -> bool:
        """Whether a checkpoint is due once `done` steps are done."""
        return bool(self._settings.every_steps) and done % self._settings.every_steps == 0

    def save(self, state: TrainState, background: bool) -> None:
        """Save `state`; all processes call it together."""
        manifest = CheckpointManifest(
            step=state.step,
            tokens=state.tokens,
            saved_at_s=time.time(),
            plan=str(self._plan),
            data_identity=self._data_identity,
            has_optimizer=True,
            files={},
        )
        self._saver.save(state.tensors(self._world), manifest, background)
        self._last_save = time.monotonic()

    def poll(self) -> None:
        """Report a background save that has ended meanwhile."""
        self._saver.poll()

    def wait(self) -> None:
        """Wait for a background save that is under way."""
        self._saver.wait()

    def restore(self, state: TrainState) -> Checkpoint | None:
        """Take `state` back from the newest whole checkpoint; None if the run has none.

        Raises: UserError if the checkpoint is of another model; RunFailed if all checkpoints are damaged.
        """
        checkpoint = self._agree(self._newest)
        if checkpoint is None:
            return None
        tensors = state.tensors(self._world)
        _check_fits(tensors["model"], checkpoint)
        load_into(tensors, checkpoint, self._world)
        state.restored(tensors, self._world)
        state.step, state.tokens = checkpoint.manifest.step, checkpoint.manifest.tokens
        self._events.write("resume", step=state.step, checkpoint=str(checkpoint.folder))
        return checkpoint

    def read_weights(self, state: TrainState, folder: Path) -> Checkpoint:
        """Start from the weights, and only them, of a checkpoint or run at `folder`. Raises: UserError."""
        checkpoint = self._agree(lambda: store.find(folder))
        assert checkpoint is not None
        weights = state.weights()
        _check_fits(weights, checkpoint)
        load_into({"model": weights}, checkpoint, self._world)
        state.model.after_update()
        return checkpoint

    def _newest(self) -> Checkpoint | None:
        choice = store.newest_whole(self._run_dir)
        if choice is None:
            return None
        for problem in choice.damaged:
            self._events.write("damaged_checkpoint", problem=problem)
        if choice.damaged:
            self._progress.say(str(choice))
        for newer in store.committed(self._run_dir):
            if newer.step > choice.checkpoint.step:
                store.withdraw(newer)  # or its step would count as saved, and as one of those to keep
        return choice.checkpoint

    def _agree(self, look: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """What the first process finds, for all: they may see a shared disk at different moments."""
        found: list[Checkpoint | Exception | None] = [None]
        if self._world.is_first:
            try:
                found = [look()]
            except Exception as problem:
                found = [problem]
        if self._world.size > 1:
            dist.broadcast_object_list(found, device=self._world.device)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _ended(self, result: SaveResult) -> None:
        self.last_error = result.error
        if result.error:
            self._events.write("save_failed", step=result.step, error=result.error)
            self._progress.say(
                f"checkpoint of step {result.step} FAILED: {result.error}\n"
                "  Training goes on; the checkpoints before it are as they were. Free some space, or stop the run."
            )
            return
        self._events.write("save", step=result.step, seconds=round(result.seconds, 3), bytes=result.bytes)
        if self._world.is_first:
            self._prune()

    def _prune(self) -> None:
        try:
            dropped = store.prune(self._run_dir, self._settings.keep_last, self._settings.keep_every)
        except OSError as problem:  # more is kept than was asked for: no reason to end a run
            self._events.write("prune_failed", error=str(problem))
            return
        for checkpoint in dropped:
            self._events.write("prune", step=checkpoint.step)


def _check_fits(model: dict[str, object], checkpoint: Checkpoint) -> None:
    problems = missing_from({"model": model}, checkpoint)
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(
            f"{checkpoint.folder} is of another model: {'; '.join(problems[:3])}{more}.\n"
            "  Use the model section that it was saved with, or another --run-dir to start anew."
        )
