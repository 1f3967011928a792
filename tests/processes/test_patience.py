"""How long a process is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from argosy.processes import patience as module
from argosy.processes.patience import Patience, process_state


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def end_of(patience: Patience) -> str:
    while not (why := patience.end()):
        time.sleep(0.01)
    return why


def test_a_process_that_is_stopped_is_given_up_sooner_than_one_that_is_slow(sleeper):
    assert end_of(Patience(sleeper, limit_s=0.3, stopped_s=60)).startswith("it did not answer")
    os.kill(sleeper, signal.SIGSTOP)
    assert end_of(Patience(sleeper, limit_s=60, stopped_s=0.3)).startswith("it was stopped")


def test_one_that_goes_on_in_between_is_waited_for_anew(sleeper):
    patience = Patience(sleeper, stopped_s=0.5)
    for _ in range(4):
        os.kill(sleeper, signal.SIGSTOP)
        until_s = time.monotonic() + 0.2
        while time.monotonic() < until_s:
            assert not patience.end()
        os.kill(sleeper, signal.SIGCONT)
        while process_state(sleeper) == "T":
            pass
        assert not patience.end()


def test_time_in_which_the_one_that_waits_stood_still_does_not_count(sleeper, monkeypatch):
    patience = Patience(sleeper, limit_s=30)
    now_s = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s + 3600)
    assert not patience.end()
