"""A worker process as the agent that holds it knows it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass

from argosy.errors import FINAL
from argosy.processes.channel import Channel, Message
from argosy.supervise.nodes import Cause, State


@dataclass
class WorkerProcess:
    """A process that the agent had its fork server fork."""

    slot: int
    channel: Channel
    pid: int = 0
    """0 until it is born."""
    state: State = State.STARTING
    rank: int | None = None
    generation: int = 0
    failure: Message | None = None
    """What it said before it ended with an error."""
    killed: str = ""
    """Why its agent killed it."""
    leave_by: float | None = None
    """When it must have left the world that broke."""
    is_finished: bool = False
    """With state DONE: whether the run's last step was made."""

    def signal(self, number: int) -> None:
        """Send it a signal, unless it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def cause_of_death(self, exit_code: int, step: int) -> Cause:
        """Why it was lost, from its exit code (negative: a signal), its own words and those of who killed it.

        `step`: the one it was in; -1 if that is not known.
        """
        if self.failure is not None:
            text = self.failure["text"]
            why = text if exit_code >= FINAL else f"exit code {exit_code}, {(text.splitlines() or [''])[0]}"
            return Cause(why, self.failure["error"], exit_code, step)
        if exit_code < 0:
            return Cause(self.killed or f"signal {signal.Signals(-exit_code).name}", "", exit_code, step)
        return Cause(f"exit code {exit_code}", "", exit_code or 1, step)
