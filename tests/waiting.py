"""Waiting until something is so: a test goes on with progress, and the limit only ends one that would hang."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any, TypeVar

from argosy.processes import child

PATIENT_S = 300.0
"""What is waited for comes much sooner, but on a machine that has other things to do."""

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
        found[:] = [condition()]
        assert found[0] or process is None or process.poll() is None, ("the process ended", story())
        return found[0]

    assert child.wait_until(holds, seconds, every_s=0.01), ("waited too long", story())
    return found[0]
