"""A process that is stopped before it is in a world is found; one that is only slow is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.observe.heartbeat import HeartbeatReading, heartbeat_path, read_heartbeat
from argosy.processes.patience import process_state
from argosy.resilience.detect.hang import MIN_AUTO_S
from argosy.resilience.detect.joining import OTHERS_S, JoiningWatch, Newcomer
from resilience.detect.samples import World

BEATING = """
import sys, time
from pathlib import Path
from argosy.observe.heartbeat import Heartbeat
Heartbeat(Path(sys.argv[1]))
time.sleep(60)
"""
LIMIT_S, FIRST_STEP_S = 3.0, 60.0


@pytest.fixture
def beating(tmp_path: Path) -> Iterator[int]:
    """A real process with a heartbeat."""
    process = subprocess.Popen([sys.executable, "-c", BEATING, str(tmp_path)])
    while read_heartbeat(heartbeat_path(tmp_path, process.pid)) is None:
        assert process.poll() is None
        time.sleep(0.02)
    yield process.pid
    process.kill()
    process.wait()


def reading(beats: int = 1, generation: int = 0, step: int = -1) -> HeartbeatReading:
    one = World(1).ranks[0]
    return replace(one, pid=7, beats=beats, generation=generation, step=step, phase="starting")


def found_after(newcomer: Newcomer, seconds: float, tick_s: float = 0.5) -> float | None:
    """Seconds after which a process that stays as it is is found; None if it is not within `seconds`."""
    watch = JoiningWatch(LIMIT_S, FIRST_STEP_S)
    for tick in range(int(seconds / tick_s) + 2):
        if watch.look(100 + tick * tick_s, {7: newcomer}):
            return tick * tick_s
    return None


def test_a_real_process_that_was_stopped_is_found_and_one_that_lives_is_not(tmp_path, beating):
    watch, began_s = JoiningWatch(0.5, FIRST_STEP_S), time.monotonic()

    def look() -> dict[int, str]:
        now = Newcomer(process_state(beating), 0, read_heartbeat(heartbeat_path(tmp_path, beating)))
        return watch.look(time.monotonic(), {beating: now})

    while time.monotonic() - began_s < 1.5:
        assert not look()
        time.sleep(0.05)
    os.kill(beating, signal.SIGSTOP)
    while not (found := look()):
        assert time.monotonic() - began_s < 20
        time.sleep(0.05)
    assert "it was stopped while it waited for a world: no heartbeat for 0." in found[beating]


@pytest.mark.parametrize(
    ("newcomer", "limit_s"),
    [
        (Newcomer("T", 0, None), LIMIT_S),
        (Newcomer("T", 0, reading()), LIMIT_S),
        (Newcomer("T", 3, reading(generation=2)), LIMIT_S),
        (Newcomer("T", 3, reading(generation=3)), LIMIT_S + OTHERS_S),
        (Newcomer("S", 0, None), FIRST_STEP_S),
        (Newcomer("R", 3, reading()), MIN_AUTO_S),
        (Newcomer("R", 3, reading(generation=3)), MIN_AUTO_S + OTHERS_S),
    ],
    ids=str,
)
def test_a_process_that_shows_no_life_is_found_after_its_limit_and_not_before(newcomer, limit_s):
    assert limit_s < found_after(newcomer, limit_s + 1) <= limit_s + 1


@pytest.mark.parametrize("generation", [1, 2])
def test_a_world_that_has_begun_its_steps_is_left_to_its_own_detectors(generation):
    assert found_after(Newcomer("T", generation, reading(generation=generation, step=0)), 100) is None
    assert found_after(Newcomer("T", generation + 1, reading(generation=generation, step=5)), 100) is not None


def test_a_slow_start_that_shows_life_is_never_found():
    watch = JoiningWatch(LIMIT_S, FIRST_STEP_S)
    for tick in range(400):  # an import that lets the beat through every 25 s
        assert not watch.look(100 + tick * 0.5, {7: Newcomer("R", 1, reading(beats=tick // 50))})


def test_time_in_which_the_watcher_did_not_run_does_not_count():
    """The whole machine was suspended, or the agent was stopped with its processes."""
    watch = JoiningWatch(LIMIT_S, FIRST_STEP_S)
    stopped = {7: Newcomer("T", 0, reading())}
    assert not watch.look(100, stopped)
    assert not watch.look(1000, stopped)
    assert not watch.look(1000.5, {7: Newcomer("S", 0, reading(beats=2))})


def test_a_process_that_takes_the_pid_of_another_starts_anew():
    watch = JoiningWatch(LIMIT_S, FIRST_STEP_S)
    for tick in range(6):
        assert not watch.look(100 + tick * 0.5, {7: Newcomer("T", 0, reading())})
    assert not watch.look(103, {})
    assert not watch.look(103.5, {7: Newcomer("T", 0, reading())})
