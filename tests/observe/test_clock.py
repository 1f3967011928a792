"""Every second of a step belongs to one category."""

from __future__ import annotations

import time

import pytest
import torch

from argosy.observe.clock import StepClock
from argosy.observe.heartbeat import Heartbeat, read_heartbeat


@pytest.fixture
def clock() -> StepClock:
    return StepClock(torch.device("cpu"))


def test_the_categories_and_the_rest_add_up_to_the_wall_time(clock):
    began = time.perf_counter()
    clock.lap()
    for category in ("data", "forward", "backward", "forward"):
        with clock.time(category):
            time.sleep(0.01)
    time.sleep(0.02)
    seconds = clock.lap()
    step_s = seconds.pop("step")
    assert sum(seconds.values()) == pytest.approx(step_s)
    assert 0.06 < step_s <= time.perf_counter() - began
    assert set(seconds) == {"data", "forward", "backward", "other"}
    assert seconds["other"] > 0.019


def test_blocks_of_a_category_add_up(clock):
    for _ in range(3):
        with clock.time("forward"):
            time.sleep(0.01)
    assert clock.lap()["forward"] > 0.029


def test_a_lap_begins_anew(clock):
    with clock.time("data"):
        time.sleep(0.3)
    clock.lap()
    assert clock.lap()["step"] < 0.2
    assert "data" not in clock.lap()


def test_a_block_that_fails_is_counted_too(clock):
    with pytest.raises(KeyError), clock.time("checkpoint"):
        time.sleep(0.01)
        raise KeyError
    assert clock.lap()["checkpoint"] > 0.009


def test_the_heartbeat_shows_the_part_and_how_long_own_work_took(tmp_path):
    heartbeat = Heartbeat(tmp_path)
    clock = StepClock(torch.device("cpu"), heartbeat)
    heartbeat.begin(3)
    for category in ("data", "forward", "communication"):
        with clock.time(category):
            time.sleep(0.02)
            assert read_heartbeat(heartbeat.path).phase == category
        assert read_heartbeat(heartbeat.path).phase == "other"
    seconds = clock.lap()
    assert read_heartbeat(heartbeat.path).busy_s == {3: pytest.approx(seconds["data"] + seconds["forward"])}
    heartbeat.close()
