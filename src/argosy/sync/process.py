"""The exchange's process, as the process that starts it has it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.plan.plan import is_asynchronous
from argosy.processes.child import Child
from argosy.processes.kept import KeptProcess

EXCHANGE = "argosy.sync.main"
START_AGAIN_S = 2.0
"""An exchange that died is started again, at most once in so long."""


class ExchangeProcess(KeptProcess):
    """Starts the exchange of a site, and starts it again when it has died. Does nothing for a run without sites.

    At the end the other sites take what they need of the run, for sync.patience_s at most.
    """

    def __init__(self, folder: Path, run: RunConfig, events: Events):
        """`events`: those of the process that starts it."""
        super().__init__(bool(run.sites) and not is_asynchronous(run.plan), run.sync.patience_s)
        self._folder, self._events = folder, events
        self._next_start_s = 0.0

    def start(self) -> Child | None:
        if time.monotonic() >= self._next_start_s:
            self._next_start_s = time.monotonic() + START_AGAIN_S
            with suppress(OSError):  # no more processes: the next time
                return Child(EXCHANGE, str(self._folder))
        return None

    def lost(self, why: str) -> None:
        self._events.write("exchange_died", why=why)
        print_message(f"argosy: the process that speaks to the other sites died: {why}; it is started again")
