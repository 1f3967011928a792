"""The exchange's process, for the process of the site that starts it."""

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

EXCHANGE = "argosy.sync.sites.main"
AGAIN_S = 2.0
"""An exchange that died is started again, at most once in so long."""
KEEP_S = 0.5
"""How often a thread looks after it, in a process that has no agent."""
SPARE_S = 5.0


class ExchangeProcess:
    """Starts the exchange of a site, and starts it again when it has died. Does nothing for a run without sites."""

    def __init__(self, folder: Path, run: RunConfig, events: Events):
        """`events`: those of the process that starts it."""
        self._folder, self._events = folder, events
        self._is_needed, self._patience_s = bool(run.sites), run.sync.patience_s
        self._child: Child | None = None
        self._next_start_s = 0.0
        self.is_wanted = False
        """True if this process is to have it: the one of the machine on which rank 0 is."""

    def keep(self) -> None:
        """Start it, or start it again, or end it if another machine is to have it. Call this often: it never waits."""
        if not self._is_needed or not self.is_wanted:
            self._end()
        elif self._child is not None and self._child.is_alive:
            return
        elif self._child is not None:
            child, self._child = self._child, None
            why = child.reap()
            self._events.write("exchange_died", why=why)
            print_message(f"argosy: the process that speaks to the other sites died: {why}; it is started again")
        elif time.monotonic() >= self._next_start_s:
            self._next_start_s = time.monotonic() + AGAIN_S
            with suppress(OSError):  # no more processes: the next time
                self._child = Child(EXCHANGE, str(self._folder))

    def finish(self) -> None:
        """Let the other sites take what they need of a run that is done, for sync.patience_s at most, and end."""
        if self._child is None:
            return
        end_s = time.monotonic() + self._patience_s + SPARE_S
        with suppress(Gone):
            self._child.channel.send("finish")
        while self._child.is_alive and time.monotonic() < end_s:
            time.sleep(0.02)
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


@contextmanager
def exchanging(folder: Path, run: RunConfig, events: Events) -> Iterator[None]:
    """Hold the exchange of a site, in a thread, while the block trains."""
    exchange, is_over = ExchangeProcess(folder, run, events), threading.Event()
    exchange.is_wanted = True

    def keep() -> None:
        exchange.keep()
        while not is_over.wait(KEEP_S):
            exchange.keep()

    thread = threading.Thread(target=keep, name="argosy-exchange", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        exchange.finish()
