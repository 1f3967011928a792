"""What is watched on a node besides its ranks: clocks, limits, and all of it together."""

from __future__ import annotations

import os
import random
import time

import pytest

from argosy.processes.patience import process_state
from argosy.resilience.detect.finding import Latch
from argosy.resilience.detect.node import (
    ClockDetector,
    LimitsDetector,
    LimitsReading,
    NodeWatch,
    read_clocks,
    read_limits,
)


@pytest.mark.parametrize("jump_s", [-3600.0, -2.0, 1.5, 86400.0])
def test_a_wall_clock_that_jumps_is_told_once(jump_s):
    clock = ClockDetector()
    assert not clock.observe(10.0, 1000.0)
    assert not clock.observe(12.0, 1002.0)
    (finding,) = clock.observe(14.0, 1004.0 + jump_s)
    assert finding.kind == "clock_jump" and finding.evidence["jump_s"] == pytest.approx(jump_s)
    assert not clock.observe(16.0, 1006.0 + jump_s)


def test_a_clock_that_is_adjusted_slowly_is_well():
    clock, noise = ClockDetector(), random.Random(0)
    wall_s = 1e9
    for second in range(10000):
        wall_s += 1 + 5e-4 + noise.uniform(-1e-3, 1e-3)
        assert not clock.observe(float(second), wall_s)


def test_limits_that_are_nearly_met_are_told_once():
    limits = LimitsDetector()
    assert not limits.observe(LimitsReading({7: (100, 1024)}, (1, 100), (50, 1000)))
    (finding,) = limits.observe(LimitsReading({7: (1000, 1024)}, (1, 100), (50, 1000)))
    assert finding.kind == "limit_near" and "process 7 has 1000 open files" in finding.why
    assert not limits.observe(LimitsReading({7: (950, 1024)}, (1, 100)))
    assert [f.kind for f in limits.observe(LimitsReading({7: (950, 1024)}, (95, 100), (990, 1000)))] == 2 * [
        "limit_near"
    ]


def test_no_limit_is_never_met():
    assert not LimitsDetector().observe(LimitsReading({}, (0, 0)))


def test_the_limits_of_a_process_are_read():
    reading = read_limits([os.getpid(), 2**22 + 1])
    used, most = reading.files[os.getpid()]
    assert 2 < used < most and len(reading.files) == 1


def test_a_latch_tells_once_until_it_was_right():
    latch = Latch()
    seen = [latch.rises("x", value > 10, value < 5) for value in (1, 11, 12, 7, 11, 4, 11)]
    assert seen == [False, True, False, False, False, False, True]


def test_the_state_of_a_process_is_a_letter():
    assert process_state(os.getpid()) in "RS"
    assert process_state(2**22 + 1) == ""


def test_a_healthy_node_is_silent_and_cheap(tmp_path):
    watch = NodeWatch(tmp_path)
    assert [f.kind for f in watch.look([os.getpid()])] == []
    began = time.perf_counter()
    for _ in range(100):
        assert not watch.look([os.getpid()])
    assert time.perf_counter() - began < 0.5


def test_a_process_that_stands_still_between_two_clocks_sees_no_jump(monkeypatch):
    """As it does on a machine that has more to do than processors."""
    now_s, stalls = 100.0, iter([0.0, 1.2, *[0.0] * 8])

    def wall() -> float:
        nonlocal now_s
        now_s += next(stalls, 0.0)
        return 1e9 + now_s

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "time", wall)
    clock = ClockDetector()
    assert not any(clock.observe(*read_clocks()) for _ in range(3))
