"""A name for a run's folder that is the same under every path: it tells nodes of different runs apart."""

from __future__ import annotations

import fcntl
import uuid
from pathlib import Path


def name_of(run_dir: Path) -> str:
    """Return a name that no other folder has; it is made up at the first call and kept in the folder."""
    with (run_dir / ".name").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        name = file.read()
        if not name:
            name = uuid.uuid4().hex
            file.write(name)
        return name
