"""Every second of a step belongs to one category."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from argosy.observe import clock as measured
from argosy.observe.clock import StepClock, matmul_peak_flops
from argosy.observe.collectives import CommunicationMeter
from argosy.observe.heartbeat import Heartbeat, read_heartbeat
from argosy.parallel.world import World


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


def test_a_block_within_another_is_that_one_s_time(clock):
    with clock.time("communication"), clock.time("optimizer"):
        time.sleep(0.01)
    seconds = clock.lap()
    assert seconds["communication"] > 0.009 and "optimizer" not in seconds
    assert sum(seconds.values()) == pytest.approx(2 * seconds["step"])


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


def own_work(world: World, axis: str, folder: Path) -> tuple[float, float, float]:
    """Own work, forward and what the heartbeat shows of a step in which rank 1 works longer before both meet."""
    group = dist.new_group()
    axes = {group.group_name: axis}
    with CommunicationMeter(axes, lambda rank: 0, world.device) as meter:
        heartbeat = Heartbeat(folder)
        clock = StepClock(world.device, heartbeat, meter)
        dist.barrier(group)
        clock.lap()
        heartbeat.begin(0)
        clock.microbatches = 3
        with clock.time("forward"):
            time.sleep(0.05 + 0.4 * world.rank)
            dist.all_reduce(torch.ones(4), group=group)
        seconds = clock.lap()
        shown = read_heartbeat(heartbeat.path)
        heartbeat.close()
    assert shown is not None and shown.microbatches == {0: 3}
    return clock.own_s["forward"], seconds["forward"], shown.busy_s[0]


def test_own_work_is_told_apart_from_waiting_for_others_within_it(workers, tmp_path):
    (fast_s, fast_step_s, shown_s), (slow_s, slow_step_s, _) = workers.run(2, own_work, "tp", tmp_path)
    assert fast_s < 0.25 and slow_s > 0.4 and shown_s == pytest.approx(fast_s)
    assert fast_step_s > 0.4 and slow_step_s > 0.4


def test_waits_for_the_tokens_of_experts_are_work(workers, tmp_path):
    (fast_s, _, _), _ = workers.run(2, own_work, "ep", tmp_path)
    assert fast_s > 0.4


CPU, SIZE = torch.device("cpu"), 1024


@pytest.fixture(autouse=True)
def _as_large_as_in_a_run(monkeypatch):
    monkeypatch.setitem(measured.SIZE, "cpu", SIZE)


def test_the_peak_is_the_best_of_several_since_a_busy_machine_makes_matmuls_slower(monkeypatch):
    timed = iter([0.03, 0.02, 0.01, *[0.04] * 100])
    sizes = []
    monkeypatch.setattr(measured, "seconds_of", lambda call, device: sizes.append(call().shape) or next(timed))
    assert matmul_peak_flops(CPU, torch.float32) == pytest.approx(2 * SIZE**3 / 0.01)
    assert sizes == [(SIZE, SIZE)] * measured.REPEATS


def test_a_number_format_without_fast_matmuls_is_not_measured_for_long(monkeypatch):
    calls = []
    monkeypatch.setattr(measured, "seconds_of", lambda call, device: calls.append(0) or 0.6)
    assert matmul_peak_flops(CPU, torch.float16) == pytest.approx(2 * SIZE**3 / 0.6)
    assert len(calls) == 2
