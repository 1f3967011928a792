"""Checkpoints on disk: which exist, whether they are whole, which are kept.

    checkpoints/step-00000100/                      rank-00000.safetensors ..., manifest.json, verified.json
    checkpoints/step-00000200.generation-0002.partial/   being written, by the processes of generation 2
    checkpoints/step-00000050.withdrawn/            found damaged, kept to be looked at
    checkpoints/step-00000040.generation-0001.partial.gone/   of a generation that is over, to be deleted

A checkpoint comes to be by the renaming of its folder, once all its files and the manifest, with the checksum of each,
are on the disk. The marker verified.json is added when every byte was read back and found as it was written. Only the
standard library is needed: the process that writes checkpoints has no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from argosy.checkpoint.checksums import Damaged, FileSum, check_files, checked, signed
from argosy.checkpoint.history import History
from argosy.errors import ArgosyError, StorageError, UserError
from argosy.faults import fault
from argosy.files import PARTIAL, atomic_write, sync_folder

FORMAT = 2
MANIFEST, VERIFIED = "manifest.json", "verified.json"
GENERATION_FILE = ".generation"
"""In the run's folder: the number of the generation, by the members of which alone checkpoints are committed."""
GENERATION = "ARGOSY_GENERATION"
"""Environment variable: the generation that a process belongs to."""
VERIFIED_KEPT = 2
"""So many verified checkpoints of a run are never deleted by itself."""
FOLDER = re.compile(r"step-(\d{8,})")
"""A checkpoint's name."""
WITHDRAWN = ".withdrawn"
GONE = ".gone"
"""Ends the names of folders that have lost theirs, for whoever has the time to delete them."""
_WAS_CALLED = "epoch"
"""A generation's name in the folders of runs that began before it was called so: they go on."""
_PARTIAL = re.compile(rf"step-(\d{{8,}})\.(?:generation|{_WAS_CALLED})-(\d{{4,}})" + re.escape(PARTIAL))


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint holds; its presence in a folder of that name says that all of it is there."""

    format: int = FORMAT
    step: int
    """Optimizer steps done; also the data cursor: the next sample is step * global_batch."""
    tokens: int
    """Tokens trained on."""
    saved_at_s: float
    """Seconds since 1970."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges of samples that are part of the cursor: no update is made from them."""
    history: History = field(default_factory=History)
    plan: str
    """The layout it was saved under."""
    data_identity: str
    """Identity of the prepared data (`Manifest.identity`); empty for imported weights."""
    config_sha256: str = ""
    """Of the run file, without what may change when a run goes on (`config.identity`)."""
    has_optimizer: bool
    """False for imported weights: good for generate, evaluate and model.weights, not to resume from."""
    generation: int = 0
    """Which wrote it."""
    files: dict[str, FileSum]

    def to_record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> CheckpointManifest:
        """What `to_record` gave."""
        rest = {key: value for key, value in record.items() if key not in ("files", "skipped", "history")}
        past = record["history"]
        if _WAS_CALLED in rest:
            rest["generation"] = rest.pop(_WAS_CALLED)
        return cls(
            files={name: FileSum(**file) for name, file in record["files"].items()},
            skipped=tuple((first, end) for first, end in record["skipped"]),
            history=History(past["depth"], tuple((name, last) for name, last in past["ended"]), past["world"]),
            **rest,
        )

    def to_bytes(self) -> bytes:
        """As it stands in the file, signed."""
        return signed(self.to_record())

    @cached_property
    def sha256(self) -> str:
        """Of `to_bytes`: which checkpoint it is."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path | str) -> CheckpointManifest:
        """What `to_bytes` gave. Raises: Damaged, UserError if it is of another format; both name `path`."""
        record = checked(data, path)
        if record.get("format") != FORMAT:
            raise UserError(
                f"{path}: format = {record.get('format')}, and this version reads checkpoints of format {FORMAT}. Go "
                "on with the version that wrote it, or start anew with another --run-dir."
            )
        manifest = cls.from_record(record)
        # Of the bytes that are there: `to_bytes` would give a key that was renamed its new name.
        vars(manifest)["sha256"] = hashlib.sha256(data).hexdigest()
        return manifest


class Fenced(ArgosyError):
    """The run has gone on without this process: a later generation has begun, and what it writes is not wanted."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    folder: Path

    @cached_property
    def manifest(self) -> CheckpointManifest:
        """Raises: Damaged if the manifest itself cannot be read, or is not what was written."""
        return CheckpointManifest.from_bytes(_read(self.folder / MANIFEST), self.folder / MANIFEST)

    @property
    def step(self) -> int:
        """The step in the folder's name."""
        match = FOLDER.fullmatch(self.folder.name)
        assert match is not None
        return int(match[1])

    @property
    def is_there(self) -> bool:
        """Whether it has been committed, and not deleted since."""
        return (self.folder / MANIFEST).exists()

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(file.bytes for file in self.manifest.files.values())

    @property
    def is_verified(self) -> bool:
        """Whether it was read back after it was committed, and was whole then."""
        try:
            return (self.folder / VERIFIED).exists() and not self._marker_differs()
        except ArgosyError:
            return False

    def share(self, rank: int, size: int) -> list[str]:
        """The files that one of `size` readers reads: where there are several, not what it wrote itself."""
        return sorted(self.manifest.files)[(rank + 1) % size :: size]

    def verify(self, names: Collection[str] | None = None) -> None:
        """Read every file back, from the disk, or only those of `names`.

        Raises: Damaged, naming the first that is missing or differs.
        """
        fault("verify", step=self.step)
        if self.manifest.step != self.step:
            raise Damaged(f"{self.folder}: {MANIFEST} is that of step {self.manifest.step}")
        if (self.folder / VERIFIED).exists() and self._marker_differs():
            raise Damaged(f"{self.folder}: {VERIFIED} is that of another checkpoint")
        files = self.manifest.files
        check_files(self.folder, files if names is None else {name: files[name] for name in names})

    def problem(self, rank: int = 0, size: int = 1) -> str | None:
        """What `verify` finds in a reader's share; None if that is whole."""
        try:
            self.verify(self.share(rank, size))
        except Damaged as problem:
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
    """What verified.json is; nothing of the moment, so that two processes that write it write the same bytes."""
    return signed({"manifest_sha256": manifest.sha256})


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def partial_folder(run_dir: Path, step: int, generation: int) -> Path:
    """Where the processes of `generation` write it."""
    return run_dir / "checkpoints" / f"step-{step:08d}.generation-{generation:04d}{PARTIAL}"


def shard_name(rank: int) -> str:
    """The file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def own_generation() -> int:
    """The generation that this process belongs to; 0 where nobody counts."""
    return int(os.environ.get(GENERATION, "0"))


def newest_generation(run_dir: Path) -> int:
    """The generation in force in a run's folder, or that was last; 0 if none has begun."""
    for name in (GENERATION_FILE, f".{_WAS_CALLED}"):
        with suppress(FileNotFoundError):
            return int((run_dir / name).read_text())
    return 0


def begin_generation(run_dir: Path, generation: int) -> None:
    """From now on only processes of `generation` commit checkpoints there.

    What processes of older generations are writing loses its name: one which has just asked `check_generation`, and
    stood still since, has nothing to commit when it wakes.
    """
    with atomic_write(run_dir / GENERATION_FILE) as file:
        file.write(f"{generation}\n".encode())
    for folder, _, theirs in _partials(run_dir):
        if theirs < generation:
            with suppress(OSError):  # it has just been committed, or deleted
                _set_aside(folder)


def check_generation(run_dir: Path, generation: int) -> None:
    """Raises: Fenced if a generation after `generation` has begun in `run_dir`, or if that cannot be told."""
    try:
        newest = newest_generation(run_dir)
    except (OSError, ValueError) as error:
        raise Fenced(f"{run_dir / GENERATION_FILE}: cannot be read ({error}), so nothing is written") from None
    if newest > generation:
        raise Fenced(
            f"generation {newest} of {run_dir} has begun, and this process is of generation {generation}: it writes "
            "nothing"
        )


def is_in_force(run_dir: Path, generation: int) -> bool:
    """Whether `check_generation` has nothing against it."""
    try:
        check_generation(run_dir, generation)
    except Fenced:
        return False
    return True


def committed(run_dir: Path) -> list[Checkpoint]:
    """The committed checkpoints of a run, oldest first."""
    folders = [f for f in (run_dir / "checkpoints").glob("step-*") if FOLDER.fullmatch(f.name)]
    return sorted((c for c in map(Checkpoint, folders) if c.is_there), key=lambda c: c.step)


def how_to_go_on(run_dir: Path) -> str:
    """What the user can do with a run that ended before its last step."""
    checkpoints = committed(run_dir)
    where = f"from step {checkpoints[-1].step}" if checkpoints else "from the start: nothing was saved yet"
    return f"The same command goes on {where} ({run_dir})."


def newest_verified(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that was read back and found whole."""
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
    """The newest committed checkpoint whose files are all as written, of step `at_most` or an earlier one if that is
    given; None if there never was one.

    there: those that are committed, if the caller has looked. check: reads one back, and says what is wrong with it.
    Raises: StorageError if there are checkpoints and every one is damaged: a run never silently starts again. UserError
    if one is of another format.
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


def find(path: Path) -> Checkpoint:
    """The checkpoint that a user names: its folder, or a run folder (the newest whole one). Raises: UserError."""
    if FOLDER.fullmatch(path.name) and Checkpoint(path).is_there:
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


def prune(
    run_dir: Path,
    keep_last: int,
    keep_every: int,
    keep_verified: int = VERIFIED_KEPT,
    spare: Iterable[int] = (),
    keep_unread: bool = False,
) -> list[Checkpoint]:
    """Delete all checkpoints but the newest `keep_last`, the newest `keep_verified` of those that are verified, those
    at multiples of `keep_every` (0: none of these), those of the steps `spare`, and, with `keep_unread`, those that
    were not read back yet. Returns the deleted ones.

    So no verified one goes before a newer one is verified.
    """
    there = committed(run_dir)
    verified = [c for c in there if c.is_verified]
    unread = [c for c in there if keep_unread and not c.is_verified]
    kept = {c.step for c in (*there[-keep_last:], *verified[-keep_verified:], *unread)} | {*spare}
    dropped = [c for c in there if c.step not in kept and not (keep_every and c.step % keep_every == 0)]
    for checkpoint in dropped:
        remove(checkpoint.folder)
    return dropped


def remove(folder: Path) -> None:
    """Delete a checkpoint's folder; its manifest goes first, so that no reader meets a part of it."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def discard(partial: Path) -> None:
    """Delete what was written of a checkpoint that is not to be; a disk that refuses is left with it."""
    shutil.rmtree(partial, ignore_errors=True)


def withdraw(checkpoint: Checkpoint) -> None:
    """Make a checkpoint that is damaged, or of a past that did not come to stay, none: its files stay to be looked at,
    in a folder of another name.
    """
    aside = checkpoint.folder.with_name(checkpoint.folder.name + WITHDRAWN)
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.folder.rename(aside)


def sweep(run_dir: Path, generation: int, before_step: int | None = None) -> None:
    """Delete what writers of `generation` or older ones left unfinished: all, or only of steps before `before_step`."""
    for folder in (run_dir / "checkpoints").glob(f"step-*{GONE}"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder, step, theirs in _partials(run_dir):
        if theirs <= generation and (before_step is None or step < before_step):
            shutil.rmtree(folder, ignore_errors=True)


def commit(partial: Path, manifest: CheckpointManifest, generation: int | None = None) -> Checkpoint:
    """Make `partial`, whose files are on the disk already, the checkpoint of `manifest.step`; a file that the manifest
    does not list goes. A step that is committed already stays as it is.

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
    if folder.is_dir():  # what is left of one that was being deleted
        left = _set_aside(folder)
        if Checkpoint(left).is_there:  # it was committed this very moment
            left.rename(folder)
    fault("rename", step=manifest.step)
    partial.rename(folder)
    fault("renamed", step=manifest.step)
    sync_folder(checkpoints)
    return Checkpoint(folder)


def _partials(run_dir: Path) -> list[tuple[Path, int, int]]:
    """The folders that checkpoints are being written in, or were, with step and generation."""
    folders = (run_dir / "checkpoints").glob(f"step-*{PARTIAL}")
    return [(folder, int(m[1]), int(m[2])) for folder in folders if (m := _PARTIAL.fullmatch(folder.name))]


def _set_aside(folder: Path) -> Path:
    """Take its name from a folder, at once, whatever is in it."""
    gone = folder.with_name(folder.name + GONE)
    shutil.rmtree(gone, ignore_errors=True)
    return folder.rename(gone)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from None
