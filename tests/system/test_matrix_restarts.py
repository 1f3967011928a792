"""The matrix of faults: worlds that are formed again and again, or cannot be."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator

import pytest

from argosy.checkpoint import store
from matrix import PATIENCE, PLANS, STEADY
from ports import free_port
from waiting import PATIENT_S

RESTARTS = 50


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which somebody listens who never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["replicas", "sharded"])
def test_fifty_restarts_of_fifty_are_clean(disturbed, undisturbed, plan):
    """Each world has a new store, so that none of them meets the addresses of the dead."""
    length, chance = ("--train.steps", "300", *STEADY), random.Random(7)
    run = disturbed(PLANS[plan], "slow@forward:seconds=0.02", *length, "--launch.max_restarts", str(RESTARTS))
    run.wait_for_step(4)  # there is something to go back to
    for number in range(RESTARTS):
        run.wait_for_step(run.steps() + 1)
        run.send(chance.randrange(2), signal.SIGKILL)
        run.wait_until(lambda n=number: len(run.events("recovered")) == n + 1)
    run.end(timeout_s=300)
    assert len(run.events("generation")) == RESTARTS + 1 == len(run.events("worker_died")) + 1
    run.check(undisturbed(PLANS[plan], *length), "worker_died")


@pytest.mark.slow
def test_a_peer_that_does_not_come_into_the_world_is_named_and_replaced(disturbed, undisturbed):
    run = disturbed(PLANS["replicas"], "stop@join:rank=1,generation=1", *PATIENCE).end()
    (found,) = run.events("stopped")
    assert found["ranks"] == [1] and "rank 1" in found["why"]
    run.check(undisturbed(), "stopped", "worker_died")


@pytest.mark.slow
def test_a_worker_that_is_stopped_before_its_first_world_is_replaced(disturbed, undisturbed):
    """No detector sees a world before all of its ranks have shown themselves: its agent does."""
    run = disturbed(PLANS["replicas"], "", *PATIENCE)
    run.wait_until(lambda: len(run.events("worker_started")) == 2)
    stopped = run.events("worker_started")[1]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    run.end(timeout_s=120)  # launch.timeout_s, after which the others give up, is 600
    (killed,) = run.events("killed")
    assert killed["pid"] == stopped and "it was stopped while it" in killed["why"]
    run.check(undisturbed(), "worker_died")


@pytest.mark.slow
def test_a_node_that_does_not_come_is_waited_for_so_long_and_who_came_is_named(disturbed):
    nodes = ("--launch.nodes", "2", "--launch.processes", "1", "--launch.node", "a")
    there = ("--launch.coordinator", f"127.0.0.1:{free_port()}", "--resilience.coordinator_timeout_s", "3")
    run = disturbed(PLANS["replicas"], "", *nodes, *there).end(code=75)
    assert "1 of 2 workers came within 3 s, from a (1 workers)" in run.text
    run.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("who", ["nobody", "a stranger"])
def test_a_coordinator_that_cannot_be_reached_is_waited_for_so_long_and_named(disturbed, taken_port, who):
    address = "192.0.2.1:29400" if who == "nobody" else f"127.0.0.1:{taken_port}"  # RFC 5737: that is no machine's
    nodes = ("--launch.nodes", "2", "--launch.processes", "1", "--launch.node", "b")
    there = ("--launch.coordinator", address, "--resilience.coordinator_timeout_s", "3")
    run = disturbed(PLANS["replicas"], "", *nodes, *there).end(code=75)
    assert f"the coordinator at {address} could not be reached" in run.text, run.text
    run.check_nothing_is_left()


@pytest.mark.slow
def test_a_run_that_calls_the_coordinator_of_another_is_sent_away(disturbed, undisturbed, tmp_path):
    there = ("--launch.processes", "1", "--launch.nodes", "2", "--launch.coordinator", f"127.0.0.1:{free_port()}")
    run = disturbed(PLANS["replicas"], "", *there, "--launch.node", "a")
    run.wait_until(lambda: run.events("agent_came"))
    stray = run.launch("--launch.node", "b", "--run-dir", str(tmp_path / "elsewhere"))
    _, err = stray.communicate(timeout=PATIENT_S)
    assert stray.returncode == 2 and "a port of its own" in err, err
    b = run.launch("--launch.node", "b")
    run.end().check(undisturbed())
    assert b.wait(60) == 0


@pytest.mark.slow
def test_the_same_command_at_the_same_port_goes_on_right_after_it_was_killed(disturbed, undisturbed):
    """What the killed one left, its coordinator and its generation, is stale."""
    run = disturbed(PLANS["replicas"], "", "--launch.port", str(free_port())).wait_for_step(7)
    assert run.process is not None
    run.process.kill()
    run.process.communicate()
    run.start().end().check(undisturbed())
    assert [e["generation"] for e in run.events("generation")] == [1, 2]


@pytest.mark.slow
def test_a_writer_that_wakes_after_its_worker_was_replaced_writes_nothing(disturbed, undisturbed):
    run = disturbed(PLANS["replicas"], "stop@save:step=10,rank=0,fraction=0.5; slow@forward:seconds=0.1")
    run.wait_until(lambda: run.struck("stop@"))
    (stopped,) = run.struck("stop@")
    run.send(0, signal.SIGKILL)
    run.wait_until(lambda: run.events("recovered"))
    os.kill(stopped["pid"], signal.SIGCONT)
    run.end()
    generations = {checkpoint.manifest.generation for checkpoint in store.committed(run.run_dir)}
    assert generations == {2}, generations
    run.check(undisturbed(), "worker_died")
