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

from argosy.files import open_regular

SCRATCH = Path("/dev/shm")
"""Parent of the folders argosy-PID-...; PID is the agent's process."""
MEMORY_FOLDER = "memory"
"""The folder in it for in-memory checkpoints."""
SCRATCH_LOCK = "lock"
"""The file in it that its agent holds locked."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make this process's folder, and remove it at the end. Folders of agents that were killed are removed first."""
    _sweep()
    fresh = Path(tempfile.mkdtemp(prefix=f".argosy-{os.getpid()}-", dir=SCRATCH))
    folder = fresh.with_name(fresh.name.removeprefix("."))
    with (fresh / SCRATCH_LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh.rename(folder)  # only now: nobody finds a folder that has no lock yet
        try:
            (folder / MEMORY_FOLDER).mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove this user's folders whose lock nobody holds. One without a lock is left alone: an older version made it.

    All users of the machine may make folders and pipes of these names here: what is not this user's is not touched.
    """
    for path in SCRATCH.glob("argosy-*-*"):
        with suppress(OSError), _own_folder(path) as folder, open_regular(SCRATCH_LOCK, folder, follow=False) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """Open a folder of this user's. Raises: OSError if it is a link or another user's."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise PermissionError(f"{path}: another user's")
        yield folder
    finally:
        os.close(folder)
