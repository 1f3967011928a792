"""A run on the nodes of a real cluster of Ray."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store
from commands import Folder
from matrix import PLANS, Disturbed
from pages import try_all
from ray_cluster import WHERE_FROM, Cluster, cluster, is_installed
from waiting import wait_until

pytestmark = pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)
SLOW = "slow@forward:seconds=0.2"


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with cluster("n1", "n2") as started:
        yield started


@pytest.fixture
def run(folder: Folder, running: Cluster) -> Iterator[Disturbed]:
    """A run to launch. It is stopped at the end."""
    prepared = Disturbed(folder, PLANS["replicas"])
    prepared.write()
    yield prepared
    if (prepared.run_dir / "launch/job.json").exists():
        folder.argosy("stop", "runs/tiny")
        wait_for(prepared, "stopped", "finished", "failed", "ended")


def launch(run: Disturbed, running: Cluster, *options: str, nodes: int = 2, code: int = 0) -> str:
    words = ("launch", "run.toml", "--on", "ray", "--nodes", nodes, "--cpus-per-node", 1)
    return run.folder.argosy(*words, "--address", running.dashboard, *options, code=code)


def state(run: Disturbed) -> dict[str, Any]:
    (found,) = run.folder.documents("runs", here=False)
    return found


def wait_for(run: Disturbed, *states: str, seconds: float = 120) -> dict[str, Any]:
    wait_until(lambda: state(run)["state"] in states, seconds, story=lambda: (state(run), log(run)))
    return state(run)


def wait_for_step(run: Disturbed, step: int, seconds: float = 120) -> None:
    wait_until(lambda: run.steps() > step, seconds, story=lambda: log(run))


def log(run: Disturbed) -> str:
    return run.folder.argosy("logs", "runs/tiny")


def agents(run: Disturbed) -> dict[str, int]:
    """Return the node and the process of each agent."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode(errors="replace").split("\0") if path.exists() else []
        if "train" in words and str(run.run_dir) in words and "--launch.node" in words and "argosy" in words:
            found[words[words.index("--launch.node") + 1]] = int(path.parent.name)
    return found


def test_a_run_is_launched_followed_stopped_and_launched_again(run, running, undisturbed, monkeypatch):
    monkeypatch.setenv("ARGOSY_FAULTS", SLOW)
    assert "launched tiny on ray: job argosy-tiny-" in launch(run, running, "--train.steps", "30")
    refused = launch(run, running, code=2)
    assert re.search(r"its job argosy-tiny-\w+ on ray is (waiting|running)", refused) and "argosy stop" in refused
    wait_for_step(run, 4)
    assert state(run)["state"] == "training" and state(run)["engine"] == "ray"
    (world,) = run.events("generation")
    assert set(world["ranks"]) == {"n1/0", "n2/0"}
    run.folder.argosy("stop", "runs/tiny")
    wait_for(run, "stopped")
    assert store.committed(run.run_dir)[-1].step == run.steps() < 30
    monkeypatch.setenv("ARGOSY_FAULTS", "")
    launch(run, running, "--train.steps", "30")
    assert "done: 30 steps" in run.folder.argosy("logs", "runs/tiny", "-f")
    found = wait_for(run, "finished")
    assert found["step"] == 30 and "the run is finished: the job ends with 0" in log(run)
    run.check(undisturbed(PLANS["replicas"], "--train.steps", "30"))


@pytest.mark.slow
def test_an_agent_whose_node_is_lost_goes_on_elsewhere(run, running, undisturbed, monkeypatch):
    monkeypatch.setenv("ARGOSY_FAULTS", SLOW)
    running.add("n3", cpus=1)
    launch(run, running, "--train.steps", "120", "--resilience.wait_for_nodes_s", "200")
    wait_for_step(run, 3)
    lost = next(name for name in agents(run) if name != "n1")  # without the head there is no cluster
    running.lose(lost)
    after = "n3" if lost == "n2" else "n2"
    try:
        wait_for(run, "finished", seconds=240)
        assert set(run.events("generation")[-1]["ranks"]) == {"n1/0", f"{after}/0"}, log(run)
        # The launcher learns where agents run after they have begun: of one that was quickly lost it has no name.
        assert re.search(f"({lost}|a node) is lost", log(run)) and f"an agent runs on {after}" in log(run)
        told = {event["event"] for event in run.events("coordinator_lost")}  # it may have been on that node
        run.check(undisturbed(PLANS["replicas"], "--train.steps", "120"), *told)
    finally:
        running.add(lost)


@pytest.mark.slow
def test_without_room_elsewhere_the_run_goes_on_smaller_and_grows_when_a_node_comes(run, running, monkeypatch):
    monkeypatch.setenv("ARGOSY_FAULTS", SLOW)
    for name in list(running.nodes)[2:]:
        running.lose(name)
    lost = next(name for name in running.nodes if name != "n1")
    launch(run, running, "--train.steps", "300", "--resilience.wait_for_nodes_s", "3")
    wait_for_step(run, 3)
    running.lose(lost)
    end = time.monotonic() + 90
    while len(run.events("generation")) < 2:
        assert time.monotonic() < end, log(run)
        time.sleep(0.5)
    assert run.events("generation")[-1]["size"] == 1
    wait_for_step(run, run.steps() + 5)
    running.add("n9")
    end = time.monotonic() + 90
    while run.events("generation")[-1]["size"] == 1:
        assert time.monotonic() < end, log(run)
        time.sleep(0.5)
    assert set(run.events("generation")[-1]["ranks"]) == {"n1/0", "n9/0"}


@pytest.mark.slow
def test_an_agent_is_started_again_that_is_killed_or_whose_actor_is(run, running, undisturbed, monkeypatch):
    monkeypatch.setenv("ARGOSY_FAULTS", SLOW)
    launch(run, running, "--train.steps", "120", "--resilience.wait_for_nodes_s", "100")
    wait_for_step(run, 3)
    before = agents(run)
    os.kill(next(iter(before.values())), signal.SIGKILL)
    wait_for_step(run, run.steps() + 5)
    second = agents(run)
    assert second.keys() == before.keys() and second != before
    pid = next(iter(second.values()))
    actor = int(re.search(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
    os.kill(actor, signal.SIGKILL)
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the agent lives on without its actor"
        time.sleep(0.05)
    wait_for(run, "finished")
    run.check(undisturbed(PLANS["replicas"], "--train.steps", "120"))


@pytest.mark.slow
def test_the_command_of_a_dry_run_submits_the_same_job_by_hand(run, running):
    words = ("launch", "run.toml", "--on", "ray", "--nodes", 2, "--cpus-per-node", 1, "--address", running.dashboard)
    command = run.folder.argosy(*words, "--dry-run")
    assert not run.run_dir.exists()
    end = time.monotonic() + 60
    while subprocess.run(shlex.split(command), check=False, cwd=run.folder.path, capture_output=True).returncode:
        assert time.monotonic() < end  # a cluster that has just started takes no jobs yet
    wait_for_step(run, 1)
    found = wait_for(run, "finished")
    assert found["engine"] == "ray" and found["job"].startswith("raysubmit_") and found["step"] == 24
    assert "done: 24 steps" in log(run)


@pytest.mark.slow
def test_the_commands_of_the_page_work(run, running):
    """The job by hand is what the test before this one gives."""
    here = {"--nodes 4": "--nodes 2", "--gpus-per-node 8": "--cpus-per-node 1", "http://head:8265": running.dashboard}
    try_all("ray.md", run.folder, here, ("--train.steps", "6"), untried=("ray",))
    assert wait_for(run, "finished")["step"] == 6


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_said(run, running):
    launch(run, running, "--resilience.coordinator_timeout_s", "30", "--cpus-per-node", "64")
    end = time.monotonic() + 60
    while "it has 0 of 2 nodes with 64 CPUs" not in state(run)["why"]:
        assert time.monotonic() < end, state(run)
    assert state(run)["state"] == "waiting"
    wait_for(run, "ended")
    said = log(run)
    assert "the cluster of Ray is too small" in said and "n1: 2 CPUs" in said and "--cpus-per-node" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_what_fails_again_is_not_started_again(run, running):
    launch(run, running, "--data.sources", "no-such-folder", "1")
    found = wait_for(run, "ended", "failed")
    assert log(run).count("no-such-folder") and "started again" not in log(run), found
