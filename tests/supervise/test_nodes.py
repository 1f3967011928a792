"""A run gives up once restarts do not help, and not before."""

from __future__ import annotations

import json

import pytest

from argosy.errors import Poisoned, Retryable
from argosy.supervise.nodes import FILE, OLD_NAMES, Cause, Failures, Handover

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
        (tmp_path / FILE).write_bytes(text)
    assert Handover.load(tmp_path, 3) == Handover(3)


def test_what_an_older_version_left_is_understood(tmp_path):
    record = json.loads((LEFT.save(tmp_path), (tmp_path / FILE).read_text())[1])
    for new, old in OLD_NAMES.items():
        record[old] = record.pop(new)
    (tmp_path / FILE).write_text(json.dumps(record))
    assert Handover.load(tmp_path, LEFT.generation) == LEFT
