"""The matrix of faults, its network: nodes in network namespaces of their own, whose links are cut.

The side that the coordinator is on goes on; the other waits, writes nothing, and comes back or ends. These rows need
root, for the namespaces, and are left out where it is not to be had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store
from commands import Folder
from matrix import Disturbed, plan_text
from network import Network, NotPermitted, network

pytestmark = pytest.mark.slow

PORT = 29400  # of a namespace that nobody else is in
BATCH = 12  # that one, two and three replicas share out
PATIENCE_S = 40
"""For a coordinator that is out of reach, and at the start for nodes that are slower than others."""
LONG_S = 300
"""For what takes seconds on a machine that has nothing else to do."""
SLOW = "slow@batch:seconds=0.4"  # a step


def of_length(steps: int) -> tuple[str, ...]:
    return ("--train.global_batch", str(BATCH), "--train.steps", str(steps))


def replicas(count: int) -> str:
    return f"dp_replicate={count},microbatch=2"


def plans_of(run: Disturbed) -> list[str]:
    """Those that it had, one after the other."""
    return [e["plan"].removesuffix(plan_text("")) for e in run.events("generation")]


@dataclass
class Cluster:
    """A run on several nodes of one process each, with one folder."""

    net: Network
    nodes: dict[str, Disturbed] = field(default_factory=dict)
    host: str = ""
    """The node where the coordinator is."""

    @property
    def run(self) -> Disturbed:
        """As the coordinator's node sees it."""
        return self.nodes[self.host]

    def start(self, name: str) -> None:
        node = self.nodes[name]
        node.start()
        self.run.agents += node.agents

    def worker(self, name: str) -> int:
        """Process id of the node's worker."""
        return next(e["pid"] for e in reversed(self.run.events("worker_started")) if e["by"] == f"launcher-{name}")

    def wait_for_generation(self, number: int) -> dict[str, Any]:
        """The event with which it began."""

        def begun() -> list[dict[str, Any]]:
            return [e for e in self.run.events("generation") if e["generation"] == number]

        self.run.wait_until(begun, LONG_S)
        return begun()[0]

    def wait_for_more_steps(self, count: int) -> None:
        self.run.wait_for_step(self.run.steps() + count, LONG_S)

    def lost(self) -> list[str]:
        """The nodes that the coordinator gave up, in that order."""
        return [e["node"] for e in self.run.events("agent_left") if "it sent nothing" in e["why"]]

    def end(self) -> None:
        """Whatever still runs."""
        for node in self.nodes.values():
            if node.process is not None and node.process.poll() is None:
                node.process.kill()
                node.process.communicate()


Start = Callable[..., Cluster]


@pytest.fixture
def cluster(folder: Folder) -> Iterator[Start]:
    """Start a run on nodes a, b, ..., the coordinator on the one that is named."""
    begun: list[Cluster] = []
    names = "abc"

    def start(net: Network, nodes: int, steps: int, host: str, wait_for_nodes_s: float = 1) -> Cluster:
        one = Cluster(net, host=host)
        begun.append(one)
        options = (
            *("--launch.processes", "1", "--launch.nodes", str(nodes), *of_length(steps)),
            *("--launch.coordinator", f"{net.address(host)}:{PORT}"),
            *("--resilience.wait_for_nodes_s", str(wait_for_nodes_s)),
            *("--resilience.coordinator_timeout_s", str(PATIENCE_S), "--resilience.node_check_s", "0"),
        )
        for name in names[:nodes]:
            one.nodes[name] = Disturbed(
                folder, replicas(nodes), SLOW, (*options, "--launch.node", name), net.inside(name)
            )
        for name in (host, *(name for name in one.nodes if name != host)):
            one.start(name)
        return one

    try:
        with network(*names) as net:
            yield partial(start, net)
            for one in begun:
                one.end()
    except NotPermitted as reason:
        pytest.skip(str(reason))


def written_by(pid: int) -> int:
    """Bytes that a process has handed to the kernel to write, to files and pipes."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["wchar"])


def generations_of_checkpoints_after(run: Disturbed, moment_s: float) -> set[int]:
    return {c.manifest.generation for c in store.committed(run.run_dir) if c.manifest.saved_at_s > moment_s}


# ---- one of two nodes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "how"), [("b", "unplug"), ("a", "cut_off")], ids=["last rank", "first rank"])
def test_a_node_that_is_cut_off_for_good(cluster, undisturbed, lost, how):
    """The other goes on without it; it writes nothing any more, and ends."""
    nodes = cluster(2, steps=30, host="a" if lost == "b" else "b")
    run = nodes.run.wait_for_step(6, LONG_S)
    worker = nodes.worker(lost)
    getattr(nodes.net, how)(lost)
    began_s = nodes.wait_for_generation(2)["time_s"]
    written = written_by(worker)
    nodes.wait_for_more_steps(4)
    assert written_by(worker) == written
    left = nodes.nodes[lost].end(code=75, timeout_s=LONG_S)
    assert f"could not be reached for {PATIENCE_S} s (resilience.coordinator_timeout_s)" in left.text
    run.end(timeout_s=LONG_S)
    assert nodes.lost() == [lost] and len(run.events("generation")) == 2
    assert generations_of_checkpoints_after(run, began_s) == {2}
    assert {r["source"] for r in run.events("recovered")} == {"live"}
    run.check([undisturbed(plan, *of_length(30)) for plan in plans_of(run)], "coordinator_lost")


@pytest.mark.parametrize("how", [("unplug", "plug_in"), ("cut_off", "let_through")], ids=["link", "way"])
def test_a_node_that_comes_back_when_the_run_has_gone_on_without_it(cluster, undisturbed, how):
    cut, mend = how
    nodes = cluster(2, steps=60, host="a")
    run = nodes.run.wait_for_step(6, LONG_S)
    worker = nodes.worker("b")
    getattr(nodes.net, cut)("b")
    assert nodes.wait_for_generation(2)["size"] == 1
    nodes.wait_for_more_steps(2)
    getattr(nodes.net, mend)("b")
    assert nodes.wait_for_generation(3)["size"] == 2
    run.end(timeout_s=LONG_S)
    nodes.nodes["b"].end(timeout_s=LONG_S)
    assert nodes.worker("b") == worker, "its process lived on"
    assert nodes.lost() == ["b"] and len(run.events("generation")) == 3
    assert {r["source"] for r in run.events("recovered")} == {"live"}
    run.check([undisturbed(plan, *of_length(60)) for plan in plans_of(run)], "coordinator_lost")


def test_a_node_that_comes_back_in_time_changes_no_number(cluster, undisturbed):
    """It is waited for: given up after ten seconds of silence, and back before the run would go on without it."""
    nodes = cluster(2, steps=30, host="a", wait_for_nodes_s=600)
    run = nodes.run.wait_for_step(6, LONG_S)
    nodes.net.cut_off("b")
    run.wait_until(nodes.lost, LONG_S)
    nodes.net.let_through("b")
    assert nodes.wait_for_generation(2)["size"] == 2
    run.end(timeout_s=LONG_S)
    nodes.nodes["b"].end(timeout_s=LONG_S)
    assert nodes.lost() == ["b"] and len(run.events("generation")) == 2
    run.check(undisturbed(replicas(2), *of_length(30)), "coordinator_lost")


@pytest.mark.parametrize("whose", ["a", "b"])
def test_a_link_that_is_down_for_a_second_is_not_even_noticed(cluster, undisturbed, whose):
    nodes = cluster(2, steps=30, host="a")
    run = nodes.run.wait_for_step(6, LONG_S)
    nodes.net.unplug(whose)
    time.sleep(1)
    nodes.net.plug_in(whose)
    run.end(timeout_s=LONG_S)
    nodes.nodes["b"].end(timeout_s=LONG_S)
    assert len(run.events("generation")) == 1 and not run.events("break") and not nodes.lost()
    run.check(undisturbed(replicas(2), *of_length(30)))


# ---- two and one of three ------------------------------------------------------------------------------------------


def test_two_of_three_with_the_coordinator_go_on_until_the_third_is_back(cluster, undisturbed):
    nodes = cluster(3, steps=60, host="b")
    run = nodes.run.wait_for_step(6, LONG_S)
    worker = nodes.worker("a")
    nodes.net.cut_off("a")
    generation = nodes.wait_for_generation(2)  # the planner may find that one of two does as well
    assert not any(place.startswith("a/") for place in generation["ranks"])
    written = written_by(worker)
    nodes.wait_for_more_steps(3)
    assert written_by(worker) == written and generations_of_checkpoints_after(run, generation["time_s"]) <= {2}
    nodes.net.let_through("a")
    assert nodes.wait_for_generation(3)["size"] == 3
    for node in (run, nodes.nodes["a"], nodes.nodes["c"]):
        node.end(timeout_s=LONG_S)
    assert nodes.lost() == ["a"] and len(run.events("generation")) == 3
    run.check([undisturbed(plan, *of_length(60)) for plan in plans_of(run)], "coordinator_lost")


def test_two_of_three_without_the_coordinator_wait_and_end(cluster, undisturbed):
    """There is one coordinator, whose side goes on even if it is the smaller: so there is one writer."""
    nodes = cluster(3, steps=30, host="a")
    run = nodes.run.wait_for_step(6, LONG_S)
    workers = {name: nodes.worker(name) for name in "bc"}
    nodes.net.cut_off("a")
    began_s = nodes.wait_for_generation(2)["time_s"]
    written = {name: written_by(pid) for name, pid in workers.items()}
    nodes.wait_for_more_steps(4)
    assert {name: written_by(pid) for name, pid in workers.items()} == written
    for name in "bc":
        assert "could not be reached" in nodes.nodes[name].end(code=75, timeout_s=LONG_S).text
    run.end(timeout_s=LONG_S)
    assert sorted(nodes.lost()) == ["b", "c"] and len(run.events("generation")) == 2
    assert generations_of_checkpoints_after(run, began_s) == {2}
    run.check([undisturbed(plan, *of_length(30)) for plan in plans_of(run)], "coordinator_lost")
