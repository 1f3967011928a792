"""Waiting until something is so: a test goes on with progress, and the limit only ends one that would hang."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from argosy.processes import child

PATIENT_S = 300.0
"""What is waited for comes much sooner, but on a machine that has other things to do."""
LONGEST_PAUSE_S = 1.0
"""Between two looks that take long."""

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    seconds: float = PATIENT_S,
    *,
    process: subprocess.Popen[Any] | None = None,
    story: Callable[[], object] = lambda: "",
) -> T:
    """Return what `condition` returns once that is true.

    process: one that must not end meanwhile. story: returns what a failure shows.
    """
    found: list[T] = []

    def holds() -> T:
        has_ended, began = process is not None and process.poll() is not None, time.monotonic()
        found[:] = [condition()]
        assert found[0] or not has_ended, ("the process ended", story())
        if not found[0]:  # looking takes a quarter of the time at most: what is waited for needs the machine
            time.sleep(min(3 * (time.monotonic() - began), LONGEST_PAUSE_S))
        return found[0]

    assert child.wait_until(holds, seconds, every_s=0.01), ("waited too long", story())
    return found[0]


def is_alive(pid: int) -> bool:
    """True while there is such a process that has not ended, whether somebody has asked how or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
