"""A worker process, as its agent knows it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argosy.errors import FINAL
from argosy.observe.heartbeat import HeartbeatReading, heartbeat_path, read_heartbeat
from argosy.processes.channel import Channel, Message
from argosy.processes.child import end_in_words
from argosy.supervise.nodes import Cause, RankState


@dataclass
class WorkerProcess:
    """A process that the agent's fork server forked."""

    slot: int
    channel: Channel
    pid: int = 0
    """0 until it is forked."""
    state: RankState = RankState.STARTING
    rank: int | None = None
    generation: int = 0
    failure: Message | None = None
    """Its message about the error that it ended with."""
    killed: str = ""
    """Why its agent killed it; empty if it did not."""
    leave_by: float | None = None
    """The time by which it must have left the broken world."""
    is_ending: bool = False
    """True once it has closed its end of the channel."""
    is_finished: bool = False
    """With state DONE: True if the run's last step was made."""

    def reading(self, scratch: Path) -> HeartbeatReading | None:
        """Return what it shows in its agent's folder `scratch`; None if it shows nothing (yet)."""
        return read_heartbeat(heartbeat_path(scratch, self.pid))

    def signal(self, number: int) -> None:
        """Send it a signal, unless it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def cause_of_death(self, exit_code: int, step: int) -> Cause:
        """Return why it was lost, from its exit code (negative: a signal), its last message and why it was killed.

        `step`: the one it was in; -1 if that is not known.
        """
        if self.failure is not None:
            text = self.failure["text"]
            why = text if exit_code >= FINAL else f"exit code {exit_code}, {(text.splitlines() or [''])[0]}"
            return Cause(why, self.failure["error"], exit_code, step)
        if exit_code < 0:
            return Cause(self.killed or end_in_words(exit_code), "", exit_code, step)
        return Cause(end_in_words(exit_code), "", exit_code or 1, step)
