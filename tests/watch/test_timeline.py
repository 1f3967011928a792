"""A run by its events: its state, its phases, the cost of its faults, and its words."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from argosy.watch.timeline import SILENT_AFTER_S, STARTING_S, condition, in_words, timeline, words


def event(time_s: float, kind: str, process: str = "server-1", **facts: Any) -> dict[str, Any]:
    return {"time_s": time_s, "event": kind, "process": process, **facts}


DEATH = [
    event(100.0, "coordinator_started", replaces=False),
    event(102.0, "servers_begin", step=0, why="", lost=0, steps_lost=0),
    event(103.0, "worker_came", site="oslo", step=0),
    event(150.0, "server_died", "server-1-holder", why="signal SIGKILL"),
    event(154.0, "coordinator_started", replaces=True),
    event(155.0, "servers_begin", step=10, why="", lost=3, steps_lost=3),
]


def test_a_death_of_a_server_is_a_recovery_and_costs_what_is_made_again():
    found = timeline([*DEATH, event(200.0, "finish", exit_code=0, finished=True)], 200.0, step_s=2.0)
    assert [(stretch.phase, stretch.seconds) for stretch in found.stretches] == [
        ("startup", 2.0),
        ("training", 48.0),
        ("recovery", 5.0),
        ("training", 45.0),
    ]
    assert found.lost_s == 6.0
    assert found.costs_s == {3: 5.0 + 6.0}


def test_servers_that_go_back_while_all_live_cost_the_steps_that_are_made_again():
    found = timeline([*DEATH[:3], event(150.0, "servers_begin", step=10, why="", lost=3, steps_lost=3)], 160.0, 2.0)
    assert found.costs_s == {3: 6.0}
    assert found.seconds("training") == 58.0
    assert found.seconds("recovery") == 0.0


def test_each_world_has_its_own_price_and_goodput_leaves_pauses_out():
    rank = partial(event, process="rank-0", step=0, world_size=2)
    dear, foreign = {"price_per_device_h": 9.0, "currency": "EUR"}, {"price_per_device_h": 1.0, "currency": "USD"}
    starts = [dear, {**dear, "price_per_device_h": 18.0}, foreign, {}]
    begun = [(3600.0 * (1 + 2 * n), rank(3600.0 * (1 + 2 * n), "start", **price)) for n, price in enumerate(starts)]
    found = timeline([each for at_s, start in begun for each in (start, rank(at_s + 3600, "end"))], 4e4, None)
    assert (found.wall_s, found.running_s) == (7 * 3600.0, 4 * 3600.0)
    assert found.goodput(7200.0) == 0.5 and timeline([], 0.0, None).goodput(0.0) is None
    assert found.money((10.0, "EUR")) == 2 * (9.0 + 18.0 + 10.0 + 10.0)


def test_what_has_become_of_it_is_what_its_first_server_says():
    done = event(200.0, "finish", exit_code=0, finished=True, why="all updates are made")
    stopped = event(140.0, "finish", exit_code=143, finished=False, why="it was asked to stop")
    assert condition([*DEATH, done], None, 200.0, 201.0, 1.0).state == "finished"
    assert condition([DEATH[0], stopped], None, 140.0, 201.0, 1.0).state == "stopped"
    assert condition([DEATH[0], stopped, *DEATH[4:]], None, 156.0, 157.0, 1.0).state == "training"


def of(process: str, time_s: float, kind: str, **facts: Any) -> dict[str, Any]:
    return event(time_s, kind, process, **facts)


BEGUN = [
    of("coordinator", 10.0, "coordinator_started", replaces=False),
    of("coordinator", 12.0, "generation", size=4),
    of("rank-0", 20.0, "start", step=0),
]
SAVED = of("rank-0", 60.0, "end", finished=False)


@pytest.mark.parametrize(
    "more, alive_s, state, why",
    [
        ([], 50.0, "training", ""),
        ([of("rank-0", 60.0, "end", finished=True)], 60.0, "finished", ""),
        ([SAVED], 60.0, "stopped", "a signal stopped it; its state is saved"),
        ([SAVED | {"paused_at": 40}], 60.0, "stopped", "paused at step 40, as train.pause_at says; its state is saved"),
        ([of("coordinator", 60.0, "finish", exit_code=1, why="no memory")], 60.0, "failed", "no memory"),
        ([SAVED, of("coordinator", 70.0, "coordinator_started", replaces=False)], 80.0, "training", ""),
    ],
)
def test_the_state_is_that_of_the_newest_beginning_or_end(more, alive_s, state, why):
    found = condition([*BEGUN, *more], None, alive_s, alive_s + 1, 1.0)
    assert (found.state, found.why) == (state, why)


@pytest.mark.parametrize("step_s, allowed_s", [(None, STARTING_S), (1.0, STARTING_S), (100.0, 20 * 100.0)])
def test_a_run_is_silent_only_after_what_its_start_or_its_steps_may_take(step_s, allowed_s):
    def state(quiet_s: float) -> str:
        return condition(BEGUN, None, 20.0, 20.0 + quiet_s, step_s).state

    assert (state(allowed_s - 1), state(allowed_s + 1)) == ("training", "silent")
    long_since = condition(BEGUN, None, 20.0 + STARTING_S, 21.0 + STARTING_S + SILENT_AFTER_S, 1.0)
    assert long_since.state == "silent" and long_since.why.startswith("no sign of life for 2 min")


def test_a_run_whose_processes_are_gone_is_dead_or_was_stopped_by_a_signal_that_it_told_of():
    assert condition(BEGUN, None, 50.0, 51.0, 1.0, lambda: True).state == "dead"
    asked = of("coordinator", 50.0, "signal", number=15)
    stopped = condition([*BEGUN, asked], None, 50.0, 51.0, 1.0, lambda: True)
    assert (stopped.state, stopped.why) == ("stopped", "SIGTERM stopped it before its state was saved")


def test_a_break_costs_its_standstill_and_the_steps_that_are_made_again():
    died = of("launcher-a", 99.0, "worker_died", rank=1)
    events = [*BEGUN, died, of("coordinator", 100.0, "break"), of("rank-0", 108.0, "recovered", steps_lost=2, step=38)]
    found = timeline([*events, of("rank-0", 110.0, "start", step=38)], 150.0, step_s=1.5)
    phases = [(stretch.phase, stretch.seconds) for stretch in found.stretches]
    assert phases == [("startup", 10.0), ("training", 80.0), ("recovery", 10.0), ("training", 40.0)]
    assert found.lost_s == 3.0 and found.costs_s == {4: 10.0 + 3.0} and found.causes == {4: 3}
    assert found.device_hours == pytest.approx((10 * 1 + 2 * 0 + 130 * 4) / 3600, rel=0.1)


def test_a_run_that_goes_back_by_itself_makes_steps_again():
    back = of("rank-0", 90.0, "rewind", step=48, to_step=40)
    forth = [of("exchange", 95.0, "state_taken", rounds=3), of("rank-0", 96.0, "left_out", step=48, to_step=60)]
    found = timeline([*BEGUN, back, *forth], 150.0, step_s=1.5)
    assert found.lost_s == found.costs_s[3] == 8 * 1.5
    left_out = of("rank-0", 90.0, "left_out", step=48, to_step=44)
    assert timeline([*BEGUN, left_out], 150.0, step_s=1.5).lost_s == 4 * 1.5
    assert in_words(back) == ("went back from step 48 to 40", "yellow")


def test_a_run_that_could_not_say_that_it_ended_ended_with_its_last_sign_of_life():
    settled, start = of("launcher", 499.0, "settled", seconds=2.0), of("rank-0", 510.0, "start", step=5)
    again = [settled, of("coordinator", 500.0, "coordinator_started", replaces=False), start]
    found = timeline([*BEGUN, *again], 520.0, 1.0, np.array([30.0, 31.0, 512.0]))
    phases = [(stretch.phase, stretch.seconds) for stretch in found.stretches]
    assert phases == [("startup", 10.0), ("training", 11.0), ("stopped", 469.0), ("startup", 10.0), ("training", 10.0)]


def test_a_killed_run_of_torchrun_which_has_no_coordinator_ended_with_its_last_sign_of_life():
    rank = partial(of, "rank-0")
    again = [rank(500.0, "resume", step=5), rank(501.0, "recovered", steps_lost=0), rank(502.0, "start", step=5)]
    found = timeline([rank(20.0, "start", step=0, world_size=2), *again], 520.0, 1.0, np.array([30.0, 31.0, 512.0]))
    phases = [(stretch.phase, stretch.seconds) for stretch in found.stretches if stretch.seconds]
    assert phases == [("training", 11.0), ("stopped", 471.0), ("training", 18.0)]


def test_an_event_that_says_less_than_it_should_has_no_words_for_a_person():
    assert in_words(of("rank-0", 1.0, "save", step=100)) == ("saved after 100 steps", "green")
    assert in_words(of("rank-0", 1.0, "save", step=1)) == ("saved after 1 step", "green")
    assert in_words(of("rank-0", 1.0, "save")) is None
    assert in_words(of("rank-0", 1.0, "something_else")) is None
    assert in_words(of("rank-0", 1.0, "new_finding", action="alarm", why="it is hot")) == ("it is hot", "yellow")


def test_a_line_about_an_event_has_its_place_and_what_explains_it():
    told = of("rank-3", 1.0, "worker_died", rank=3, step=7, node="a", why="signal SIGKILL", seconds=0.25)
    assert words(told) == "worker died rank 3 step 7 a: signal SIGKILL, 0.25 s"
    assert len(words(told | {"why": "x" * 1000})) == 200
