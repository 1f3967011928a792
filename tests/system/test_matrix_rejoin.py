"""The matrix of faults: nodes that are lost and come back, and one that only seemed to be lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from argosy.checkpoint import store
from argosy.config.load import load
from argosy.data.loader import open_data
from argosy.data.packing import START_BIT, TRAINED
from commands import Folder
from matrix import PLANS, Disturbed
from nodes import Nodes
from ports import free_port

EIGHT = ("--train.global_batch", "8")
TWELVE = ("--train.global_batch", "12")
"""A batch that can be dealt to three."""
CONVERSATIONS = ("conversations",)
"""In place of text, each of them once."""


class Cluster(Nodes):
    """A run whose first node has the coordinator, and can be lost too."""

    def wait_for_size(self, size: int) -> None:
        """Until a world of that size has made some steps, and copies of them in memory."""
        run = self.run
        run.wait_until(lambda: run.events("generation") and run.events("generation")[-1]["size"] == size)
        run.wait_for_step(run.steps() + 4)


@pytest.fixture
def nodes(folder: Folder) -> Iterator[Callable[..., Cluster]]:
    begun: list[Cluster] = []

    def run(plan: str, faults: str, names: str, *options: str) -> Cluster:
        placed = ("--launch.nodes", str(len(names)), "--launch.coordinator", f"127.0.0.1:{free_port()}",
                  "--launch.processes", "1", "--resilience.wait_for_nodes_s", "1")  # fmt: skip
        begun.append(Cluster(Disturbed(folder, plan, faults, (*options, *placed))))
        begun[-1].start(*names)
        return begun[-1]

    yield run
    for one in begun:
        one.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "sizes", "samples", "source"),
    [
        ("dp_replicate=3,microbatch=2", [3, 1, 3, 1], TWELVE, "live"),  # on two processes of one machine nothing gains
        ("dp_replicate=3,microbatch=2", [3, 1, 2], (*TWELVE, "--data.seq_len", "512"), "live"),  # of long ones it does
        ("dp_replicate=4,microbatch=2", [4, 1], EIGHT, "live"),
        (PLANS["sharded"], [2, 1, 2], EIGHT, "memory"),
        (PLANS["pipeline"], [2, 1, 2], EIGHT, "memory"),
        (PLANS["tensor"], [2, 1, 2], EIGHT, "memory"),
        (PLANS["replicas"], [2, 1, 2], CONVERSATIONS, "live"),
    ],
    ids=["3-1-3", "3-1-2", "4-1", "dp_shard", "pp", "tp", "conversations"],
)
def test_nodes_that_are_lost_and_come_back(nodes, undisturbed, tuning, plan, sizes, samples, source):
    """The state is cut anew for each world, and each step has the same samples."""
    options = ("--train.steps", "100", *samples)
    if samples is CONVERSATIONS:
        options = (*tuning("sft", lines=960), "--train.steps", "0", "--train.epochs", "1")
    names = "abcd"[: sizes[0]]
    cluster = nodes(plan, "slow@forward:seconds=0.2", names, *options)
    run = cluster.run
    cluster.wait_for_size(sizes[0])
    for before, after in pairwise(sizes):
        if after < before:
            cluster.lose(*names[after:before])
        else:
            cluster.start(*names[before:after])
        cluster.wait_for_size(after)
    cluster.end()
    assert cluster.sizes() == sizes
    lost = [e["node"] for e in run.events("agent_left")][: len(names) - 1]
    assert set(lost) <= set(names[1:]), "a node that is lost is told of"
    recovered = run.events("recovered")
    assert recovered[0]["source"] == source and all(r["steps_lost"] <= 4 for r in recovered)
    plans = dict.fromkeys(e["plan"] for e in run.events("generation"))
    run.check([undisturbed(one, *options) for one in plans])
    if samples is CONVERSATIONS:
        assert_each_conversation_once(run)


def assert_each_conversation_once(run: Disturbed) -> None:
    """Check that the first epoch of a run, as its ledger has it, is each conversation of its data once."""
    config = load(run.run_dir / "run.toml")
    data = open_data(config.data, config.seed, config.train.global_batch)
    (source,) = data.sources
    read = Counter[bytes]()
    for record in run.records():
        samples = data.order.samples(record["first_sample"], record["first_sample"] + record["samples"])
        rows = np.empty((len(samples), config.data.seq_len + 1), np.int32)
        source.read_windows(samples.windows, rows)
        for row in rows[samples.epochs == 0, :-1]:
            parts = np.split(row, np.flatnonzero(row & START_BIT))
            read.update(part.tobytes() for part in parts if (part & TRAINED).any())
    assert set(read.values()) == {1} and len(read) == sum(s.documents for s in source.manifest.splits["train"]) > 900


@pytest.mark.slow
def test_a_node_that_wakes_after_it_was_replaced_writes_nothing(nodes, undisturbed):
    """All of it is stopped, its agent too, after its worker agreed to a step and before that wrote it down."""
    steps = ("--train.steps", "60")
    cluster = nodes(PLANS["replicas"], "stop@commit:step=8,rank=0; slow@forward:seconds=0.2", "ba", *steps)
    run = cluster.run
    run.wait_until(lambda: run.struck("stop@"))
    assert run.events("generation")[0]["ranks"]["a/0"] == 0, "it would commit checkpoints, and write the steps down"
    asleep = cluster.machine("a")
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    run.wait_until(lambda: run.events("generation")[-1]["size"] == 1)
    run.wait_for_step(run.steps() + 2)
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    run.wait_until(lambda: run.events("generation")[-1]["size"] == 2)
    cluster.end()
    began = {e["generation"]: e["time_s"] for e in run.events("generation")}
    for checkpoint in store.committed(run.run_dir):
        written = checkpoint.manifest
        assert written.generation == max(e for e, at in began.items() if at <= written.saved_at_s)
    run.check(
        [undisturbed(e["plan"], *steps) for e in run.events("generation")[:2]], "coordinator_lost"
    )  # says the sleeper


@pytest.mark.slow
def test_nobody_is_lost_by_a_coordinator_that_stood_still(nodes, undisturbed):
    """Longer than it waits for an agent, and than an agent waits for it."""
    steps = ("--train.steps", "60")
    cluster = nodes(PLANS["replicas"], "slow@forward:seconds=0.5", "ab", *steps)
    run = cluster.run
    run.wait_for_step(4)
    (started,) = run.events("coordinator_started")
    os.kill(started["pid"], signal.SIGSTOP)
    run.wait_until(lambda: run.events("coordinator_lost"))
    os.kill(started["pid"], signal.SIGCONT)
    cluster.end()
    assert len(run.events("generation")) == 1 and not run.events("break")
    run.check(undisturbed(PLANS["replicas"], *steps), "coordinator_lost")
