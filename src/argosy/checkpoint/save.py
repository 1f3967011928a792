"""Saving: copy the state, write it while training goes on, commit it when it is whole on the disk."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from argosy.checkpoint import store
from argosy.checkpoint.store import CheckpointManifest, FileSum
from argosy.parallel.world import World


@dataclass(frozen=True)
class SaveResult:
    """How a save ended, the same on every rank."""

    step: int
    seconds: float
    """From the call to the commit, most of it in the background."""
    bytes: int
    error: str | None
    """Why there is no new checkpoint (the older ones are as they were); None if it is committed."""


class Saver:
    """Writes the checkpoints of a run. All ranks call it alike; one save is under way at a time.

    It has a process group of its own: collectives of a save never meet those of a step.
    """

    def __init__(self, run_dir: Path, world: World, done: Callable[[SaveResult], None]):
        """`done` hears of every save that ends, from the thread that waits for it."""
        self._run_dir = run_dir
        self._world = world
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._done = done
        self._thread: threading.Thread | None = None
        self._result: SaveResult | None = None

    def save(self, state: dict[str, Any], manifest: CheckpointManifest, background: bool) -> None:
        """Save `state` (nested dicts of tensors) as the checkpoint of `manifest.step`.

        Returns once the state is copied, or with `background` off once it is committed. A step that is
        committed already is left as it is.
        """
        self.wait()
        there = store.Checkpoint(store.step_folder(self._run_dir, manifest.step)) in store.committed(self._run_dir)
        if self._gather(there)[0]:  # the first rank's word: on a shared disk others may see it later
            return
        began = time.perf_counter()
        copy = _to_host(state)
        self._result = None
        self._thread = threading.Thread(target=self._write, args=(copy, manifest, began), name="argosy-save")
        self._thread.start()
        if not background:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way, if any, and report how it ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            assert self._result is not None
            self._done(self._result)

    def poll(self) -> None:
        """Report a save that has ended, without waiting for one that has not."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def _write(self, state: dict[str, Any], manifest: CheckpointManifest, began: float) -> None:
        folder = store.step_folder(self._run_dir, manifest.step)
        files: dict[str, FileSum] = {}
        error: str | None = None
        try:
            self._write_files(state, folder)
            # Every rank must reach the collectives below, so its error travels through them.
        except BaseException as problem:
            error = _words(problem)
        try:
            if error is None:
                files = self._sums_of_my_files(folder)
        except OSError as problem:
            error = str(problem)
        reports = self._gather((error, files))
        error = next((e for e, _ in reports if e), None)
        files = {name: file for _, part in reports for name, file in part.items()}
        if self._world.is_first:
            error = error or _commit(folder, manifest.model_copy(update={"files": files}))
            if error:
                with suppress(OSError):  # a disk that fails may refuse this too, and the others wait to hear
                    store.remove(folder)
        error = self._gather(error)[0]
        size = sum(file.bytes for file in files.values())
        self._result = SaveResult(manifest.step, time.perf_counter() - began, size, error)

    def _write_files(self, state: dict[str, Any], folder: Path) -> None:
        problems = self._gather(_make_empty(folder) if self._world.is_first else None)
        if problems[0]:
            raise OSError(problems[0])
        writer = _Writer(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # a world of one is no mistake
            dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)

    def _sums_of_my_files(self, folder: Path) -> dict[str, FileSum]:
        """Checksums of what this rank wrote: the writer names its files __RANK_NUMBER.distcp."""
        mine = f"__{self._world.rank}_"
        paths = [p for p in store.files_of(folder) if p.name.startswith(mine)]
        if self._world.is_first:
            paths.append(folder / ".metadata")
        return {path.name: store.file_sum(path) for path in paths}

    def _gather(self, mine: Any) -> list[Any]:
        if self._group is None:
            return [mine]
        everyone: list[Any] = [None] * self._world.size
        dist.all_gather_object(everyone, mine, group=self._group)
        return everyone


def _make_empty(folder: Path) -> str | None:
    try:
        if folder.exists():
            shutil.rmtree(folder)  # left by a process that died while writing: it has no marker
        folder.mkdir(parents=True)
    except OSError as problem:
        return str(problem)
    return None


def _commit(folder: Path, manifest: CheckpointManifest) -> str | None:
    try:
        store.commit(folder, manifest)
    except OSError as problem:
        return str(problem)
    return None


def _to_host(value: Any) -> Any:
    """A copy of the state in host memory, which the next step cannot change."""
    if isinstance(value, dict):
        return {key: _to_host(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value


class _Writer(dcp.FileSystemWriter):
    """DCP's, but it says what the system said of a disk: torch's zip writer covers that with a remark of its own."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as problem:
            if isinstance(problem.__context__, OSError):
                raise problem.__context__ from None
            raise


def _words(problem: BaseException) -> str:
    """The failure inside DCP's wrapping, in a line, e.g. "[Errno 28] No space left on device"."""
    if isinstance(problem, dcp.CheckpointException):
        problem = next(iter(problem.failures.values()))[0]
    line = (str(problem).splitlines() or [""])[0]
    return line if isinstance(problem, OSError) and line else f"{type(problem).__name__}: {line}"
