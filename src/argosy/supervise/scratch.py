"""The folder in memory that an agent keeps for its workers: heartbeats and in-memory checkpoints.

What is in it need not outlive the node, and must be fast.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRATCH = Path("/dev/shm")
"""Where the folders argosy-PID-... are; PID is the agent's process."""
MEMORY = "memory"
"""The folder in it for in-memory checkpoints."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make this process's folder, and remove it at the end. Folders of agents that were killed are removed first."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"argosy-{os.getpid()}-", dir=SCRATCH))
    (folder / MEMORY).mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    for folder in SCRATCH.glob("argosy-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
