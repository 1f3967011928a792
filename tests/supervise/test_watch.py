"""What agents show comes together, of the generation in force only; who has ended is not taken for one that hangs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.config.schema import ResilienceConfig
from argosy.observe.heartbeat import HeartbeatReading
from argosy.resilience.detect.finding import WorkerSeen
from argosy.supervise.watch import RunWatch
from resilience.detect.samples import World

TICK_S = 0.5


@pytest.fixture
def watch() -> RunWatch:
    return RunWatch(ResilienceConfig(heartbeat_timeout_s=3.0, hang_s=5.0))


def shown(*readings: HeartbeatReading) -> list[WorkerSeen]:
    return [WorkerSeen(reading, "S") for reading in readings]


def test_a_process_that_hangs_on_one_of_two_nodes_is_found(watch):
    world = World(4, tick_s=TICK_S)
    found = []
    for tick in range(20):
        if tick == 8:
            world.stopped = {3}
        world.sample()
        assert watch.shown(1, "a", shown(world.ranks[0], world.ranks[1])) == (0, -1)
        watch.shown(1, "b", shown(world.ranks[2], world.ranks[3]))
        found += watch.findings(world.at_s, 4)
    assert [(finding.kind, finding.ranks) for finding in found] == [("frozen", (3,))]


def test_a_node_that_is_cut_off_does_not_make_its_ranks_look_hung(watch):
    """Nothing is heard of one of two nodes: whether it comes back is for the coordinator to wait for."""
    world = World(2, tick_s=TICK_S)
    for tick in range(40):
        world.sample()
        watch.shown(1, "a", shown(world.ranks[0]))
        if not 8 <= tick < 32:
            watch.shown(1, "b", shown(world.ranks[1]))
        assert not watch.findings(world.at_s, 2)


def test_a_spare_node_that_is_gone_does_not_stop_detection(watch):
    world = World(1, tick_s=TICK_S)
    found = []
    watch.shown(1, "spare", [])
    for tick in range(20):
        world.stopped = {0} if tick > 8 else set()
        world.sample()
        watch.shown(1, "a", shown(world.ranks[0]))
        found += watch.findings(world.at_s, 1)
    assert [finding.kind for finding in found] == ["frozen"]


def test_ranks_of_an_older_generation_and_incomplete_worlds_are_not_judged(watch):
    world = World(2, tick_s=TICK_S)
    world.stopped = {0, 1}
    for _ in range(20):
        world.sample()
        watch.shown(2, "a", shown(world.ranks[0], replace(world.ranks[1], generation=2)))
        assert not watch.findings(world.at_s, 2)


def test_a_worker_that_has_ended_is_not_found_to_hang(watch):
    world = World(2, tick_s=TICK_S)
    for tick in range(40):
        world.sample()
        watch.shown(1, "a", shown(*([world.ranks[0], world.ranks[1]] if tick < 10 else [world.ranks[0]])))
        assert not watch.findings(world.at_s, 2)


def test_the_furthest_step_and_the_newest_to_go_back_to_are_told(watch):
    world = World(2)
    world.change(1, step=7)
    world.change(0, safe_step=4)
    assert watch.shown(1, "a", shown(*world.ranks.values())) == (7, 4)
    assert watch.shown(5, "a", shown(*world.ranks.values())) == (-1, -1)
