"""A child is started again as its policy says, ended when it hangs, and finishes in its time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest

from argosy.processes.child import Child, process_state
from argosy.processes.supervisor import ChildEnd, RestartPolicy, Restarts, Supervisor, repeated, supervised
from waiting import wait_until

SLEEPER, FINISHING = ("argosy.processes.fork_server", "colorsys"), ("processes.finishing",)
"""A child that ends only with its parent, and one that ends when it is told to finish."""


class Supervised(Supervisor):
    """A supervisor that remembers what it has started, and how that ended."""

    def __init__(self, start: Callable[[], Child] = lambda: Child(*SLEEPER), **policy: float):
        self.pids: list[int] = []
        self.ends: list[ChildEnd] = []
        super().__init__(RestartPolicy(**policy), lambda: self._remember(start()), self.ends.append)

    def _remember(self, child: Child) -> Child:
        self.pids.append(child.pid)
        return child

    def keep_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: (self.keep(), condition())[1])


@pytest.fixture
def supervisor_of():
    made: list[Supervised] = []

    def make(*arguments: Callable[[], Child], **policy: float) -> Supervised:
        made.append(Supervised(*arguments, **policy))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def test_pauses_grow_from_failure_to_failure_until_the_last():
    restarts = Restarts(RestartPolicy(most_failures=5, pause_s=60, growth=2))
    assert [restarts.ended() for _ in range(5)] == [60, 120, 240, 480, None]


def test_progress_begins_the_count_anew():
    restarts = Restarts(RestartPolicy(most_failures=2, pause_s=3, growth=10))
    assert [restarts.ended(), restarts.ended(made_progress=True), restarts.ended(), restarts.ended()] == [3, 3, 3, None]
    restarts.progress()
    assert restarts.ended() == 3


def test_the_count_goes_on_where_another_process_has_left_it():
    restarts = Restarts(RestartPolicy(most_failures=3), failures=2)
    assert restarts.ended() is None and restarts.failures == 3


def test_one_that_is_stopped_is_killed_and_started_again(supervisor_of):
    process = supervisor_of(stopped_s=0.3)
    process.keep()
    os.kill(process.pids[0], signal.SIGSTOP)
    process.keep_until(lambda: len(process.pids) == 2)
    process.is_wanted = False
    process.keep()
    (end,) = process.ends
    assert end.why.startswith("it was stopped") and end.again_s == 0.0 and end.was_killed
    for pid in process.pids:  # a busy machine ends a killed process some time later
        wait_until(lambda pid=pid: process_state(pid) in ("", "Z"))


def test_one_that_is_killed_is_given_up_after_its_failures(supervisor_of):
    process = supervisor_of(most_failures=2)
    for count in (1, 2):
        process.keep_until(lambda: process.is_running)
        os.kill(process.pids[-1], signal.SIGKILL)
        process.keep_until(lambda count=count: len(process.ends) == count)
    assert [end.again_s for end in process.ends] == [0.0, None]
    assert {end.why for end in process.ends} == {"signal SIGKILL"} and not process.ends[0].was_killed
    assert process.is_given_up and process.starts == 2
    process.keep()
    assert not process.is_running


def test_one_that_says_nothing_is_killed(supervisor_of):
    process = supervisor_of(silent_s=0.2, most_failures=1)
    process.keep_until(lambda: process.ends)
    assert process.ends[0].why.startswith("it did not answer for") and process.is_given_up


def test_one_that_cannot_be_started_counts_as_a_failure(supervisor_of):
    def refuse() -> Child:
        raise OSError("no more processes")

    process = supervisor_of(refuse, most_failures=2)
    process.keep_until(lambda: process.is_given_up)
    assert [end.why for end in process.ends] == ["it cannot be started: no more processes"] * 2


def test_one_that_does_not_finish_in_time_is_killed(supervisor_of):
    process = supervisor_of(finish_s=0.3)
    process.keep()
    os.kill(process.pid, signal.SIGSTOP)
    process.finish()
    (end,) = process.ends
    assert end.why == "it did not finish within 0.3 s" and end.again_s is None and process.is_given_up


def test_one_that_finishes_is_no_failure(supervisor_of):
    process = supervisor_of(lambda: Child(*FINISHING), finish_s=60.0)
    process.keep()
    process.finish()
    assert process.ends == [] and process.is_given_up


def test_one_is_not_waited_for_if_that_is_urgent(supervisor_of):
    process = supervisor_of(finish_s=60.0)
    process.keep()
    process.finish(lambda: True)
    assert process.ends == [] and process.is_given_up


def test_a_thread_looks_after_one_while_a_block_runs(supervisor_of):
    process = supervisor_of(lambda: Child(*FINISHING), finish_s=60.0)
    process.is_wanted = False
    with supervised(process, "argosy-test"):
        wait_until(lambda: process.is_running)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: process.starts == 2 and process.is_running)
    assert not process.is_running and [end.why for end in process.ends] == ["signal SIGKILL"]


def test_an_action_is_repeated_until_the_block_ends_after_an_error_too():
    done: list[str] = []
    with pytest.raises(KeyError), repeated(lambda: done.append(threading.current_thread().name), 0.01, "argosy-test"):
        wait_until(lambda: len(done) > 1)
        raise KeyError
    assert {*done} == {"argosy-test"}
    assert "argosy-test" not in {thread.name for thread in threading.enumerate()}
