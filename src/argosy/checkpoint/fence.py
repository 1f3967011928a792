"""The fence: only processes of the newest generation of a run commit checkpoints, and an older one's find that out.

Each generation writes in folders of its own name. When the next one begins, these lose their names: so a process that
has just asked `check_generation`, and stood still since, has nothing to commit when it wakes.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from argosy.checkpoint.claims import Claims, Taken
from argosy.errors import ArgosyError
from argosy.files import PARTIAL, atomic_write

CLAIMS = ".generations"
"""Folder in the run's folder: the claims of its generations, of which the newest is in force."""
GENERATION = "ARGOSY_GENERATION"
"""Environment variable: the generation that a process belongs to."""
GONE = ".gone"
"""Ends the names of folders that have lost theirs; they are deleted later."""
OLD_NAME = "epoch"
"""Name of a generation in the folders of older runs, which go on."""
OLD_FILES = (".generation", f".{OLD_NAME}")
"""Files in the folders of older runs: the number of the newest generation."""
_PARTIAL = re.compile(rf"step-([0-9]{{8,15}})\.(?:generation|{OLD_NAME})-([0-9]{{4,15}})" + re.escape(PARTIAL))


class Fenced(ArgosyError):
    """The run has gone on without this process: a later generation has begun, and this one must not write."""


def own_generation() -> int:
    """Return the generation that this process belongs to; 0 where generations are not counted."""
    return int(os.environ.get(GENERATION, "0"))


def newest_generation(run_dir: Path) -> int:
    """Return the newest generation of a run, which may be over; 0 if none has begun."""
    return max(_claims(run_dir).newest(), *(_number_in(run_dir / name) for name in OLD_FILES))


def begin_generation(run_dir: Path, generation: int, owner: str = "") -> None:
    """Let only processes of `generation` commit checkpoints from now on; folders of older ones lose their names.

    owner: who begins it, for a caller that may do so again after an error; empty: nobody else, and only once.
    Raises: Fenced if another has begun it, or a later one.
    """
    for name in OLD_FILES:
        if (path := run_dir / name).exists():  # a process of an older version that was cut off looks at it
            if _number_in(path) > generation:
                raise Fenced(f"{path}: generation {_number_in(path)} has begun, so {generation} cannot")
            with atomic_write(path) as file:
                file.write(f"{generation}\n".encode())
    claims = _claims(run_dir)
    try:
        claims.take(generation, owner or uuid.uuid4().hex)
    except Taken:
        raise Fenced(f"generation {claims.newest()} of {run_dir} has begun, so {generation} cannot") from None
    for folder, _, theirs in partial_folders(run_dir):
        if theirs < generation:
            with suppress(OSError):  # it has just been committed, or deleted
                take_name(folder)


def check_generation(run_dir: Path, generation: int) -> None:
    """Raises: Fenced if a generation after `generation` has begun in `run_dir`, or if that cannot be told."""
    claims = _claims(run_dir)
    try:
        if generation and claims.owner(generation):
            return  # its claim is open: no other has begun
        newest = newest_generation(run_dir)
        if generation and claims.is_taken(generation):
            newest = max(newest, generation + 1)  # it is closed, whatever an old listing of names says
    except (OSError, ValueError) as error:
        raise Fenced(f"{run_dir}: its newest generation cannot be read ({error}), so nothing is written") from None
    if newest > generation:
        raise Fenced(
            f"generation {newest} of {run_dir} has begun, and this process is of generation {generation}: it writes "
            "nothing"
        )


def is_in_force(run_dir: Path, generation: int) -> bool:
    """True if `check_generation` raises nothing."""
    try:
        check_generation(run_dir, generation)
    except Fenced:
        return False
    return True


def partial_folder(run_dir: Path, step: int, generation: int) -> Path:
    """Return the folder in which the processes of `generation` write the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step-{step:08d}.generation-{generation:04d}{PARTIAL}"


def partial_folders(run_dir: Path) -> list[tuple[Path, int, int]]:
    """Return the folders of unfinished checkpoints, each with its step and generation."""
    folders = (run_dir / "checkpoints").glob(f"step-*{PARTIAL}")
    return [(folder, int(m[1]), int(m[2])) for folder in folders if (m := _PARTIAL.fullmatch(folder.name))]


def take_name(folder: Path) -> Path:
    """Rename a folder at once, whatever is in it, such that nothing finds it any more. Returns where it is then."""
    gone = folder.with_name(folder.name + GONE)
    shutil.rmtree(gone, ignore_errors=True)
    return folder.rename(gone)


def _claims(run_dir: Path) -> Claims:
    return Claims(run_dir / CLAIMS)


def _number_in(path: Path) -> int:
    """Return the number that a file holds; 0 if there is no such file. Raises: OSError; ValueError."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
