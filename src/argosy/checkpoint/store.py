"""Checkpoints on disk: which exist, whether they are whole, which are kept.

    checkpoints/step-00000100/   files written by torch.distributed.checkpoint, and manifest.json

The manifest is the commit marker: it is renamed into place last, after every file it lists is on the disk with
its checksum. A folder without it is not a checkpoint, and no reader looks at it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from argosy.errors import ArgosyError, RunFailed, UserError
from argosy.files import atomic_write, file_sha256, sync_folder

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})")


class FileSum(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(frozen=True)
    bytes: int
    sha256: str


class CheckpointManifest(BaseModel):
    """What a checkpoint holds; its presence says that all of it is there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    step: int
    """Optimizer steps done; also the data cursor: the next sample is step * global_batch."""
    tokens: int
    """Tokens trained on."""
    saved_at_s: float
    """Seconds since 1970."""
    plan: str
    """The layout it was saved under."""
    data_identity: str
    """Identity of the prepared data (`Manifest.identity`); empty for imported weights."""
    has_optimizer: bool
    """False for imported weights: good for generate, evaluate and model.weights, not to resume from."""
    files: dict[str, FileSum]
    sha256: str = ""
    """Of all the rest; set by `commit`."""

    def checksum(self) -> str:
        """What `sha256` is if nothing of the manifest has changed."""
        return hashlib.sha256(self.model_dump_json(exclude={"sha256"}).encode()).hexdigest()


class Damaged(ArgosyError):
    """A committed checkpoint is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    folder: Path

    @cached_property
    def manifest(self) -> CheckpointManifest:
        """Raises: Damaged if the manifest itself cannot be read, or is not what was written."""
        path = self.folder / MANIFEST
        try:
            manifest = CheckpointManifest.model_validate_json(path.read_bytes())
        except (ValidationError, OSError) as error:
            raise Damaged(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
        if manifest.sha256 != manifest.checksum():
            raise Damaged(f"{path}: does not match its own checksum")
        return manifest

    @property
    def step(self) -> int:
        """The step in the folder's name."""
        match = _FOLDER.fullmatch(self.folder.name)
        assert match is not None
        return int(match[1])

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(file.bytes for file in self.manifest.files.values())

    def verify(self) -> None:
        """Read every file back. Raises: Damaged, naming the first file that is missing or differs."""
        if self.manifest.step != self.step:
            raise Damaged(f"{self.folder}: the manifest is that of step {self.manifest.step}")
        for name, wanted in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file():
                raise Damaged(f"{self.folder}: file {name} is missing")
            found = file_sum(path)
            if found.bytes != wanted.bytes:
                raise Damaged(f"{self.folder}: file {name} has {found.bytes} bytes, its manifest says {wanted.bytes}")
            if found.sha256 != wanted.sha256:
                raise Damaged(
                    f"{self.folder}: file {name} does not match its checksum "
                    f"(manifest {wanted.sha256[:8]}..., file {found.sha256[:8]}...)"
                )


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def committed(run_dir: Path) -> list[Checkpoint]:
    """The committed checkpoints of a run, oldest first."""
    folders = [f for f in (run_dir / "checkpoints").glob("step-*") if _FOLDER.fullmatch(f.name)]
    return sorted((Checkpoint(f) for f in folders if (f / MANIFEST).exists()), key=lambda c: c.step)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, and the newer ones that were found damaged."""

    checkpoint: Checkpoint
    damaged: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [*self.damaged, f"  Using {self.checkpoint.folder.name}, verified just now."]
        return "\n".join(lines)


def newest_whole(run_dir: Path) -> Choice | None:
    """The newest committed checkpoint whose files are all as written; None if there never was one.

    Raises: RunFailed if there are checkpoints and every one is damaged: a run never silently starts again.
    """
    damaged: list[str] = []
    for checkpoint in reversed(committed(run_dir)):
        try:
            checkpoint.verify()
        except Damaged as problem:
            damaged.append(str(problem))
            continue
        return Choice(checkpoint, tuple(damaged))
    if damaged:
        raise RunFailed(
            "\n".join(damaged)
            + f"\n  No checkpoint of {run_dir} is whole. Restore one from a copy, or start anew with "
            "another --run-dir."
        )
    return None


def find(path: Path) -> Checkpoint:
    """The checkpoint that a user names: its folder, or a run folder (the newest whole one). Raises: UserError."""
    if _FOLDER.fullmatch(path.name) and (path / MANIFEST).exists():
        return _verified(Checkpoint(path))
    choice = newest_whole(path)
    if choice is None:
        raise UserError(
            f"{path}: no committed checkpoint there. Give a run folder (runs/NAME) or one of its "
            "checkpoints (runs/NAME/checkpoints/step-...)."
        )
    return choice.checkpoint


def _verified(checkpoint: Checkpoint) -> Checkpoint:
    try:
        checkpoint.verify()
    except Damaged as problem:
        raise UserError(f"{problem}. Name the run's folder instead: its newest whole checkpoint is taken.") from None
    return checkpoint


def prune(run_dir: Path, keep_last: int, keep_every: int) -> list[Checkpoint]:
    """Delete all checkpoints but the newest `keep_last` and those at multiples of `keep_every` (0: none of these).

    Returns the deleted ones.
    """
    older = committed(run_dir)[:-keep_last]
    dropped = [c for c in older if not (keep_every and c.step % keep_every == 0)]
    for checkpoint in dropped:
        remove(checkpoint.folder)
    return dropped


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder; its marker goes first, so that no reader meets a part of it."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def withdraw(checkpoint: Checkpoint) -> None:
    """Make a damaged checkpoint none: its files stay to be looked at, until its step is saved again."""
    (checkpoint.folder / MANIFEST).rename(checkpoint.folder / f"{MANIFEST}.damaged")


def commit(folder: Path, manifest: CheckpointManifest) -> None:
    """Make `folder` a checkpoint: its files are on the disk already; write the marker, whole or not at all."""
    signed = manifest.model_copy(update={"sha256": manifest.checksum()})
    with atomic_write(folder / MANIFEST) as file:
        file.write(signed.model_dump_json(indent=1).encode())
    sync_folder(folder.parent)


def file_sum(path: Path) -> FileSum:
    """Size and SHA-256 of a file."""
    return FileSum(bytes=path.stat().st_size, sha256=file_sha256(path))


def files_of(folder: Path) -> Iterator[Path]:
    """The data files of a checkpoint's folder (not the marker)."""
    return (f for f in sorted(folder.iterdir()) if not f.name.startswith(MANIFEST))
