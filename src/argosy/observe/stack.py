"""Python stacks of a process, which it writes down when another process asks, even while it hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress

ASKED = signal.SIGUSR2
WRITING_S = 0.05
"""A process that is not stopped has written its stacks within this time."""


def write_when_asked(descriptor: int) -> None:
    """Prepare this process to write the stacks of all its threads to the file with this descriptor when asked."""
    faulthandler.register(ASKED, os.dup(descriptor), all_threads=True)


def ask(pid: int) -> None:
    """Ask a process that has called `write_when_asked`, and wait until it had the time. It would kill any other."""
    with suppress(ProcessLookupError):
        os.kill(pid, ASKED)
        time.sleep(WRITING_S)


def ask_and_go_on(pid: int) -> None:
    """Ask as `ask` does, and do not wait."""
    with suppress(ProcessLookupError):
        os.kill(pid, ASKED)
