"""The follower's process, for the process of the run that starts it."""

from __future__ import annotations

from pathlib import Path

from argosy.config.schema import RunConfig
from argosy.observe.events import Events
from argosy.observe.terminal import print_message
from argosy.processes.child import Child
from argosy.processes.kept import KeptProcess
from argosy.sinks.table import parts_of

FOLLOWER = "argosy.sinks.follower"
MOST_STARTS = 5
"""A follower that died is started again, so many times in a run."""


class FollowerProcess(KeptProcess):
    """Starts the follower of a run, if the run has sinks, and starts it again when it has died."""

    def __init__(self, folder: Path, run: RunConfig, events: Events):
        """`events`: those of the process that starts it."""
        super().__init__(bool(parts_of(run)), run.observe.sink.flush_s)
        self._folder, self._events = folder, events
        self._starts = 0

    def start(self) -> Child | None:
        """Start it, a few times in a run."""
        if self._starts >= MOST_STARTS:
            return None
        self._starts += 1
        try:
            return Child(FOLLOWER, str(self._folder))
        except OSError as problem:
            self.lost(f"it cannot be started: {problem}")
            return None

    def lost(self, why: str) -> None:
        """Say so, and whether it is started again."""
        is_last = self._starts >= MOST_STARTS
        self._events.write("follower_died", why=why, again=not is_last)
        then = "the run has no sinks any more" if is_last else "it is started again"
        print_message(f"argosy: the process that holds the run's sinks died: {why}; {then}, and training goes on")
