"""The fence: only processes of the newest generation of a run commit checkpoints, and an older one's find that out.

Each generation writes in folders of its own name. When the next one begins, these lose their names: so a process that
has just asked `check_generation`, and stood still since, has nothing to commit when it wakes.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from argosy.errors import ArgosyError
from argosy.files import PARTIAL, atomic_write

GENERATION_FILE = ".generation"
"""File in the run's folder: the number of the newest generation."""
GENERATION = "ARGOSY_GENERATION"
"""Environment variable: the generation that a process belongs to."""
GONE = ".gone"
"""Ends the names of folders that have lost theirs; they are deleted later."""
OLD_NAME = "epoch"
"""What a generation was called in the folders of older runs, which go on."""
OLD_FILE = f".{OLD_NAME}"
_PARTIAL = re.compile(rf"step-([0-9]{{8,15}})\.(?:generation|{OLD_NAME})-([0-9]{{4,15}})" + re.escape(PARTIAL))


class Fenced(ArgosyError):
    """The run has gone on without this process: a later generation has begun, and this one must not write."""


def own_generation() -> int:
    """Return the generation that this process belongs to; 0 where generations are not counted."""
    return int(os.environ.get(GENERATION, "0"))


def newest_generation(run_dir: Path) -> int:
    """Return the newest generation of a run, which may be over; 0 if none has begun."""
    for name in (GENERATION_FILE, OLD_FILE):
        with suppress(FileNotFoundError):
            return int((run_dir / name).read_text())
    return 0


def begin_generation(run_dir: Path, generation: int) -> None:
    """Let only processes of `generation` commit checkpoints from now on; folders of older ones lose their names."""
    paths = [run_dir / GENERATION_FILE]
    if (run_dir / OLD_FILE).exists():  # a process of an older version that was cut off looks at this one
        paths.append(run_dir / OLD_FILE)
    for path in paths:
        with atomic_write(path) as file:
            file.write(f"{generation}\n".encode())
    for folder, _, theirs in partial_folders(run_dir):
        if theirs < generation:
            with suppress(OSError):  # it has just been committed, or deleted
                take_name(folder)


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
