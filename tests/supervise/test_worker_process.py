"""Why a worker was lost, in words that a person and the coordinator can act on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from argosy.errors import FINAL
from argosy.processes.channel import Channel
from argosy.supervise.nodes import Cause
from argosy.supervise.worker_process import WorkerProcess

SAID = {"kind": "failed", "text": "no room left\nin any place", "error": "StorageError", "traceback": "..."}


def process(**facts) -> WorkerProcess:
    return WorkerProcess(0, Mock(spec=Channel), **facts)


@pytest.mark.parametrize(
    ("facts", "exit_code", "cause"),
    [
        ({}, -9, Cause("signal SIGKILL", "", -9, 3)),
        ({"killed": "it hung"}, -9, Cause("it hung", "", -9, 3)),
        ({}, 7, Cause("exit code 7", "", 7, 3)),
        ({}, 0, Cause("exit code 0", "", 1, 3)),  # it was not done: it is lost, whatever it says
        ({"failure": SAID}, 1, Cause("exit code 1, no room left", "StorageError", 1, 3)),
        ({"failure": SAID}, FINAL, Cause("no room left\nin any place", "StorageError", FINAL, 3)),
        ({"failure": SAID | {"text": ""}}, 1, Cause("exit code 1, ", "StorageError", 1, 3)),
    ],
)
def test_the_cause_is_its_last_message_or_why_it_was_killed(facts, exit_code, cause):
    assert process(**facts).cause_of_death(exit_code, step=3) == cause


def test_a_signal_reaches_it_and_one_to_the_dead_is_no_error():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        held = process(pid=child.pid)
        held.signal(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(held.pid, 0)
    held.signal(signal.SIGKILL)
