"""The owner of a folder, here and in another place: a name that the run's folder keeps under every path.

It tells nodes of different runs apart, and runs of one name that copy their checkpoints to one place.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from argosy.checkpoint.checksums import RECORD_BYTES, checked, signed
from argosy.errors import UserError
from argosy.files import kept_text

NAME_FILE = ".name"
"""File in the run's folder."""
OWNER = "owner.json"
"""File beside the copies of a run's checkpoints."""
LONGEST = 64
"""Letters of a name."""
WRITE_S = 2.0
"""Longest wait for a file that is empty: another process has just created it."""


def name_of(run_dir: Path) -> str:
    """Return a name that no other folder has; it is made up at the first call and kept in the folder.

    Raises: UserError if what the folder has is no name.
    """
    name = kept_text(run_dir / NAME_FILE, lambda: uuid.uuid4().hex, most_chars=LONGEST + 2).strip()
    if len(name) > LONGEST or not name.isprintable():
        raise UserError(f"{run_dir / NAME_FILE}: must hold at most {LONGEST} letters. Delete it to have it made anew.")
    return name


def claim(fs: Any, folder: str, run_dir: Path) -> None:
    """Make `folder` of the fsspec file system `fs` that of the run in `run_dir`, unless it is that of another run.

    Of two runs that claim it at the same moment one is refused if the file system can create a file exclusively (mode
    "xb" of fsspec's `open`: disks, and stores with conditional writes). Elsewhere the one that writes last has it, and
    the other is refused when it asks again, which it does before each copy.

    Raises: UserError if it is that of another run, or its owner.json is something else.
    """
    path, name = f"{folder}/{OWNER}", name_of(run_dir)
    owner = _owner(fs, path)
    if owner is None:
        fs.makedirs(folder, exist_ok=True)
        data = signed({"run": name})
        try:
            with fs.open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            if _owner(fs, path) is None:  # who began to write it has died
                fs.pipe_file(path, data)
        except (NotImplementedError, TypeError, ValueError):  # that file system does not know the mode
            fs.pipe_file(path, data)
        owner = _owner(fs, path)
    if owner != name:
        raise UserError(
            f"{path}: the checkpoints there are of another run of this name (its folder's {NAME_FILE} holds {owner}, "
            f"that of {run_dir} holds {name}). Give this run another name with --name, or another checkpoint.remote. "
            f"To go on with that run in this folder, which must have no checkpoints of its own, write {owner} to "
            f"{run_dir / NAME_FILE} first."
        )


def _owner(fs: Any, path: str) -> str | None:
    """Return the name in the owner's file; None if there is no such file, or it stays empty."""
    until_s = time.monotonic() + WRITE_S
    while True:
        fs.invalidate_cache()
        try:
            data = fs.cat_file(path, start=0, end=RECORD_BYTES + 1)
        except FileNotFoundError:
            return None
        if data:
            break
        if time.monotonic() > until_s:
            return None
        time.sleep(0.05)
    name = checked(data, path).get("run")
    if not isinstance(name, str) or not name or len(name) > LONGEST or not name.isprintable():
        raise UserError(f"{path}: names no run. Move it away if the checkpoints beside it are of this run.")
    return name
