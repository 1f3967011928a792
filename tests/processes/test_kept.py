"""A process beside the workers, which is started again."""

from __future__ import annotations

import os
import signal
import time

import pytest

from argosy.processes import kept
from argosy.processes.child import Child
from argosy.processes.kept import KeptProcess


class Kept(KeptProcess):
    def __init__(self) -> None:
        super().__init__(is_needed=True, finish_s=0.0)
        self.is_wanted = True
        self.pids: list[int] = []
        self.why: list[str] = []

    def start(self) -> Child:
        child = Child("argosy.processes.fork_server", "colorsys")
        self.pids.append(child.pid)
        return child

    def lost(self, why: str) -> None:
        self.why.append(why)


def test_one_that_is_stopped_is_started_again(monkeypatch):
    monkeypatch.setattr(kept, "STOPPED_S", 0.3)
    process = Kept()
    process.keep()
    os.kill(process.pids[0], signal.SIGSTOP)
    while len(process.pids) < 2:
        process.keep()
        time.sleep(0.01)
    process.is_wanted = False
    process.keep()
    assert len(process.why) == 1 and process.why[0].startswith("it was stopped")
    with pytest.raises(ProcessLookupError):
        os.kill(process.pids[0], 0)
