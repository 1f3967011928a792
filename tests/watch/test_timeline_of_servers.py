"""The timeline of an asynchronous run: what the death of a server cost."""

from __future__ import annotations

from typing import Any

from argosy.watch.timeline import condition, timeline


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


def test_what_has_become_of_it_is_what_its_first_server_says():
    done = event(200.0, "finish", exit_code=0, finished=True, why="all updates are made")
    stopped = event(140.0, "finish", exit_code=143, finished=False, why="it was asked to stop")
    assert condition([*DEATH, done], None, 200.0, 201.0, 1.0).state == "finished"
    assert condition([DEATH[0], stopped], None, 140.0, 201.0, 1.0).state == "stopped"
    assert condition([DEATH[0], stopped, *DEATH[4:]], None, 156.0, 157.0, 1.0).state == "training"
