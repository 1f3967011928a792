"""A run gives up once restarts do not help, and not before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from argosy.errors import FINAL, Poisoned, Retryable
from argosy.processes.channel import Channel
from argosy.supervise.nodes import HANDOVER_FILE, OLD_NAMES, Cause, Failures, Handover, WorkerProcess

KILLED = Cause("signal SIGKILL", exit_code=-9)


def crash(step: int) -> Cause:
    return Cause("exit code 1, ValueError", "ValueError", 1, step)


def test_failures_are_counted_until_there_is_progress():
    failures = Failures(max_restarts=1)
    failures.made_step(3, -1)
    assert failures.count(KILLED, 1) is None
    failures.made_step(3, -1)
    end = failures.count(KILLED, 2)
    assert end is not None and end.exit_code == Retryable.exit_code and "died 2 times" in end.why
    failures.made_step(4, -1)
    assert failures.count(KILLED, 3) is None
    failures.made_step(4, 2)
    assert failures.count(KILLED, 4) is None


def test_the_first_step_that_is_heard_of_is_no_progress():
    failures = Failures(max_restarts=1)
    assert failures.count(KILLED, 1) is None
    failures.made_step(100, 90)
    assert failures.count(KILLED, 2) is not None


def test_the_same_crash_of_another_generation_ends_the_run():
    failures = Failures(max_restarts=9)
    assert failures.count(crash(5), 1) is None
    assert failures.count(crash(5), 1) is None, "two ranks of one world"
    end = failures.count(crash(5), 2)
    assert end is not None and end.exit_code == Poisoned.exit_code and "at step 5" in end.why
    assert failures.count(crash(6), 3) is None


LEFT = Handover(
    3, "dp_replicate=2", 2, {"a": 1, "b": 1}, is_instead=True, avoided=("c",), last=("c",), suspicions={"c": 3}
)


def test_a_handover_is_read_as_it_was_written(tmp_path):
    LEFT.save(tmp_path)
    assert Handover.load(tmp_path, 3) == LEFT


def test_a_handover_of_another_generation_is_ignored(tmp_path):
    LEFT.save(tmp_path)
    assert Handover.load(tmp_path, 4) == Handover(4)


@pytest.mark.parametrize("text", [None, b"", b"{}", b"[]", b'{"generation": 3}', b"\xff"])
def test_a_missing_or_damaged_handover_keeps_only_the_generation(tmp_path, text):
    if text is not None:
        (tmp_path / HANDOVER_FILE).write_bytes(text)
    assert Handover.load(tmp_path, 3) == Handover(3)


def test_what_an_older_version_left_is_understood(tmp_path):
    record = json.loads((LEFT.save(tmp_path), (tmp_path / HANDOVER_FILE).read_text())[1])
    for new, old in OLD_NAMES.items():
        record[old] = record.pop(new)
    (tmp_path / HANDOVER_FILE).write_text(json.dumps(record))
    assert Handover.load(tmp_path, LEFT.generation) == LEFT


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
