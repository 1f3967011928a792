"""A child process that a run needs beside its workers: started, looked after, ended with it, and never waited for."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from argosy.processes.channel import Gone
from argosy.processes.child import Child
from argosy.processes.patience import STOPPED_S, Patience

KEEP_S = 0.5
"""How often a thread looks after it, in a process that has no agent."""
SPARE_S = 5.0
"""Time that it is waited for, beside the time of what it does at its end."""


class KeptProcess(ABC):
    """Starts a child process, and starts it again when it has died. Does nothing for a run that needs none."""

    def __init__(self, is_needed: bool, finish_s: float):
        """finish_s: how long it may take to end."""
        self._is_needed, self._finish_s = is_needed, finish_s
        self._child: Child | None = None
        self._patience: Patience | None = None
        self.is_wanted = False
        """True if this process is to have it: the one of the machine on which rank 0 is."""

    def keep(self) -> None:
        """Start it, or start it again, or end it if another machine is to have it. Call this often: it never waits."""
        if not self._is_needed or not self.is_wanted:
            self._end()
        elif self._child is not None and self._child.is_alive:
            if self._patience is not None and (why := self._patience.end()):
                self._end()
                self.lost(why)
        elif self._child is not None:
            child, self._child = self._child, None
            self.lost(child.reap())
        else:
            self._child = self.start()
            self._patience = None if self._child is None else Patience(self._child.pid, stopped_s=STOPPED_S)

    def finish(self) -> None:
        """Let it do what is left, for `finish_s` and a little more at most, and end."""
        if self._child is None:
            return
        end_s = time.monotonic() + self._finish_s + SPARE_S
        with suppress(Gone):
            self._child.channel.send("finish")
        while self._child.is_alive and time.monotonic() < end_s:
            time.sleep(0.02)
        self._end()

    @abstractmethod
    def start(self) -> Child | None:
        """Start it; return None if it may not be started now, or cannot be."""

    @abstractmethod
    def lost(self, why: str) -> None:
        """Say that it has died."""

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


@contextmanager
def kept_in_thread(process: KeptProcess, name: str) -> Iterator[None]:
    """Keep `process` in a thread of this name while the block runs, and let it finish after it."""
    is_over = threading.Event()
    process.is_wanted = True

    def keep() -> None:
        process.keep()
        while not is_over.wait(KEEP_S):
            process.keep()

    thread = threading.Thread(target=keep, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        process.finish()
