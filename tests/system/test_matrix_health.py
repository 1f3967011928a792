"""The matrix of faults: machines that compute wrongly, found before they join, or once a rank on them is blamed."""

from __future__ import annotations

import subprocess

import pytest

from matrix import PLANS, Disturbed
from ports import free_port
from waiting import PATIENT_S

UNFIT = 69
REPLICAS_OF_FOUR = "dp_replicate=4,microbatch=2"


class Machines:
    """A run on two of several machines, all of them this one: an agent and a worker each, with faults of their own."""

    def __init__(self, run: Disturbed):
        self.run = run
        run.options += ("--launch.nodes", "2", "--launch.coordinator", f"127.0.0.1:{free_port()}",
                        "--launch.processes", "1", "--resilience.wait_for_nodes_s", "30")  # fmt: skip
        self._others: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, faults: str = "") -> None:
        self.run.faults = faults
        if self.run.process is None:
            self.run.start("--launch.node", name)
        else:
            self._others[name] = self.run.launch("--launch.node", name)

    def text_of(self, name: str, code: int) -> str:
        """What it printed until it ended with this exit code."""
        process = self._others.pop(name)
        out, err = process.communicate(timeout=PATIENT_S)
        assert process.returncode == code, out + err
        return out + err


@pytest.mark.slow
def test_a_machine_that_computes_wrongly_is_refused_before_it_joins_and_a_spare_takes_its_place(folder):
    run = Disturbed(folder, PLANS["replicas"], options=("--train.steps", "6"))
    machines = Machines(run)
    machines.start("a")
    machines.start("b", "flip@node_check:tensor=core*product,bit=12")
    assert "b computes wrong results: core " in machines.text_of("b", UNFIT)
    machines.start("c")
    run.end()
    machines.text_of("c", 0)
    (refused,) = run.events("node_refused")
    (wrong,) = refused["evidence"]
    assert refused["node"] == "b" and wrong["test"] == "fp32 product" and wrong["times"] == 1
    (generation,) = run.events("generation")
    assert set(generation["ranks"]) == {"a/0", "c/0"} and len(run.records()) == 6
    run.check_nothing_is_left()


@pytest.mark.slow
def test_the_only_machine_is_refused_and_says_so(folder):
    run = Disturbed(folder, faults="flip@node_check:tensor=*memory,bit=3").start().end(code=UNFIT)
    assert "memory: 0x" in run.text and "Take it out of service" in run.text
    assert run.events("node_refused") and not run.events("generation")
    run.check_nothing_is_left()


@pytest.mark.slow
def test_the_node_of_a_blamed_rank_is_checked_and_goes_on_if_it_is_well(disturbed, undisturbed):
    run = disturbed(REPLICAS_OF_FOUR, "flip@weights:step=6,rank=2,bit=20;slow@forward:seconds=0.05").end()
    (suspect,) = run.events("suspect")
    assert suspect["ranks"] == [2]
    first, second = run.events("node_checked")
    assert not first["wrong"] and not second["wrong"] and second["time_s"] > suspect["time_s"]
    assert len(run.events("generation")) == 2 and not run.events("worker_died")
    assert {(r["source"], r["steps_lost"]) for r in run.events("recovered")} == {("live", 0)}
    run.check(undisturbed(REPLICAS_OF_FOUR), "corruption")


@pytest.mark.slow
def test_a_machine_that_is_found_to_compute_wrongly_is_left_and_a_spare_takes_its_place(folder, undisturbed):
    run = Disturbed(folder, PLANS["replicas"])
    machines = Machines(run)
    machines.start("a", "slow@forward:seconds=0.1")
    # Both machines are in doubt, as two replicas differ; the second that is found so is checked in the next generation.
    wrong = "flip@node_check:generation=1;flip@node_check:generation=2"
    machines.start("b", f"slow@forward:seconds=0.1;flip@weights:step=6,rank=1,bit=20;{wrong}")
    run.wait_for_step(2, seconds=180)
    machines.start("c")
    machines.text_of("b", UNFIT)
    run.end()
    machines.text_of("c", 0)
    (refused,) = run.events("node_refused")
    assert refused["node"] == "b"
    assert set(run.events("generation")[-1]["ranks"]) == {"a/0", "c/0"}
    run.check(undisturbed(), "corruption", "rewind")
