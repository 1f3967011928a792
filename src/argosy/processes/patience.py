"""Waiting for a process of this machine: one that was stopped, or takes too long, holds up nobody."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

STOPPED = ("T", "t")
"""States of a process that does nothing until it gets SIGCONT, or its debugger goes on."""
STOPPED_S = 10.0
"""Time that a process may be stopped while it is waited for."""
LONGEST_LOOK_S = 1.0
"""Looks that are further apart count as this far: the process that waits was stopped, or busy."""


def process_state(pid: int) -> str:
    """Return the state letter of a process of this machine, as in /proc/PID/stat; empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]  # the name before it may have brackets and spaces


class Patience:
    """Counts the time for which one process is waited for. Only time in which this process itself ran counts."""

    def __init__(self, pid: int, limit_s: float = math.inf, stopped_s: float = STOPPED_S):
        """limit_s: how long it is waited for. stopped_s: how long, if it is stopped all that time."""
        self.pid, self._limit_s, self._stopped_limit_s = pid, limit_s, stopped_s
        self._waited_s = self._stopped_s = 0.0
        self._looked_s = time.monotonic()

    def answered(self) -> None:
        """Begin to wait anew: it has said something."""
        self._waited_s = 0.0

    def end(self) -> str:
        """Return why it is not to be waited for any longer; empty: it is. Call this every second or more often."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, LONGEST_LOOK_S), now_s
        self._waited_s += passed_s
        self._stopped_s = self._stopped_s + passed_s if process_state(self.pid) in STOPPED else 0.0
        if self._stopped_s > self._stopped_limit_s:
            return f"it was stopped for {self._stopped_s:.0f} s"
        if self._waited_s > self._limit_s:
            return f"it did not answer for {self._waited_s:.0f} s"
        return ""


def wait_until(condition: Callable[[], object], limit_s: float = math.inf, every_s: float = 0.02) -> bool:
    """Wait until `condition` holds; return False if it does not within `limit_s` in which this process itself ran."""
    waited_s, looked_s = 0.0, time.monotonic()
    while not condition():
        now_s = time.monotonic()
        waited_s, looked_s = waited_s + min(now_s - looked_s, LONGEST_LOOK_S), now_s
        if waited_s > limit_s:
            return False
        time.sleep(every_s)
    return True
