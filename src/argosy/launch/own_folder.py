"""A folder of a run's own: nobody else's files are mixed with a run's, and a refused run leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path

from argosy.checkpoint.fence import CLAIMS, OLD_FILES
from argosy.checkpoint.owner import NAME_FILE
from argosy.checkpoint.store import committed
from argosy.data.manifest import TOKENIZER
from argosy.data.tokenizer import USAGE
from argosy.errors import UserError
from argosy.files import LOCK, MadeFolder, made_folder
from argosy.launch.engines.job import FOLDER as LAUNCH
from argosy.processes.secret import NAME as SECRET
from argosy.processes.tls import FOLDER as TLS
from argosy.supervise.lease.lease import FOLDER as COORDINATORS
from argosy.supervise.nodes import HANDOVER_FILE as MEMBERSHIP
from argosy.sync.server.ledger import NAME as LEDGER

OF_A_START = (f"{LOCK}*", ".settling", SECRET, NAME_FILE, f"{CLAIMS}*", *(f"{name}*" for name in OLD_FILES),
              COORDINATORS, f"{TLS}*", ".storage-*", f"{TOKENIZER}*", "run.toml*", "plan.toml*", MEMBERSHIP, "logs",
              "events", "checkpoints", "metrics.jsonl", "extend", LAUNCH, "sites", LEDGER, "asked.toml",
              *(f"{name}*" for name in USAGE))  # fmt: skip
"""Names of what a run that was interrupted while it started may have left."""
MOST_NAMED = 3
"""Most files that are not a run's that a message names."""


@contextmanager
def own_folder(run_dir: Path, nodes: int = 1) -> Iterator[MadeFolder]:
    """Make the folder of a run, if there is none. After a UserError in the block, remove what a new run has left there.

    nodes: with several machines, nothing is removed: others may be in the folder.
    Raises: UserError if the path is that of a file, holds files that are not a run's, or cannot be made.
    """
    check_is_own(run_dir)
    with ExitStack() as made:
        try:
            folder = made.enter_context(made_folder(run_dir))
        except OSError as problem:
            raise _cannot_be_made(run_dir, problem) from None
        try:
            yield folder
        finally:
            folder.is_kept = folder.is_kept or nodes > 1 or _is_begun(run_dir)


def check_is_own(run_dir: Path) -> None:
    """Raise UserError if `run_dir` is there, and is neither empty nor the folder of a run."""
    try:
        names = {path.name for path in run_dir.iterdir()}
    except FileNotFoundError:
        return
    except OSError as problem:
        raise _cannot_be_made(run_dir, problem) from None
    if {"run.toml", "plan.toml"} <= names or committed(run_dir):
        return
    has_lock = any(fnmatch(name, f"{LOCK}*") for name in names)  # a run.toml alone may be the user's
    others = sorted(
        name
        for name in names
        if not any(fnmatch(name, own) for own in OF_A_START) or (name == "run.toml" and not has_lock)
    )
    if others:
        named = ", ".join(others[:MOST_NAMED]) + (", ..." if len(others) > MOST_NAMED else "")
        raise UserError(
            f"{run_dir} is not the folder of a run: it holds {named}. Give --run-dir a folder that is new or empty, or "
            "that of a run to go on with."
        )


def _cannot_be_made(run_dir: Path, problem: OSError) -> UserError:
    at = next((folder for folder in (run_dir, *run_dir.parents) if folder.exists()), run_dir)
    if not at.is_dir():
        return UserError(f"{run_dir}: {at} is a file, and a run needs a folder. Choose another with --run-dir.")
    return UserError(
        f"{run_dir}: the folder cannot be used ({problem.strerror}). Get the right to write in {at}, or choose another "
        "with --run-dir."
    )


def _is_begun(run_dir: Path) -> bool:
    """Return True if steps were done or saved there."""
    metrics = run_dir / "metrics.jsonl"
    return bool(committed(run_dir)) or (metrics.exists() and metrics.stat().st_size > 0)
