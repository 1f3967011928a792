"""Which folder a run is in, whatever path a machine has it at: so do nodes of different runs know each other apart."""

from __future__ import annotations

import fcntl
import uuid
from pathlib import Path


def name_of(run_dir: Path) -> str:
    """A name that no other folder has; it is given one the first time that somebody asks."""
    with (run_dir / ".name").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        name = file.read()
        if not name:
            name = uuid.uuid4().hex
            file.write(name)
        return name
