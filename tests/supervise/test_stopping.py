"""What follows from the signals that an agent is sent."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest

from argosy.errors import Interrupted, Retryable
from argosy.observe.heartbeat import HeartbeatReading
from argosy.supervise import stopping as module
from argosy.supervise.stopping import Stopping

READING = HeartbeatReading(1, 1, 0, 7, "forward", 0, {}, 0, 0, 0, {})


@pytest.fixture
def stopping(tmp_path):
    made = Stopping(tmp_path, grace_s=60.0)
    with made.listening():
        yield made


def test_the_first_signal_stops_the_run_once(stopping):
    assert not stopping.begins() and stopping.error() is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.begins() and not stopping.begins()
    error = stopping.error()
    assert isinstance(error, Interrupted) and error.exit_code == 143


def test_signals_that_come_at_once_are_one(stopping):
    """`timeout` signals its child and then the group, SLURM sends TERM twice in 2 ms: nobody is impatient."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert stopping.begins() and not stopping.is_late(time.monotonic())


def test_one_more_after_a_while_kills_what_still_runs(stopping, monkeypatch):
    monkeypatch.setattr(module, "SAME_S", 0.0)
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.begins()
    time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
    assert not stopping.begins() and stopping.is_late(time.monotonic())
    assert stopping.kill_why == "a second signal came"


def test_at_the_end_only_a_signal_of_its_own_is_urgent(stopping, monkeypatch):
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.begins()
    os.kill(os.getpid(), signal.SIGTERM)
    assert not stopping.is_urgent(), "it is a part of the first one"
    monkeypatch.setattr(module, "SAME_S", 0.0)
    assert stopping.is_urgent()


def test_what_takes_too_long_is_killed(tmp_path):
    stopping = Stopping(tmp_path, grace_s=0.0)
    with stopping.listening():
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping.begins() and stopping.is_late(time.monotonic() + 0.001)
    assert "resilience.grace_s = 0" in stopping.kill_why


def test_a_worker_of_parameter_servers_has_no_state_to_lose(tmp_path):
    stopping = Stopping(tmp_path, grace_s=60.0, is_served=True)
    with stopping.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.begins()
    assert stopping.in_words([READING]) == "SIGTERM: stopping after this step; the parameter servers have the state"
    error = stopping.error()
    assert isinstance(error, Interrupted) and error.exit_code == 143
    assert "servers have the state" in str(error) and "nothing was saved" not in str(error)


@pytest.mark.parametrize("why", ["a second signal came", "the disk is full. Mend that."])
def test_a_state_that_was_not_saved_is_not_called_saved(stopping, why):
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.begins()
    stopping.not_saved = why
    error = stopping.error()
    assert isinstance(error, Retryable) and f"before the state was saved: {why.rstrip('.')}. The same" in str(error)


@pytest.mark.parametrize(("saved", "code"), [(6, 75), (7, 143)])
def test_a_worker_that_is_killed_after_its_state_was_saved_loses_nothing(stopping, monkeypatch, saved, code):
    """It waits for a remote place that does not answer, say."""
    monkeypatch.setattr(module, "saved_step", lambda _: saved)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.begins()
    stopping.killed("it did not end in time", READING)
    error = stopping.error()
    assert error is not None and error.exit_code == code


@pytest.mark.parametrize(
    ("phase", "said"),
    [("forward", "after this step"), ("evaluate", "after this evaluation batch"), ("checkpoint", "after this save")],
)
def test_it_says_what_is_done_first_and_what_impatience_costs(stopping, phase, said):
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.begins()
    words = stopping.in_words([dataclasses.replace(READING, phase=phase)])
    assert words == f"SIGINT: stopping {said}, with the state saved; once more gives up 7 steps"


def test_right_after_a_checkpoint_impatience_costs_no_step(stopping):
    os.kill(os.getpid(), signal.SIGINT)
    assert stopping.begins()
    assert stopping.in_words([dataclasses.replace(READING, step=0)]).endswith("once more stops at once")


def test_before_the_first_world_there_is_nothing_to_save(stopping):
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.begins() and "nothing to save" in stopping.in_words([])


FIRST = dataclasses.replace(READING, step=0)


@pytest.mark.parametrize(
    ("readings", "is_at_once"),
    [
        ([FIRST, dataclasses.replace(FIRST, phase="data")], True),
        ([FIRST, READING], False),
        ([FIRST, dataclasses.replace(FIRST, phase="optimizer")], False),
        ([dataclasses.replace(FIRST, busy_s={0: 1.0})], False),
        ([dataclasses.replace(FIRST, step=-1, phase="recovering")], False),  # perhaps from memory, with newer steps
        ([], False),  # in no world; they may still form one to save what they have
    ],
)
def test_in_the_first_step_nobody_is_waited_for(stopping, readings, is_at_once):
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopping.begins()
    stopping.end_at_once_if_nothing_is_lost(readings)
    assert stopping.is_at_once == is_at_once
    assert ("nothing to save" in stopping.in_words(readings)) == (is_at_once or not readings)
