"""The folder in memory that an agent keeps for its workers: heartbeats and in-memory checkpoints.

What is in it need not outlive the node, and must be fast. Memory is not given back when an agent is killed: the next
one removes what it left. A folder is in use as long as its agent holds the lock of a file in it, which the kernel
releases with the process. A look for the process would not tell: containers that share the memory may each have
processes of their own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SCRATCH = Path("/dev/shm")
"""Where the folders argosy-PID-... are; PID is the agent's process."""
MEMORY = "memory"
"""The folder in it for in-memory checkpoints."""
LOCK = "lock"
"""The file in it that its agent holds locked."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make this process's folder, and remove it at the end. Folders of agents that were killed are removed first."""
    _sweep()
    fresh = Path(tempfile.mkdtemp(prefix=f".argosy-{os.getpid()}-", dir=SCRATCH))
    folder = fresh.with_name(fresh.name.removeprefix("."))
    with (fresh / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh.rename(folder)  # only now: nobody finds a folder that has no lock yet
        try:
            (folder / MEMORY).mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove the folders whose lock nobody holds. One without a lock is left alone: an older version made it."""
    for folder in SCRATCH.glob("argosy-*-*"):
        with suppress(OSError), (folder / LOCK).open("rb") as lock:  # it is held, another user's, or being removed
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
