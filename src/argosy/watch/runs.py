"""The runs under a folder, and of each what a list of runs shows, read from the ends of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from argosy.errors import UserError
from argosy.watch.run_files import is_run

MOST_RUNS = 5000
DEEPEST = 4
"""A run is looked for in so many levels of folders."""
MOST_FOLDERS = 50_000
"""Most folders that are looked into."""


def find_runs(root: Path) -> dict[str, Path]:
    """Return the runs in and under `root`: path relative to it -> folder, in alphabetical order.

    A link is not followed, so nothing outside of `root` is found. A run within a run's folder is none of its own.
    """
    if is_run(root):
        return {own_id(root): root}
    found = dict(_runs_under(root))
    return dict(sorted(found.items()))


def own_id(run: Path) -> str:
    """Return the id of a run that was named itself, and is no run under a folder: its folder's name."""
    return run.resolve().name.lstrip(".") or "run"


def run_folder(root: Path, run_id: str) -> Path:
    """Return the folder of the run with this id. Raises: UserError if `root` has no such run, or it lies outside."""
    unknown = UserError(f"no run {run_id!r} in {root}")
    if "\0" in run_id or run_id.startswith(("/", "\\")):
        raise unknown
    parts = run_id.split("/")
    if is_run(root) and run_id == own_id(root):
        return root.resolve()
    if any(not part or part.startswith(".") for part in parts):
        raise unknown
    try:
        home = root.resolve(strict=True)
        folder = (home / run_id).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # a circle of links, a name that is too long
        raise unknown from None
    if not folder.is_relative_to(home) or not is_run(folder):
        raise unknown
    return folder


def _runs_under(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield runs, level by level, so that in a huge tree the nearest ones are found."""
    level, seen, count = [root], 0, 0
    for _ in range(DEEPEST):
        below: list[Path] = []
        for folder in level:
            for child in _folders_in(folder):
                seen += 1
                if seen > MOST_FOLDERS or count >= MOST_RUNS:
                    return
                if is_run(child):
                    count += 1
                    yield child.relative_to(root).as_posix(), child
                else:
                    below.append(child)
        level = below


def _folders_in(folder: Path) -> list[Path]:
    found: list[Path] = []
    with suppress(OSError), os.scandir(folder) as entries:  # one that may not be read is passed over
        found = [Path(e.path) for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    return sorted(found)
