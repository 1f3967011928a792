"""Memory that runs out is told before it has; memory that only goes up and down is not."""

from __future__ import annotations

import random

import pytest

from argosy.plan.hardware.host_memory import MemoryReading
from argosy.resilience.detect.memory import MemoryDetector, seconds_left

GIB = 2**30
LIMIT = 64 * GIB


def watch(available_gib: list[float], kills: list[int] | None = None, every_s: float = 5.0) -> list[tuple[int, str]]:
    """(index of the reading, kind of finding)."""
    memory, found = MemoryDetector(), []
    for i, free in enumerate(available_gib):
        count = kills[i] if kills else 0
        reading = MemoryReading(int(free * GIB), LIMIT, count, count)
        found += [(i, finding.kind) for finding in memory.observe(i * every_s, reading)]
    return found


def test_a_steady_leak_is_told_while_there_is_time():
    """0.5 GiB a minute from 20: it would run out after 40 minutes."""
    found = watch([20 - 0.5 / 12 * i for i in range(480)])
    assert [kind for _, kind in found] == ["memory_low", "memory_low"]
    left_s = (20 / (0.5 / 60)) - found[0][0] * 5
    assert 800 < left_s <= 910


def test_little_memory_is_told_once():
    assert watch([10, 2, 2.5, 3, 2]) == [(1, "memory_low")]
    assert watch([10, 2, 8, 2]) == [(1, "memory_low"), (3, "memory_low")]


@pytest.mark.parametrize("seed", range(3))
def test_healthy_memory_is_silent(seed):
    noise = random.Random(seed)
    assert not watch([20 + noise.gauss(0, 2) for _ in range(1000)])


def test_a_start_that_takes_memory_quickly_and_then_no_more_is_silent():
    assert not watch([60 - min(50, 3 * i) for i in range(200)])
    assert not watch([60 * 0.9**i + 5 for i in range(200)])


def test_a_sawtooth_of_saves_is_silent():
    assert not watch([20 - 10 * (i % 24) / 24 for i in range(500)])


def test_a_kill_by_the_kernel_explains_the_death_that_is_found_a_little_later_and_no_other():
    memory = MemoryDetector()
    for at_s, kills in ((0, 0), (2, 2), (3, 2)):
        memory.observe(at_s, MemoryReading(40 * GIB, LIMIT, kills, kills))
    assert [memory.why_killed(3) for _ in range(3)] == ["the kernel killed 2 processes because memory ran out"] * 2 + [
        ""
    ]
    memory.observe(5, MemoryReading(40 * GIB, LIMIT, 3, 3))
    assert not memory.why_killed(100)


def test_a_kill_by_the_kernel_is_told_from_others():
    assert watch([20, 20, 20], kills=[3, 3, 3]) == []
    assert watch([20, 20, 20], kills=[0, 0, 1]) == [(2, "oom_kill")]
    memory = MemoryDetector()
    memory.observe(0, MemoryReading(40 * GIB, LIMIT, 0, 7))
    assert not memory.observe(1, MemoryReading(40 * GIB, LIMIT, 0, 8))  # somebody else's group met its limit
    memory.observe(2, MemoryReading(5 * GIB, LIMIT, 0, 8))
    assert memory.observe(3, MemoryReading(40 * GIB, LIMIT, 0, 9))


def test_no_trend_no_time():
    assert seconds_left([(0.0, 10), (1.0, 9)]) is None
    falling = [(5.0 * i, 100 - i) for i in range(61)]
    assert seconds_left(falling) == pytest.approx(40 * 5, rel=0.1)
