"""A run whose coordinator's place is a lease: whichever machine is lost, the run goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store
from commands import Folder
from etcd import WHERE_FROM, Etcd, etcd, is_installed
from kubernetes_api import kubernetes_api
from matrix import PLANS, STEADY, Disturbed
from nodes import Nodes

TAKEN_OVER_S = 15.0
"""Another machine's coordinator has taken over within this time."""
BUSY_S = 15.0
"""And this is added where other things run beside the tests."""
SLOW = "slow@forward:seconds=0.4"  # a step
needs_etcd = pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)


class Cluster(Nodes):
    """A run of two workers, one on each node; a third node is a spare."""

    def begin(self, names: str) -> None:
        self.start(*names)
        self.run.wait_until(lambda: all(self.came(name) for name in names))

    def started_by(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.run.events("coordinator_started") if e["by"] == f"launcher-{name}"]

    def came(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.run.events("agent_came") if e["node"] == name]

    def wait_for_takeover(self, by: str, since_s: float) -> float:
        """Until another's coordinator is reached by an agent. Returns how many seconds that took."""

        def taken_over() -> list[dict[str, Any]]:
            events = [e for name in by for e in self.started_by(name) if e["time_s"] > since_s]
            return events and [e for e in self.run.events("agent_came") if e["time_s"] > events[0]["time_s"]]

        self.run.wait_until(taken_over)
        return taken_over()[0]["time_s"] - since_s


Start = Callable[..., Cluster]


@pytest.fixture
def cluster(folder: Folder) -> Iterator[Start]:
    begun: list[Cluster] = []

    def start(lease: str, names: str, *options: str) -> Cluster:
        run = Disturbed(folder, PLANS["replicas"], SLOW)
        run.options = ("--launch.nodes", "2", "--launch.processes", "1", "--resilience.wait_for_nodes_s", "1",
                       "--launch.lease", lease, "--launch.address", "127.0.0.1", *options)  # fmt: skip
        begun.append(Cluster(run))
        begun[-1].begin(names)
        return begun[-1]

    yield start
    for one in begun:
        one.kill()


@pytest.fixture
def three_etcds(tmp_path: Path) -> Iterator[Etcd]:
    with etcd(tmp_path) as running:
        yield running


def of_length(steps: int) -> tuple[str, ...]:
    return ("--train.steps", str(steps), *(STEADY if steps > 64 else ()))


@needs_etcd
def test_the_coordinator_s_machine_is_lost_and_a_spare_takes_its_worker_s_place(cluster, three_etcds, undisturbed):
    nodes = cluster(three_etcds.url, "abc")
    run = nodes.run.wait_for_step(6)
    nodes.watch("b")
    lost_s = nodes.lose("a")
    took_s = nodes.wait_for_takeover("bc", lost_s)
    print(f"taken over after {took_s:.1f} s")
    nodes.end()
    assert took_s < TAKEN_OVER_S + BUSY_S
    assert nodes.sizes() == [2, 2] and {e["source"] for e in run.events("recovered")} == {"live"}
    run.check(undisturbed(PLANS["replicas"]), "coordinator_lost")


@pytest.mark.slow
@pytest.mark.parametrize("lease", ["folder", "kubernetes"])
def test_the_same_without_etcd(cluster, undisturbed, lease, tmp_path, monkeypatch):
    with kubernetes_api(tmp_path) as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
        nodes = cluster("folder" if lease == "folder" else "kubernetes://training/run", "abc", *of_length(60))
        run = nodes.run.wait_for_step(6)
        (survivor,) = {place.partition("/")[0] for place in run.events("generation")[0]["ranks"]} - {"a"}
        nodes.watch(survivor)
        lost_s = nodes.lose("a")
        took_s = nodes.wait_for_takeover("bc", lost_s)
        nodes.end()
    print(f"taken over after {took_s:.1f} s")
    assert took_s < TAKEN_OVER_S + BUSY_S
    assert nodes.sizes() == [2, 2] and {e["source"] for e in run.events("recovered")} == {"live"}
    assert run.text.count(f"argosy: {survivor}: the coordinator is lost: ") == 1
    run.check(undisturbed(PLANS["replicas"], *of_length(60)), "coordinator_lost")


@needs_etcd
@pytest.mark.slow
def test_the_run_shrinks_where_there_is_no_spare(cluster, three_etcds, undisturbed):
    nodes = cluster(three_etcds.url, "ab", *of_length(60))
    run = nodes.run.wait_for_step(6)
    nodes.watch("b")
    lost_s = nodes.lose("a")
    took_s = nodes.wait_for_takeover("b", lost_s)
    print(f"taken over after {took_s:.1f} s")
    nodes.end()
    assert took_s < TAKEN_OVER_S + BUSY_S
    assert nodes.sizes() == [2, 1] and {e["source"] for e in run.events("recovered")} == {"live"}
    plans = (PLANS["replicas"], "dp_replicate=1,microbatch=2")
    run.check([undisturbed(plan, *of_length(60)) for plan in plans], "coordinator_lost")


@needs_etcd
@pytest.mark.slow
def test_a_machine_that_was_only_frozen_begins_nothing_and_commits_nothing(cluster, three_etcds, undisturbed):
    """It is stopped with its coordinator and worker, and goes on when others have taken over."""
    length = of_length(120)
    nodes = cluster(three_etcds.url, "abc", *length)
    run = nodes.run.wait_for_step(6)
    nodes.watch("b")
    stopped_s = time.time()
    frozen = nodes.machine("a")
    nodes.send("a", signal.SIGSTOP)
    took_s = nodes.wait_for_takeover("bc", stopped_s)
    print(f"taken over after {took_s:.1f} s")
    run.wait_until(lambda: nodes.sizes() == [2, 2])
    run.wait_for_step(run.steps() + 4)
    thawed_s = time.time()
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    run.wait_until(lambda: [e for e in nodes.came("a") if e["time_s"] > thawed_s])
    nodes.end()
    assert took_s < TAKEN_OVER_S + BUSY_S
    assert nodes.sizes() == [2, 2] and len(nodes.started_by("a")) == 1
    assert [e["time_s"] > thawed_s for e in run.events("lease_lost")] == [True]
    assert {c.manifest.generation for c in store.committed(run.run_dir) if c.manifest.saved_at_s > stopped_s} == {2}
    assert {e["source"] for e in run.events("recovered")} == {"live"}
    run.check(undisturbed(PLANS["replicas"], *length), "coordinator_lost")


@needs_etcd
@pytest.mark.slow
def test_without_etcd_training_goes_on_and_with_it_the_coordinator_comes_back(cluster, three_etcds, undisturbed):
    length = of_length(150)
    nodes = cluster(three_etcds.url, "ab", *length)
    run = nodes.run.wait_for_step(6)
    three_etcds.kill(0)
    run.wait_for_step(run.steps() + 40)  # twice as long as a lease
    assert not run.events("lease_lost") and not run.events("coordinator_lost"), "one of three is not missed"
    three_etcds.kill(1, 2)
    run.wait_until(lambda: run.events("lease_lost"))
    run.wait_for_step(run.steps() + 30)
    assert len(run.events("coordinator_started")) == 1
    three_etcds.start(0, 1, 2)
    run.wait_until(lambda: len(run.events("coordinator_started")) == 2)
    run.wait_until(lambda: len(nodes.came("a")) == len(nodes.came("b")) == 2)
    nodes.end()
    assert nodes.sizes() == [2], "the world lived on"
    run.check(undisturbed(PLANS["replicas"], *length), "coordinator_lost")
