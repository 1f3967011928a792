"""The matrix of faults: a node or a link that became slow, without which the run gets further."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest

from commands import Folder
from matrix import Disturbed
from network import NotPermitted, network
from ports import free_port
from waiting import PATIENT_S

SIZES = ("--train.steps", "80", "--train.global_batch", "12", "--data.seq_len", "256")
"""Large enough that two nodes are better than one, as the planner has it."""
SMALL = ("--train.steps", "80", "--train.global_batch", "12", "--data.seq_len", "32")
"""So small that one node is better than two."""
SOON = ("--resilience.straggler_steps", "4", "--resilience.straggler_s", "1")
"""What is slow is told of, and acted on, after some twenty steps each."""
SLOW = "slow@forward:factor=6"
NO_MEMORY = ("--resilience.memory_checkpoint_every_steps", "0")

Slowed = Callable[[str, tuple[str, ...]], tuple[Disturbed, list[subprocess.Popen[str]]]]


@pytest.fixture
def slowed(folder: Folder) -> Iterator[Slowed]:
    """A run on three nodes, all on this machine, of which the last is slow; and the commands of its other nodes."""
    processes: list[subprocess.Popen[str]] = []

    def start(plan: str, sizes: tuple[str, ...]) -> tuple[Disturbed, list[subprocess.Popen[str]]]:
        meet = f"127.0.0.1:{free_port()}"
        nodes = ("--launch.nodes", "3", "--launch.processes", "1", "--launch.coordinator", meet)
        run = Disturbed(folder, plan, options=(*sizes, *SOON, *nodes))
        run.start("--launch.node", "a")
        b = run.launch("--launch.node", "b")
        run.faults = SLOW
        c = run.launch("--launch.node", "c")
        assert run.process is not None
        processes.extend([run.process, b, c])
        return run, [b, c]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "sizes", "left", "source"),
    [
        ("dp_replicate=3,microbatch=2", SIZES, 2, "live"),
        ("dp_shard=3,zero=1,microbatch=2", SIZES, 2, "memory"),
        ("dp_shard=3,zero=1,microbatch=2", SMALL, 1, "disk"),  # two nodes leave, with parts that the third has not
        ("dp_shard=3,zero=1,microbatch=2", (*SIZES, *NO_MEMORY), 2, "disk"),
    ],
)
def test_a_slow_node_is_left_out_and_no_step_is_lost(slowed, undisturbed, plan, sizes, left, source):
    run, others = slowed(plan, sizes)
    run.end(timeout_s=300)
    for process in others:
        process.communicate(timeout=PATIENT_S)
        assert process.returncode == 0
    (migrated,) = run.events("migrated")
    assert migrated["left_out"] == ["c"] and migrated["evidence"]["factor"] > 1.5
    assert migrated["predicted_new_s"] < migrated["predicted_now_s"] and migrated["migration_s"] > 0
    assert [e["size"] for e in run.events("generation")] == [3, left]
    assert [(r["source"], r["steps_lost"]) for r in run.events("recovered")] == [(source, 0)]
    assert [e["gained"] for e in run.events("migration_measured")] == [True]
    assert not run.events("worker_died", "killed", "stayed")
    run.check([undisturbed(e["plan"], *sizes) for e in run.events("generation")], "straggler")


SLOWED = 3_000_000
"""Bits a second: a step's gradients take half a second, and all of a step took a fraction of that."""


@pytest.mark.slow
def test_a_run_whose_link_became_slow_goes_on_without_it(folder, undisturbed):
    sizes = ("--train.steps", "160", "--train.global_batch", "12", "--data.seq_len", "128")
    try:
        with network("a", "b") as net:
            nodes = ("--launch.nodes", "2", "--launch.processes", "1")
            meet = ("--launch.coordinator", f"{net.address('a')}:29400")
            a, b = (
                Disturbed(folder, "dp_replicate=2,microbatch=6", within=net.inside(name),
                          options=(*sizes, *SOON, *nodes, *meet, "--launch.node", name)).start()
                for name in "ab"
            )  # fmt: skip
            a.wait_for_step(40)
            net.throttle("b", SLOWED)
            for run in (a, b):
                run.end(timeout_s=300)
    except NotPermitted as why:
        pytest.skip(str(why))
    (migrated,) = a.events("migrated")
    assert (migrated["because"], migrated["size"], migrated["left_out"]) == ("slow_link", 1, ["b"])
    assert migrated["evidence"]["factor"] > 1.5 and migrated["predicted_new_s"] < migrated["predicted_now_s"]
    assert [e["size"] for e in a.events("generation")] == [2, 1]
    assert [(r["source"], r["steps_lost"]) for r in a.events("recovered")] == [("live", 0)]
    assert [e["gained"] for e in a.events("migration_measured")] == [True]
    a.check([undisturbed(e["plan"], *sizes) for e in a.events("generation")], "slow_link")
