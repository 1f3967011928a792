"""The matrix of faults: real processes are killed, stopped and cut off, real files damaged, real numbers changed.

Rows that are not marked slow are the selection of `make test`; `make test-faults` runs all, each at five places.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.checkpoint import store
from commands import Folder
from matrix import AGAIN_S, SEEN_S, Disturbed

PLANS = {
    "replicas": "dp_replicate=2,microbatch=2",
    "three": "dp_replicate=2,microbatch=2",
    "sharded": "dp_shard=2,zero=3,microbatch=2",
    "pipeline": "pp=2,microbatch=2",
    "tensor": "tp=2,microbatch=4",
}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
Undisturbed = Callable[[str], Disturbed]


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run without faults under a plan, once for each plan."""
    known: dict[str, Disturbed] = {}

    def run(plan: str) -> Disturbed:
        if plan not in known:
            folder = Folder(tmp_path_factory.mktemp("undisturbed"), corpus)
            known[plan] = Disturbed(folder, plan).start().end()
        return known[plan]

    return run


@pytest.fixture
def disturbed(folder: Folder) -> Callable[..., Disturbed]:
    """A run that is to be disturbed."""

    def run(plan: str = PLANS["replicas"], faults: str = "", *options: str) -> Disturbed:
        return Disturbed(folder, plan, faults, options).start()

    return run


def step_of(seed: int) -> int:
    """Where a fault strikes: not at a checkpoint's step each time, nor after an even number of steps."""
    return 4 + 3 * seed


# ---- kills inside a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "point",
    [
        "forward",
        pytest.param("bucket", marks=pytest.mark.slow),
        "judge",
        pytest.param("commit", marks=pytest.mark.slow),
        "optimizer",
    ],
)
def test_a_kill_within_a_step_costs_no_step_where_there_is_a_replica(disturbed, undisturbed, point, seed):
    run = disturbed(PLANS["replicas"], f"kill@{point}:step={step_of(seed)},rank={seed % 2}").end()
    (fault,) = run.events("fault")
    (died,) = run.events("worker_died")
    assert died["pid"] == fault["pid"] and died["why"] == "signal SIGKILL"
    assert run.time_to(fault["time_s"], "worker_died") <= SEEN_S
    assert run.time_to(fault["time_s"], "recovered") <= AGAIN_S
    recovered = run.events("recovered")
    assert {(r["source"], r["steps_lost"]) for r in recovered} == {("live", 0)}
    survivors = {e["pid"] for e in run.events("worker_started")} - {died["pid"]}
    assert len(survivors) == 2 and len(run.events("worker_died")) == 1, "the survivor lived on"
    run.check_promises(undisturbed(PLANS["replicas"]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plan", ["sharded", pytest.param("pipeline", marks=pytest.mark.slow),
                                  pytest.param("tensor", marks=pytest.mark.slow)])  # fmt: skip
def test_a_state_without_a_replica_comes_from_the_copies_in_memory(disturbed, undisturbed, plan, seed):
    run = disturbed(PLANS[plan], f"kill@backward:step={step_of(seed)},rank={seed % 2}").end()
    assert {r["source"] for r in run.events("recovered")} == {"memory"}
    assert all(r["steps_lost"] <= 4 for r in run.events("recovered"))
    run.check_promises(undisturbed(PLANS[plan]))


# ---- kills from outside --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_all_workers_killed(disturbed, undisturbed, seed):
    run = disturbed().wait_for_step(step_of(seed))
    for pid in run.pids().values():
        os.kill(pid, signal.SIGKILL)
    run.end().check_promises(undisturbed(PLANS["replicas"]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_again_while_it_recovers(disturbed, undisturbed, seed):
    faults = f"kill@forward:step={step_of(seed)},rank=1; kill@recover:rank={seed % 2},epoch=2"
    disturbed(PLANS["replicas"], faults).end().check_promises(undisturbed(PLANS["replicas"]))


def test_the_coordinator_s_death_is_a_pause(disturbed, undisturbed):
    run = disturbed(PLANS["replicas"], "slow@forward:seconds=0.1").wait_for_step(5)
    os.kill(run.events("coordinator_started")[0]["pid"], signal.SIGKILL)
    run.wait_until(lambda: len(run.events("coordinator_started")) == 2)
    run.send(1, signal.SIGKILL)
    run.end()
    assert run.events("recovered") and len({e["epoch"] for e in run.events("epoch")}) == 2
    run.check_promises(undisturbed(PLANS["replicas"]))


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["agent", "nursery"])
def test_a_holder_s_death_leaves_no_orphan_and_loses_nothing(disturbed, undisturbed, whom):
    run = disturbed().wait_for_step(7)
    assert run.process is not None
    if whom == "agent":
        run.process.kill()
        run.process.wait()
        assert not run.processes()
        run.start()
    else:
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        nursery = next(p for p in children if b"resilience.nursery" in Path(f"/proc/{p}/cmdline").read_bytes())
        os.kill(int(nursery), signal.SIGKILL)
    run.end().check_promises(undisturbed(PLANS["replicas"]))


# ---- processes that do not die -------------------------------------------------------------------------------------

PATIENCE = ("--resilience.beat_timeout_s", "1", "--resilience.hang_s", "2", "--resilience.first_step_s", "20")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("stop@forward:step=6,rank=1", "stopped"),
        pytest.param("gil@forward:step=6,rank=1,seconds=60", "frozen", marks=pytest.mark.slow),
        pytest.param("hang@forward:step=6,rank=1", "hang", marks=pytest.mark.slow),
        pytest.param("hang@loader:step=6,rank=1", "stuck_loader", marks=pytest.mark.slow),
    ],
)
def test_who_does_not_go_on_is_named_killed_and_replaced(disturbed, undisturbed, fault, kind):
    run = disturbed(PLANS["replicas"], fault, *PATIENCE).end()
    (struck,) = run.events("fault")
    found = run.events("stopped", "frozen", "hang", "stuck_loader", "mismatch")
    assert [(f["event"], f["ranks"]) for f in found] in ([(kind, [1])], [(kind, [0, 1])])
    assert found[0]["time_s"] - struck["time_s"] <= 2 + 1 + 1, "the timeout, a second, and what was left of the step"
    run.check_promises(undisturbed(PLANS["replicas"]))


@pytest.mark.slow
def test_a_collective_that_only_one_rank_begins(disturbed, undisturbed):
    """Gloo may end that process, or wait: whichever it is, the process is replaced."""
    run = disturbed(PLANS["replicas"], "collective@bucket:step=6,rank=1", *PATIENCE).end()
    assert run.events("worker_died")
    run.check_promises(undisturbed(PLANS["replicas"]))


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_nothing_and_its_samples_are_listed(disturbed):
    run = disturbed(PLANS["replicas"], "nan@gradient:step=6,rank=1").end()
    (bad,) = run.events("bad_step")
    assert bad["step"] == 6 and bad["samples"] == [[48, 56]] and bad["reason"] == "not_finite"
    skipped = [r for r in run.records() if r.get("samples_skipped")]
    assert [r["step"] for r in skipped] == [6] and len(run.records()) == 24
    run.check_nothing_is_left()


@pytest.mark.slow
def test_bad_steps_in_a_row_take_the_run_back(disturbed):
    options = ("--resilience.on_bad_step", "rewind", "--resilience.rewind_after", "1")
    run = disturbed(PLANS["replicas"], "nan@gradient:step=12,rank=1", *options).end()
    (back,) = run.events("rewind")
    assert back["step"] == 12 and back["to_step"] == 10 and len(run.records()) == 24


@pytest.mark.parametrize("where", ["weights", pytest.param("moments", marks=pytest.mark.slow)])
def test_one_flipped_bit_in_one_of_two_replicas_is_seen_within_a_step_and_undone(disturbed, undisturbed, where):
    run = disturbed(PLANS["replicas"], f"flip@{where}:step=6,rank=1,bit=20").end()
    found = run.events("corruption")
    assert found and found[0]["step"] == 7
    run.check_promises(undisturbed(PLANS["replicas"]))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["weights", "moments"])
def test_of_three_replicas_the_one_with_the_flipped_bit_is_blamed_and_healed(disturbed, undisturbed, where):
    plan = "dp_replicate=4,microbatch=2"
    run = disturbed(plan, f"flip@{where}:step=6,rank=2,bit=20").end()
    (found,) = run.events("corruption")
    assert found["step"] == 7 and found["ranks"] == [2] and not run.events("rewind")
    run.check_promises(undisturbed(plan))


# ---- the disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        "kill@save:fraction=0.5,rank=0",
        pytest.param("kill@save:fraction=0.1,rank=1", marks=pytest.mark.slow),
        pytest.param("kill@save:fraction=0.9,rank=0", marks=pytest.mark.slow),
        pytest.param("kill@rename", marks=pytest.mark.slow),
        pytest.param("kill@renamed", marks=pytest.mark.slow),
        pytest.param("eio@save", marks=pytest.mark.slow),
        pytest.param("enospc@save:fraction=0.5", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_cannot_be_finished_leaves_the_one_before(disturbed, undisturbed, fault):
    run = disturbed(PLANS["replicas"], fault).end()
    assert run.events("fault")
    run.check_promises(undisturbed(PLANS["replicas"]))


# ---- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["the command", pytest.param("one worker", marks=pytest.mark.slow)])
def test_sigterm_saves_and_nothing_is_lost(disturbed, undisturbed, to):
    run = disturbed().wait_for_step(8)
    assert run.process is not None
    if to == "the command":
        run.process.send_signal(signal.SIGTERM)
    else:
        run.send(1, signal.SIGTERM)
    run.end(code=143)
    assert store.committed(run.run_dir)[-1].step == run.steps()
    run.check_nothing_is_left()
    run.start().end().check_promises(undisturbed(PLANS["replicas"]))


@pytest.mark.slow
def test_a_second_sigterm_ends_it_at_once(disturbed, undisturbed):
    run = disturbed(PLANS["replicas"], "sleep@forward:step=9,rank=1,seconds=30").wait_for_step(8)
    assert run.process is not None
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)
    run.end(code=143)
    assert time.monotonic() - began < 5
    run.check_nothing_is_left()
    run.faults = ""
    run.start().end().check_promises(undisturbed(PLANS["replicas"]))


# ---- what is given up ----------------------------------------------------------------------------------------------


def test_the_same_crash_at_the_same_step_again_ends_the_run(disturbed):
    run = disturbed(PLANS["replicas"], "raise@forward:step=6,rank=1,again=true").end(code=70)
    assert len(run.events("worker_died")) == 2 and "step 6" in run.text
    run.check_nothing_is_left()


# ---- nodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(folder, corpus, tmp_path_factory):
    """Two agents; one is killed, the run shrinks to what is left, and grows when it is back: the same batches."""
    run = Disturbed(folder, PLANS["replicas"])
    nodes = ("--launch.processes", "1", "--launch.nodes", "2", "--resilience.wait_for_nodes_s", "1",
             "--launch.coordinator", "127.0.0.1:29417", "--train.steps", "60")  # fmt: skip
    run.options, run.faults = (*nodes, "--launch.node", "a"), "slow@forward:seconds=0.4"
    run.start()
    other = ("train", "run.toml", "--resilience.memory_every_steps", "2", *nodes, "--launch.node", "b")
    b = folder.start(*other, ARGOSY_FAULTS=run.faults)
    run.wait_for_step(6)
    b.kill()
    b.communicate()
    run.wait_until(lambda: run.events("epoch")[-1]["size"] == 1)
    done = run.steps()
    run.wait_for_step(done + 2)
    b = folder.start(*other, ARGOSY_FAULTS=run.faults)
    run.wait_until(lambda: run.events("epoch")[-1]["size"] == 2)
    run.end()
    b.communicate(timeout=60)
    assert b.returncode == 0
    reference = Folder(tmp_path_factory.mktemp("undisturbed"), corpus)
    whole = Disturbed(reference, PLANS["replicas"], options=("--train.steps", "60")).start().end().losses()
    assert run.losses() == pytest.approx(whole, rel=2e-5)
    assert {r["source"] for r in run.events("recovered")} <= {"live"}
    run.check_nothing_is_left()
