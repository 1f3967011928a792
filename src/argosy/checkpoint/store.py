"""Checkpoints on disk: which exist, whether they are whole, which are kept.

    checkpoints/step-00000100/                      rank-00000.safetensors ..., manifest.json, verified.json
    checkpoints/step-00000200.generation-0002.partial/   being written, by the processes of generation 2
    checkpoints/step-00000050.withdrawn/            found damaged, kept to be looked at
    checkpoints/step-00000030.gone/                 to be deleted, also unfinished ones of a generation that is over

A checkpoint is committed by renaming its folder, once all its files and the manifest, with the checksum of each, are on
the disk. The marker verified.json is added when every byte was read back and found as it was written. Only the standard
library is needed: the process that writes checkpoints has no torch.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from argosy.checkpoint.checksums import (
    RECORD_BYTES,
    DamagedCheckpoint,
    check_files,
    checked,
    signed,
    step_name,
    step_of,
)
from argosy.checkpoint.fence import GONE_ENDING, check_generation, partial_folders, take_name
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.errors import ArgosyError, ArgosyWarning, StorageError, UserError
from argosy.faults import fault
from argosy.files import atomic_write, sync_folder

MANIFEST, VERIFIED = "manifest.json", "verified.json"
VERIFIED_KEPT = 2
"""Number of verified checkpoints that a run always keeps."""
WITHDRAWN = ".withdrawn"
ACCEPTED = ".accepted-data"
"""File of a run's folder: the prepared data to go on with, whatever data a copy of a checkpoint was trained with."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    folder: Path

    @cached_property
    def manifest(self) -> CheckpointManifest:
        """Raises: DamagedCheckpoint if the manifest itself cannot be read, or is not what was written."""
        return CheckpointManifest.from_bytes(_read(self.folder / MANIFEST), self.folder / MANIFEST)

    @property
    def step(self) -> int:
        """The step in the folder's name."""
        step = step_of(self.folder.name)
        assert step is not None
        return step

    @property
    def is_there(self) -> bool:
        """True if it has been committed, and not deleted since."""
        return (self.folder / MANIFEST).exists()

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files.values())

    @property
    def is_verified(self) -> bool:
        """True if it was read back after it was committed, and was whole then."""
        try:
            return (self.folder / VERIFIED).exists() and not self._marker_differs()
        except ArgosyError:
            return False

    def changed_file(self) -> str | None:
        """Return the name of a file that is gone, of another length, or younger than the mark that all were whole."""
        marked_ns = (self.folder / VERIFIED).stat().st_mtime_ns if self.is_verified else None
        for name, entry in sorted(self.manifest.files.items()):
            try:
                found = (self.folder / name).stat()
            except OSError:
                return name
            if found.st_size != entry.bytes or (marked_ns is not None and found.st_mtime_ns > marked_ns):
                return name
        return None

    def share(self, rank: int, size: int) -> list[str]:
        """Return the files that one of `size` readers reads; if there are several, not those that it wrote itself."""
        return sorted(self.manifest.files)[(rank + 1) % size :: size]

    def verify(self, names: Collection[str] | None = None) -> None:
        """Read the files of `names`, by default all, back from the disk.

        Raises: DamagedCheckpoint, naming the first that is missing or differs.
        """
        fault("verify", step=self.step)
        if self.manifest.step != self.step:
            raise DamagedCheckpoint(f"{self.folder}: {MANIFEST} is that of step {self.manifest.step}")
        if (self.folder / VERIFIED).exists() and self._marker_differs():
            raise DamagedCheckpoint(f"{self.folder}: {VERIFIED} is that of another checkpoint")
        files = self.manifest.files
        check_files(self.folder, files if names is None else {name: files[name] for name in names})

    def problem(self, rank: int = 0, size: int = 1) -> str | None:
        """Return what `verify` finds in a reader's share; None if that is whole."""
        try:
            self.verify(self.share(rank, size))
        except DamagedCheckpoint as problem:
            return str(problem)
        return None

    def mark_verified(self) -> None:
        """Note that `verify` found it whole."""
        if self.is_verified:
            return
        try:
            with atomic_write(self.folder / VERIFIED) as file:
                file.write(_marker(self.manifest))
        except FileNotFoundError:  # another process marked it at the same moment, with the same bytes
            if not self.is_verified:
                raise

    def _marker_differs(self) -> bool:
        path = self.folder / VERIFIED
        checked(found := _read(path), path)
        return found != _marker(self.manifest)


def _marker(manifest: CheckpointManifest) -> bytes:
    """Return the content of verified.json. It does not depend on time, so that two processes write the same bytes."""
    return signed({"manifest_sha256": manifest.sha256})


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / step_name(step)


def committed(run_dir: Path) -> list[Checkpoint]:
    """Return the committed checkpoints of a run, oldest first."""
    folders = [f for f in (run_dir / "checkpoints").glob("step-*") if step_of(f.name) is not None]
    return sorted((c for c in map(Checkpoint, folders) if c.is_there), key=lambda c: c.step)


def saved_step(run_dir: Path) -> int:
    """Return the step of a run's newest committed checkpoint; 0 if it has none."""
    return max((checkpoint.step for checkpoint in committed(run_dir)), default=0)


def not_saved(run_dir: Path, step: int, error: str) -> StorageError:
    """Return what a run ends with whose last state could not be saved; error: why."""
    return StorageError(
        f"{run_dir}: the state after step {step} could not be saved ({error}). Mend that, and run the same command "
        "again to go on from the newest checkpoint."
    )


def how_to_go_on(run_dir: Path) -> str:
    """Return a sentence on how to go on with a run that ended before its last step."""
    checkpoints = committed(run_dir)
    where = f"from step {checkpoints[-1].step}" if checkpoints else "from the start: nothing was saved yet"
    return f"The same command goes on {where} ({run_dir})."


def newest_verified(run_dir: Path) -> Checkpoint | None:
    """Return the newest checkpoint that was read back and found whole, if any."""
    return next((c for c in reversed(committed(run_dir)) if c.is_verified), None)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and the newer ones that were found damaged."""

    checkpoint: Checkpoint
    damaged: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*self.damaged, f"  Using {self.checkpoint.folder.name}, verified just now."]
        return "\n".join(lines)


def newest_whole(
    run_dir: Path,
    at_most: int | None = None,
    there: Sequence[Checkpoint] | None = None,
    check: Callable[[Checkpoint], str | None] = Checkpoint.problem,
) -> Choice | None:
    """Return the newest committed checkpoint whose files are all as written; None if there never was one.

    at_most: the last step that will do. there: the committed checkpoints, if the caller has looked. check: reads one
    back, and returns what is wrong with it.
    Raises: StorageError if there are checkpoints and every one is damaged: a run never silently starts again. UserError
    if one has another format.
    """
    damaged: list[str] = []
    for checkpoint in reversed(committed(run_dir) if there is None else there):
        if at_most is not None and checkpoint.step > at_most:
            continue
        if (problem := check(checkpoint)) is None:
            return Choice(checkpoint, tuple(damaged))
        damaged.append(problem)
    withdrawn = sorted((run_dir / "checkpoints").glob(f"step-*{WITHDRAWN}"))
    if damaged or withdrawn:
        lines = [*damaged, *(f"{folder}: was withdrawn before" for folder in withdrawn)]
        raise StorageError(
            "\n".join(lines) + f"\n  No checkpoint of {run_dir} is whole. Restore one from a copy, or start anew with "
            "another --run-dir."
        )
    return None


def find(path: Path, check: Callable[[Checkpoint], str | None]) -> Checkpoint:
    """Return the checkpoint that a user names by its folder, or by a run folder (the newest whole one there).

    check: as of `newest_whole`. Warns of newer ones that are damaged. Raises: UserError.
    """
    if step_of(path.name) is not None and Checkpoint(path).is_there:
        if problem := check(Checkpoint(path)):
            raise UserError(f"{problem}. Name the run's folder instead: its newest whole checkpoint is taken.")
        return Checkpoint(path)
    choice = newest_whole(path, check=check)
    if choice is None:
        of_sites = [str(folder) for folder in sorted(path.glob("sites/*")) if committed(folder)]
        named = f"that of a site of this run ({', '.join(of_sites)})" if of_sites else "a run folder (runs/NAME)"
        raise UserError(
            f"{path}: no committed checkpoint there. Give {named} or one of its checkpoints (.../checkpoints/step-...)."
        )
    if choice.damaged:
        warnings.warn(str(choice), ArgosyWarning, stacklevel=2)
    return choice.checkpoint


def refuse_adapter_alone(path: Path, found: Checkpoint) -> None:
    """Raises: UserError if the checkpoint that was found at `path` does not hold whole weights."""
    if found.manifest.base_sha256:
        raise UserError(
            f"model.weights = {path}: {found.folder} holds an adapter alone, not whole weights. Merge it with its own "
            f"first: argosy checkpoint merge {path} --out FOLDER."
        )


def prune(
    run_dir: Path,
    keep_last: int,
    keep_every: int,
    keep_verified: int = VERIFIED_KEPT,
    spare: Iterable[int] = (),
    keep_unread: bool = False,
    dry_run: bool = False,
) -> list[Checkpoint]:
    """Delete old checkpoints, and return them; with `dry_run`, return those that would be deleted.

    Kept are the newest `keep_last`, the newest `keep_verified` of the verified ones, those at multiples of `keep_every`
    (0: none of these), those of the steps `spare`, and, with `keep_unread`, those that were not read back yet. So a
    verified one is deleted only once newer ones are verified.
    """
    there = committed(run_dir)
    verified = [c for c in there if c.is_verified]
    unread = [c for c in there if keep_unread and not c.is_verified]
    kept = {c.step for c in (*there[-keep_last:], *verified[-keep_verified:], *unread)} | {*spare}
    dropped = [c for c in there if c.step not in kept and not (keep_every and c.step % keep_every == 0)]
    for checkpoint in () if dry_run else dropped:
        remove(checkpoint.folder)
    return dropped


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder; its name goes first: no reader meets a part, and `sweep` what a kill leaves."""
    with suppress(FileNotFoundError):  # another process deletes it
        shutil.rmtree(take_name(folder), ignore_errors=True)


def discard(partial: Path) -> None:
    """Delete what was written of a checkpoint that will not be committed, if the disk lets us."""
    shutil.rmtree(partial, ignore_errors=True)


def withdraw(checkpoint: Checkpoint) -> None:
    """Withdraw a checkpoint that is damaged, or that the run has turned away from.

    Its files stay to be looked at, in a folder of another name.
    """
    aside = checkpoint.folder.with_name(checkpoint.folder.name + WITHDRAWN)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.folder.rename(aside)


def sweep(run_dir: Path, generation: int, before_step: int | None = None) -> None:
    """Delete unfinished folders of `generation` and older ones; with `before_step`, only those of earlier steps."""
    for folder in (run_dir / "checkpoints").glob(f"step-*{GONE_ENDING}"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder, step, theirs in partial_folders(run_dir):
        if theirs <= generation and (before_step is None or step < before_step):
            shutil.rmtree(folder, ignore_errors=True)


def commit(partial: Path, manifest: CheckpointManifest, generation: int | None = None) -> Checkpoint:
    """Make `partial`, whose files are on the disk already, the checkpoint of `manifest.step`.

    Files that the manifest does not list are deleted. A step that is committed already stays as it is.

    Raises: Fenced if a generation after `generation` (the manifest's) has begun, OSError.
    """
    checkpoints = partial.parent
    folder = step_folder(checkpoints.parent, manifest.step)
    for path in partial.iterdir():
        if path.name not in manifest.files:
            path.unlink()
    with atomic_write(partial / MANIFEST) as file:
        file.write(manifest.to_bytes())
    check_generation(checkpoints.parent, manifest.generation if generation is None else generation)
    if Checkpoint(folder).is_there:
        shutil.rmtree(partial, ignore_errors=True)
        return Checkpoint(folder)
    if folder.is_dir():  # the rest of one that was being deleted
        left = take_name(folder)
        if Checkpoint(left).is_there:  # it was committed this very moment
            left.rename(folder)
    fault("rename", step=manifest.step)
    partial.rename(folder)
    fault("renamed", step=manifest.step)
    sync_folder(checkpoints)
    return Checkpoint(folder)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(RECORD_BYTES + 1)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read ({error.strerror})") from None
