"""Where a process is: its Python stacks, which it writes down when another process asks, whatever it hangs in."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress

ASKED = signal.SIGUSR2
WRITING_S = 0.05
"""A process that is not stopped has written by then."""


def write_when_asked(descriptor: int) -> None:
    """Have the stacks of all threads of this process written to a file of its own descriptor."""
    faulthandler.register(ASKED, os.dup(descriptor), all_threads=True)


def ask(pid: int) -> None:
    """Have a process that has called `write_when_asked` do so; returns when it had the time. Others it would kill."""
    with suppress(ProcessLookupError):
        os.kill(pid, ASKED)
        time.sleep(WRITING_S)
