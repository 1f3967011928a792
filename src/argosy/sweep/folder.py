"""The folder of a sweep: its lock, and whether the sweep file is the one that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from argosy.compare.results import SWEEP_FILE
from argosy.config.dump import dump, save_run
from argosy.config.schema import RunConfig
from argosy.config.section import dotted, flatten
from argosy.errors import UserError
from argosy.files import atomic_write, lock_or_holder, made_folder
from argosy.sweep.load import Sweep, load_sweep
from argosy.sweep.study import JOURNAL

LOCK, BASE = ".lock", "base.toml"
OWN = (LOCK, SWEEP_FILE, BASE, JOURNAL)
MAY_CHANGE = ("parallel", "run")
MOST_NAMED = 3


def trial_folder(folder: Path, number: int) -> Path:
    """Return the run folder of a trial."""
    return folder / f"{number:04d}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the sweep's folder, which is made, for this process; the kernel releases the lock when the process dies.

    Raises: UserError if another process holds it, or the folder is not a sweep's.
    """
    check_is_own(folder)
    try:
        with made_folder(folder) as made, (folder / LOCK).open("a+") as file:
            if (holder := lock_or_holder(file)) is not None:
                made.is_kept = True
                raise UserError(
                    f"{folder} is in use by process {holder}: the sweep runs already. Wait for it, follow it with "
                    "--show, or give this sweep another folder with --sweep-dir."
                )
            yield
    except OSError as problem:
        raise UserError(
            f"{folder}: cannot be written ({problem.strerror}). Choose another folder with --sweep-dir."
        ) from None


def check_is_own(folder: Path) -> None:
    """Raise UserError if `folder` is there, and is neither empty nor the folder of a sweep."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and a sweep needs a folder. Choose another with --sweep-dir.")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(names - set(OWN))
    if others and SWEEP_FILE not in names:
        named = ", ".join(others[:MOST_NAMED]) + (", ..." if len(others) > MOST_NAMED else "")
        raise UserError(
            f"{folder} is not the folder of a sweep: it holds {named}. Give --sweep-dir a folder that is new or empty, "
            "or that of a sweep to go on with."
        )


def enter(folder: Path, sweep: Sweep) -> None:
    """Write the sweep to its folder, or check that it is the one that is there.

    Only [parallel] may change, and the number of trials grow where trials do not compete at rungs.
    Raises: UserError, which names what differs.
    """
    if (folder / SWEEP_FILE).exists():
        check_is_same(folder, sweep)
    save_run(sweep.base, folder / BASE)
    config = sweep.config.model_copy(update={"run": BASE})
    with atomic_write(folder / SWEEP_FILE) as file:
        file.write(dump(config).encode())


def check_is_same(folder: Path, sweep: Sweep) -> None:
    """Raise UserError if the folder holds another sweep than this one."""
    before = load_sweep(folder / SWEEP_FILE)
    old, new = _values(before), _values(sweep)
    changed = [key for key in old | new if old.get(key) != new.get(key)]
    if sweep.config.method in ("random", "tpe", "grid") and before.trials <= sweep.trials and "trials" in changed:
        changed.remove("trials")
    if changed:
        lines = [f"  {key}: {_shown(old.get(key))} in the folder, {_shown(new.get(key))} now" for key in changed]
        raise UserError(
            f"{folder} holds another sweep:\n" + "\n".join(lines) + "\n  Give this one a folder of its own: "
            "another name in the file, or --sweep-dir."
        )


def _values(sweep: Sweep) -> dict[str, Any]:
    """Return dotted key -> value of all that must not change between two starts."""
    config = sweep.config.model_dump(mode="json")
    values = {key: value for key, value in config.items() if key not in (*MAY_CHANGE, "parameters")}
    values |= {f"parameters.{key}": range_ for key, range_ in config["parameters"].items()}
    run = flatten(sweep.base.model_dump(mode="json"), RunConfig)
    return values | {f"run: {dotted(key)}": value for key, value in run.items()}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str({key: inner for key, inner in value.items() if inner not in (None, False)})
    return str(value)
