"""A signal is a request: it is remembered, and the process goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from threading import Thread, Timer

import pytest

from argosy.errors import STOP_SIGNALS
from argosy.training import stop as module
from argosy.training.stop import StopSignal, WorldIsOver


@pytest.fixture(autouse=True)
def _handlers_as_they_were() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}  # nohup has SIGHUP ignored
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_signal_there_is_no_request():
    assert StopSignal().listen().number is None


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_remembered(number):
    stop = StopSignal().listen()
    os.kill(os.getpid(), number)
    assert stop.number == number


def test_a_closed_terminal_is_ignored_where_the_run_is_to_go_on_without_it():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    stop = StopSignal().listen()
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.number is None


def test_the_first_signal_is_the_one_that_counts():
    stop = StopSignal().listen()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert stop.number == signal.SIGTERM


def test_a_second_interrupt_ends_the_process_at_once(monkeypatch):
    monkeypatch.setattr(module, "SAME_S", 0.0)
    StopSignal().listen()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.001)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_interrupts_that_come_at_once_are_one():
    """`timeout` sends its signal to the process, and again to the group that the process is in."""
    stop = StopSignal().listen()
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.number == signal.SIGINT


def test_beside_the_main_thread_it_listens_to_nothing():
    before = signal.getsignal(signal.SIGTERM)
    thread = Thread(target=StopSignal().listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_holds_goes_on_when_a_signal_comes_or_nothing_ends_the_world():
    stop, began = StopSignal(), time.monotonic()
    stop.is_to_hold = True
    stop.hold(0.05)
    assert time.monotonic() - began >= 0.05 and not stop.is_to_hold
    Timer(0.05, lambda: setattr(stop, "number", 15)).start()
    stop.hold(60.0)
    stop.number, stop.world_is_over = None, True
    with pytest.raises(WorldIsOver):
        stop.hold(60.0)
