"""What is watched on a node besides its ranks: clocks, limits, and all of it together."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.plan.hardware.local_machine import MemoryReading
from argosy.processes.child import process_state
from argosy.resilience.detect.finding import Latch
from argosy.resilience.detect.node import (
    ClockDetector,
    DiskDetector,
    DiskProbe,
    DiskReading,
    LimitsDetector,
    LimitsReading,
    MemoryDetector,
    NodeWatch,
    read_clocks,
    read_limits,
    seconds_left,
)
from waiting import wait_until


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
    assert not limits.observe(LimitsReading({7: (700, 1024)}, (95, 100), (990, 1000)))
    (again,) = limits.observe(LimitsReading({7: (950, 1024)}, (95, 100), (990, 1000)))
    assert "process 7 has 950 open files" in again.why


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


WELL = DiskReading(100 * 2**30, 200 * 2**30, 10**6, 2 * 10**6, False, 0.01)


@pytest.fixture
def disk() -> DiskDetector:
    """With a history of writes that take 10 ms."""
    disk = DiskDetector(Path("/run"))
    for _ in range(20):
        assert not disk.observe(WELL)
    return disk


def kinds(disk: DiskDetector, **values: object) -> list[str]:
    return [finding.kind for finding in disk.observe(replace(WELL, **values))]  # type: ignore[arg-type]


def test_a_write_that_fails_is_told_once_with_its_error(disk):
    (finding,) = disk.observe(replace(WELL, write_s=None, error=errno.EIO))
    assert finding.kind == "disk_failed" and finding.evidence == {"errno": "EIO"}
    assert "Input/output error" in finding.why
    assert not kinds(disk, write_s=None, error=errno.EIO)
    assert not kinds(disk)
    assert kinds(disk, write_s=None, error=errno.ENOSPC) == ["disk_failed"]


def test_a_disk_that_became_read_only_is_told(disk):
    assert kinds(disk, is_read_only=True) == ["disk_failed"]


def test_several_slow_writes_in_a_row_are_told(disk):
    assert not kinds(disk, write_s=5.0) and not kinds(disk, write_s=5.0)
    assert kinds(disk, write_s=5.0) == ["disk_slow"]
    assert not kinds(disk, write_s=5.0)
    assert not kinds(disk)


def test_now_and_then_a_slow_write_is_nothing(disk):
    noise = random.Random(0)
    for _ in range(1000):
        assert not kinds(disk, write_s=8.0 if noise.random() < 0.05 else noise.lognormvariate(-4, 0.8))
        assert not kinds(disk, write_s=0.01)


def test_a_disk_that_was_always_slow_is_usual():
    disk = DiskDetector(Path("/run"))
    for _ in range(50):
        assert not kinds(disk, write_s=3.0)


def test_a_write_that_does_not_return_is_told(disk):
    assert not kinds(disk, write_s=None, pending_s=10.0)
    assert kinds(disk, write_s=None, pending_s=31.0) == ["disk_slow"]


def test_a_disk_that_is_nearly_full_is_told(disk):
    assert kinds(disk, free_bytes=2**30) == ["disk_full"]
    assert not kinds(disk, free_bytes=2**30)
    assert kinds(disk, free_inodes=100) == ["disk_full"]


def test_a_small_share_of_a_huge_disk_is_enough(disk):
    assert not kinds(disk, free_bytes=50 * 2**30, total_bytes=10**5 * 2**30)


def test_a_file_system_without_inodes_is_well(disk):
    assert not kinds(disk, free_inodes=0, total_inodes=0)


def after_a_write(probe: DiskProbe) -> DiskReading:
    """The reading that has the outcome of the first trial write."""

    def written() -> DiskReading | None:
        reading = probe.read()
        return None if reading.write_s is None and reading.error is None else reading

    found = wait_until(written)
    assert found is not None
    return found


def test_nodes_that_share_a_folder_do_not_remove_each_other_s_trial_files(tmp_path, monkeypatch):
    names, fsync, still_there = iter("ab"), os.fsync, []
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))

    def while_another_writes(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        after_a_write(DiskProbe(tmp_path))
        still_there.extend(path for path in tmp_path.iterdir() if path.samefile(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", while_another_writes)
    assert after_a_write(DiskProbe(tmp_path)).error is None
    assert len(still_there) == 1 and not list(tmp_path.iterdir())


def test_a_real_disk_is_probed_and_nothing_is_left_behind(tmp_path):
    reading = after_a_write(DiskProbe(tmp_path))
    assert reading.write_s < 10 and reading.free_bytes > 0 and reading.error is None
    assert not list(tmp_path.iterdir())


def test_where_there_can_be_no_more_threads_the_trial_write_is_left_out(tmp_path, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reading = DiskProbe(tmp_path).read()
    assert (reading.write_s, reading.error, reading.pending_s) == (None, None, 0.0) and reading.total_bytes


def test_a_folder_that_is_gone_is_an_error(tmp_path):
    assert after_a_write(DiskProbe(tmp_path / "gone")).error == errno.ENOENT


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
