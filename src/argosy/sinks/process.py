"""The follower's process, for the process of the run that starts it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.processes.channel import Gone
from argosy.processes.child import Child
from argosy.sinks.table import parts_of

FOLLOWER = "argosy.sinks.follower"
MOST_STARTS = 5
"""A follower that died is started again, so many times in a run."""
KEEP_S = 0.5
"""How often a thread looks after it, in a process that has no agent."""
SPARE_S = 5.0
"""So much longer than its sinks the follower itself is waited for."""


class FollowerProcess:
    """Starts the follower of a run, if the run has sinks, and starts it again when it has died."""

    def __init__(self, folder: Path, run: RunConfig, events: Events):
        """`events`: those of the process that starts it."""
        self._folder, self._events = folder, events
        self._is_needed, self._flush_s = bool(parts_of(run)), run.observe.sink.flush_s
        self._child: Child | None = None
        self._starts = 0
        self.is_wanted = False
        """True if the sinks of the run are to be held by this process."""

    def keep(self) -> None:
        """Start it, or start it again, or end it if another machine is to have it. Call this often: it never waits."""
        if not self._is_needed or not self.is_wanted:
            self._end()
        elif self._child is not None and self._child.is_alive:
            return
        elif self._child is not None:
            self._lost(self._child)
        elif self._starts < MOST_STARTS:
            self._start()

    def finish(self) -> None:
        """Let the sinks write the rest, for observe.sink.flush_s at most, and end."""
        if self._child is None:
            return
        end_s = time.monotonic() + self._flush_s + SPARE_S
        with suppress(Gone):
            self._child.channel.send("finish")
        while self._child.is_alive and time.monotonic() < end_s:
            time.sleep(0.02)
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _start(self) -> None:
        self._starts += 1
        try:
            self._child = Child(FOLLOWER, str(self._folder))
        except OSError as problem:
            self._say(f"it cannot be started: {problem}")

    def _lost(self, child: Child) -> None:
        self._child = None
        self._say(child.reap())

    def _say(self, why: str) -> None:
        is_last = self._starts >= MOST_STARTS
        self._events.write("follower_died", why=why, again=not is_last)
        then = "the run has no sinks any more" if is_last else "it is started again"
        print_message(f"argosy: the process that holds the run's sinks died: {why}; {then}, and training goes on")


@contextmanager
def following(folder: Path, run: RunConfig, events: Events) -> Iterator[None]:
    """Hold the follower of a run, in a thread, while the block trains."""
    follower, is_over = FollowerProcess(folder, run, events), threading.Event()
    follower.is_wanted = True

    def keep() -> None:
        follower.keep()
        while not is_over.wait(KEEP_S):
            follower.keep()

    thread = threading.Thread(target=keep, name="argosy-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        follower.finish()
