"""What is made once for all the processes that the tests are spread over."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(temporary: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name`, which the first process to need it has had filled by `make`. Tests only read it."""
    of_all = temporary.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_all = of_all.parent  # above what each process has for itself
    folder = of_all / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_made = folder.with_suffix(".made")
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that has failed
            folder.mkdir()
            make(folder)
            is_made.touch()
    return folder
