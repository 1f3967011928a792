"""A run on several nodes is stopped by a signal while one of them has no part in it, or is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from argosy.checkpoint import store
from commands import Folder
from matrix import PLANS, Disturbed
from nodes import Nodes
from ports import free_port
from waiting import PATIENT_S

STOPPED = 128 + signal.SIGTERM


@pytest.fixture
def nodes(folder: Folder, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """The first one has the coordinator; with the parameter "lease", until it is lost."""
    run = Disturbed(folder, PLANS["replicas"], "slow@forward:seconds=0.2", ("--train.steps", "200"))
    leased = ("--launch.lease", "folder", "--launch.address", "127.0.0.1")
    fixed = ("--launch.coordinator", f"127.0.0.1:{free_port()}")
    run.options += leased if getattr(request, "param", "") == "lease" else fixed
    run.options += ("--launch.nodes", "2", "--launch.processes", "1", "--resilience.wait_for_nodes_s", "300")
    nodes = Nodes(run)
    yield nodes
    nodes.kill()


def stop(nodes: Nodes) -> list[int]:
    """Send SIGTERM to the command of each node. Returns their exit codes."""
    for process in nodes.processes.values():
        process.send_signal(signal.SIGTERM)
    for process in nodes.processes.values():
        out, err = process.communicate(timeout=PATIENT_S)
        nodes.run.text += out + err
    return [process.returncode for process in nodes.processes.values()]


@pytest.mark.slow
def test_a_spare_node_keeps_nobody_from_saving(nodes):
    nodes.start(*"abc")
    run = nodes.run.wait_for_step(4)
    run.wait_until(lambda: len(run.events("agent_came")) == 3)
    assert stop(nodes) == [STOPPED] * 3, run.text
    assert store.committed(run.run_dir)[-1].step == run.steps()


@pytest.mark.slow
def test_survivors_that_wait_for_a_lost_node_save_what_they_have(nodes):
    nodes.start(*"ab")
    run = nodes.run.wait_for_step(4)
    nodes.lose("b")
    run.wait_until(lambda: run.events("break"))
    made = run.steps()
    assert stop(nodes) == [STOPPED], run.text
    assert store.committed(run.run_dir)[-1].step >= made
    assert "argosy: node b is lost: " in run.text and "another is waited for, 300 s at most" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["lease"], indirect=True)
@pytest.mark.parametrize("is_taken_over", [True, False])
def test_survivors_save_what_they_have_if_the_coordinator_is_lost_too(nodes, is_taken_over):
    """Before and after one of them has started another, which waits for the lost node: that stands still, and no
    connection to it breaks, as if it had no power."""
    nodes.start(*"ab")
    run = nodes.run.wait_for_step(4)
    nodes.watch("b")
    nodes.send("a", signal.SIGSTOP)
    if is_taken_over:
        run.wait_until(lambda: len(run.events("agent_came")) == 3)
    made, lost = run.steps(), nodes.processes.pop("a")
    try:
        assert stop(nodes) == [STOPPED], run.text
    finally:
        nodes.processes["a"] = lost
    assert store.committed(run.run_dir)[-1].step >= made


@pytest.mark.slow
def test_a_spare_node_that_is_stopped_leaves_the_run_whole(nodes):
    """Who is lost later is replaced, as ever."""
    nodes.start(*"abc")
    run = nodes.run.wait_for_step(4)
    run.wait_until(lambda: len(run.events("agent_came")) == 3)
    places = {place.partition("/")[0]: rank for place, rank in run.events("generation")[0]["ranks"].items()}
    (spare,) = nodes.processes.keys() - places.keys()
    nodes.processes[spare].send_signal(signal.SIGTERM)
    nodes.processes[spare].communicate(timeout=PATIENT_S)
    assert nodes.processes.pop(spare).returncode == STOPPED
    nodes.watch(min(places))
    started = {(e["by"], e["slot"]): e["pid"] for e in run.events("worker_started")}
    os.kill(started[f"launcher-{max(places)}", 0], signal.SIGKILL)
    run.wait_until(lambda: nodes.sizes() == [2, 2])
    run.wait_for_step(run.steps() + 2)
    assert stop(nodes) == [STOPPED] * 2, run.text
    assert store.committed(run.run_dir)[-1].step == run.steps()


@pytest.mark.slow
def test_a_node_that_is_stopped_before_the_first_step_may_come_again(nodes):
    nodes.run.options += ("--resilience.node_check_s", "3")
    nodes.start(*"ab")
    run = nodes.run
    run.wait_until(lambda: len(run.events("agent_came")) == 2)
    nodes.processes["b"].send_signal(signal.SIGTERM)
    nodes.processes["b"].communicate(timeout=PATIENT_S)
    assert nodes.processes.pop("b").returncode == STOPPED and not nodes.sizes()
    nodes.start("b")
    run.wait_for_step(2)
    assert stop(nodes) == [STOPPED] * 2, run.text
