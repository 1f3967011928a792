"""A run that stands still: the right rank is named, in time, and nobody while the run is well."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from argosy.observe.heartbeat import HeartbeatReading, heartbeat_path, read_heartbeat
from argosy.processes.child import process_state
from argosy.resilience.detect.finding import Sample, WorkerSeen
from argosy.resilience.detect.hang import (
    COORDINATOR_FIRST_S,
    MIN_AUTO_S,
    HangDetector,
    JoiningWatch,
    Newcomer,
    RankWaits,
    blame,
)
from resilience.detect.samples import World

GROUPS = ["world#0", "mesh_tp#1", "mesh_dp#2", "mesh_pp#3"]
COUNTS = st.dictionaries(st.sampled_from(GROUPS), st.integers(0, 3))


def seen(counts: list[dict[str, int]]) -> dict[int, WorkerSeen]:
    return {rank: WorkerSeen(100 + rank, 3, "forward", of, "S", True) for rank, of in enumerate(counts)}


@given(st.lists(COUNTS, min_size=1, max_size=6))
def test_waits_are_those_between_all_pairs(counts):
    pairs = {
        (rank, other): [group for group in one if group in two and two[group] < one[group] and "pp" not in group]
        for rank, one in enumerate(counts)
        for other, two in enumerate(counts)
    }
    waits = RankWaits(seen(counts))
    assert waits.waiting == {rank for (rank, _), groups in pairs.items() if groups}
    assert waits.awaited == {other for (_, other), groups in pairs.items() if groups}
    for (rank, other), groups in pairs.items():
        assert (waits.group_of(rank, other) in groups) if groups else waits.group_of(rank, other) is None
        assert (rank in waits.waiting_for(other)) == bool(groups)
    left = set(waits.waiting)
    while left != (now := {other for (rank, other), groups in pairs.items() if groups and {rank, other} <= left}):
        left = now
    assert waits.circle() == left


def test_the_evidence_of_a_large_world_is_short():
    ranks = 4096
    counts = [{"world#0": 7 + rank % 2, "mesh_tp#1": 5} for rank in range(ranks)]
    detector, still = HangDetector(hang_s=5.0), np.zeros(ranks, dtype=bool)
    found = []
    for second in range(8):
        sample = Sample(float(second), 1, still | (second == 0), ~still, step=3, seen=seen(counts))
        found += detector.observe(sample)
    (finding,) = found
    assert finding.ranks == tuple(range(0, ranks, 2)), "all of them are killed"
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2040 others are stuck" in finding.why
    assert "2048 others wait in number 8" in finding.why and len(json.dumps(dict(finding.evidence))) < 10_000


def test_the_first_of_a_chain_is_to_blame_and_of_a_circle_the_odd_one():
    chain = seen([{"a": 1}, {"a": 2, "b": 1}, {"b": 2, "c": 1}, {"c": 2}])
    assert blame(chain)[:2] == ("hang", (0,))
    circle = seen([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 2, "b": 1}])
    assert blame(circle)[:2] == ("mismatch", (2,))


@pytest.fixture
def world() -> World:
    """Four ranks in their 30th step."""
    return World(4)


@pytest.fixture
def hang(world: World) -> HangDetector:
    hang = HangDetector(hang_s=5.0, heartbeat_timeout_s=3.0)
    for _ in range(30):
        world.step()
        assert not hang.observe(world.sampled())
    return hang


def test_the_rank_that_others_wait_for_is_named_with_the_collective(world, hang):
    world.change(2, phase="backward")
    world.count([0, 1, 3])
    world.change([0, 1, 3], phase="communication")
    found = world.watch(hang, 20)
    assert len(found) == 1
    after_s, finding = found[0]
    assert 5 <= after_s <= 6
    assert (finding.kind, finding.ranks, finding.action) == ("hang", (2,), "kill")
    assert "rank 2 is stuck in backward of step 30" in finding.why and "default_pg#0" in finding.why
    assert finding.evidence["waits"] == {rank: {"2": "default_pg#0"} for rank in "013"}


def test_the_first_of_a_chain_of_waiting_ranks_is_named(world, hang):
    """1 waits for 0 in their tp group, 2 and 3 for 0 and 1 in their dp groups: as in a mesh of 2 x 2."""
    world.count([0, 1], "tp#1", 4)
    world.count([2, 3], "tp#2", 6)
    world.count([1], "tp#1", 1)
    world.count([0, 2], "dp#3", 7)
    world.count([1, 3], "dp#4", 7)
    world.count([2], "dp#3")
    world.count([3], "dp#4")
    ((_, finding),) = world.watch(hang, 10)
    assert finding.kind == "hang" and finding.ranks == (0,)


def test_a_stuck_loader_is_told_from_a_stuck_computation(world, hang):
    world.change(1, phase="data")
    world.count([0, 2, 3])
    ((_, finding),) = world.watch(hang, 10)
    assert finding.kind == "stuck_loader" and finding.ranks == (1,)


def test_ranks_that_began_collectives_in_different_orders_are_a_mismatch(world, hang):
    world.count(range(4), "dp#3", 5)
    world.count([0, 1, 2])
    world.count([3], "dp#3")
    ((_, finding),) = world.watch(hang, 10)
    assert finding.kind == "mismatch" and finding.ranks == (3,)


def test_a_rank_in_another_phase_at_equal_counts_is_a_mismatch(world, hang):
    world.change([0, 1, 2], phase="communication", step=31)
    world.change(3, phase="communication", step=30)
    ((_, finding),) = world.watch(hang, 10)
    assert finding.kind == "mismatch" and finding.ranks == (3,)


def test_where_no_rank_differs_all_are_named(world, hang):
    ((_, finding),) = world.watch(hang, 10)
    assert finding.kind == "hang" and finding.ranks == (0, 1, 2, 3)


def test_counts_of_point_to_point_groups_blame_no_rank():
    world = World(2)
    world.count([0], "mesh_pp#1", 3)
    world.change([0, 1], phase="pipeline")
    seen = world.sampled().seen
    assert not RankWaits(seen).waiting
    assert blame(seen)[1] == (0, 1)


@pytest.mark.parametrize(("state", "kind"), [("T", "stopped"), ("R", "frozen"), ("D", "frozen")])
def test_a_process_without_a_beat_is_named_though_all_have_stopped(world, hang, state, kind):
    world.stopped, world.states = {1}, {1: state}
    world.count([0, 2, 3])
    found = world.watch(hang, 4.5)
    assert len(found) == 1
    after_s, finding = found[0]
    assert 3 <= after_s <= 4
    assert (finding.kind, finding.ranks, finding.action) == (kind, (1,), "kill")


def test_a_rank_that_moves_again_can_be_blamed_again(world, hang):
    world.stopped = {1}
    assert len(world.watch(hang, 4.5)) == 1
    world.stopped = set()
    world.step()
    hang.observe(world.sampled())
    world.stopped = {1}
    assert len(world.watch(hang, 4.5)) == 1


def test_time_that_the_watcher_itself_slept_does_not_count(world, hang):
    world.tick_s = 600.0
    assert not hang.observe(world.sampled())
    world.tick_s = 0.5
    assert not world.watch(hang, 2.0)


def test_slow_steps_are_no_hang(world):
    """With hang_s = 0 the limit follows the steps."""
    hang = HangDetector()
    for _ in range(20):
        world.step()
        assert not world.watch(hang, 60)
    assert not world.watch(hang, 500)
    found = world.watch(hang, 110)
    assert len(found) == 1


@pytest.mark.parametrize("phase", ["starting", "recovering", "checkpoint", "finishing"])
def test_what_takes_long_by_nature_gets_longer(world, hang, phase):
    world.change(range(4), phase=phase)
    assert not world.watch(hang, 590)
    assert world.watch(hang, 20)


def test_a_world_that_was_not_seen_in_its_first_step_is_not_taken_to_be_in_it(world):
    """Its steps are faster than its watcher."""
    for _ in range(6):
        world.step()
    world.count([0, 1, 3])
    ((after_s, finding),) = world.watch(HangDetector(hang_s=5.0, first_step_s=60.0), 20)
    assert finding.ranks == (2,) and after_s <= 6


def test_the_time_before_a_world_was_first_seen_does_not_count(world):
    hang = HangDetector(hang_s=5.0, heartbeat_timeout_s=1.0)
    for generation in (1, 2):
        world.change(range(4), generation=generation, phase="forward")
        assert not hang.observe(world.sampled())


def test_the_first_step_and_the_first_evaluation_may_compile(world, hang):
    fresh, fresh_world = HangDetector(hang_s=5.0), World(4)
    assert not fresh_world.watch(fresh, 300)
    world.change(range(4), phase="evaluate")
    assert not world.watch(hang, 300)
    world.change(range(4), phase="other")
    world.step()
    world.watch(hang, 1)
    world.change(range(4), phase="evaluate")
    assert world.watch(hang, 10)


def test_no_rank_is_blamed_while_a_world_is_formed(world, hang):
    world.change([0, 1, 2], phase="waiting")
    assert not world.watch(hang, 1000)
    world.change([0, 1, 2], phase="other", generation=2)
    assert not world.watch(hang, 1000)


def test_a_replaced_process_begins_anew(world, hang):
    world.stopped = {1}
    assert not world.watch(hang, 2.5)
    world.change(1, pid=999)
    assert not world.watch(hang, 2.5)


def test_one_rank_that_moves_is_enough(world, hang):
    for _ in range(40):
        world.count([0], "tp#1")
        assert not hang.observe(world.sampled())


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
        (Newcomer("T", 3, reading(generation=3)), LIMIT_S + COORDINATOR_FIRST_S),
        (Newcomer("S", 0, None), FIRST_STEP_S),
        (Newcomer("R", 3, reading()), MIN_AUTO_S),
        (Newcomer("R", 3, reading(generation=3)), MIN_AUTO_S + COORDINATOR_FIRST_S),
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
