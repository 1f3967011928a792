"""A run gives up once restarts do not help, and not before."""

from __future__ import annotations

from argosy.errors import Poisoned, Retryable
from argosy.supervise.failures import Failures
from argosy.supervise.nodes import Cause

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
