"""The matrix of faults: real processes are killed, stopped and cut off, real files damaged, real numbers changed.

Rows that are not marked slow are the selection of `make test`; `make test-faults` runs all, each at five places.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from argosy.checkpoint import store
from argosy.training.stop import SAME_S
from matrix import AGAIN_S, PATIENCE, PLANS, SEEN_S, Disturbed
from ports import free_port
from waiting import PATIENT_S

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]


def step_of(seed: int) -> int:
    """Where a fault strikes: not at a checkpoint's step each time, nor after an even number of steps."""
    return 4 + 3 * seed


# ---- kills inside a step -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "point",
    [
        "forward",
        pytest.param("loader", marks=pytest.mark.slow),  # a thread, which dies with its process
        pytest.param("bucket", marks=pytest.mark.slow),
        *(pytest.param(point, marks=pytest.mark.slow) for point in ("exchange", "commit", "optimizer")),
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
    run.check(undisturbed(), "worker_died")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "plan",
    ["pipeline", *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("sharded", "tensor"))],
)
def test_a_state_without_a_replica_comes_from_the_copies_in_memory(disturbed, undisturbed, plan, seed):
    # Nothing is on disk until the end: a checkpoint could be newer than the newest copy that is whole.
    never = ("--checkpoint.every_steps", "0")
    run = disturbed(PLANS[plan], f"kill@backward:step={step_of(seed)},rank={seed % 2}", *never).end()
    assert {r["source"] for r in run.events("recovered")} == {"memory"}
    assert all(r["steps_lost"] <= 4 for r in run.events("recovered"))
    run.check(undisturbed(PLANS[plan]), "worker_died")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3])
def test_compiled_steps_give_the_same_bits_though_who_is_new_has_met_fewer_batches(disturbed, undisturbed, seed):
    plan = f"{PLANS['replicas']},precision=fp32,compile=true"
    run = disturbed(plan, f"kill@forward:step={step_of(seed)},rank={seed % 2}").end()
    run.check(undisturbed(plan), "worker_died")


# ---- kills from outside --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_all_workers_killed(disturbed, undisturbed, seed):
    run = disturbed().wait_for_step(step_of(seed))
    for pid in run.pids().values():
        os.kill(pid, signal.SIGKILL)
    run.end().check(undisturbed(), "worker_died")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_killed_again_while_it_recovers(disturbed, undisturbed, seed):
    faults = f"kill@forward:step={step_of(seed)},rank=1; kill@recover:rank={seed % 2},generation=2"
    disturbed(PLANS["replicas"], faults).end().check(undisturbed(), "worker_died")


def test_the_coordinator_s_death_is_a_pause(disturbed, undisturbed):
    run = disturbed(PLANS["replicas"], "slow@forward:seconds=0.1").wait_for_step(5)
    os.kill(run.events("coordinator_started")[0]["pid"], signal.SIGKILL)
    run.wait_until(lambda: len(run.events("coordinator_started")) == 2)
    run.send(1, signal.SIGKILL)
    run.end()
    assert run.events("recovered") and len({e["generation"] for e in run.events("generation")}) == 2
    run.check(undisturbed(), "coordinator_lost", "worker_died")


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["agent", "fork_server"])
def test_a_holder_s_death_leaves_no_orphan_and_loses_nothing(folder, disturbed, undisturbed, whom):
    folder.starts_anew = True  # a command that tests fork has a fork server of their own between
    run = disturbed().wait_for_step(7)
    if whom == "agent":
        run.kill_and_start_again()
    else:
        os.kill(fork_server_of(run), signal.SIGKILL)
    run.end().check(undisturbed(), *(() if whom == "agent" else ("fork_server_replaced", "worker_died")))


def fork_server_of(run: Disturbed) -> int:
    assert run.process is not None
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    return next(int(p) for p in children if b"processes.fork_server" in Path(f"/proc/{p}/cmdline").read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_fork_server_that_is_stopped_when_a_worker_dies_is_replaced(folder, disturbed, undisturbed, ends):
    """It tells of no end and forks nobody. `ends`: it dies then; else its agent has to see it."""
    folder.starts_anew = True  # as above
    run = disturbed(PLANS["replicas"], "", *PATIENCE).wait_for_step(4)
    fork_server = fork_server_of(run)
    os.kill(fork_server, signal.SIGSTOP)
    run.send(1, signal.SIGKILL)
    if ends:
        os.kill(fork_server, signal.SIGKILL)
    run.end(timeout_s=120)
    also = {e["event"] for e in run.events("frozen")}  # what is left of the worker has no heartbeat
    run.check(undisturbed(), "fork_server_replaced", "worker_died", *also)


# ---- processes that do not die -------------------------------------------------------------------------------------


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
    (log,) = (run.run_dir / "logs").glob("worker-*-1.log")
    assert kind == "stopped" or "argosy/faults.py" in log.read_text(), "it wrote down what it hung in"
    run.check(undisturbed(), kind, "worker_died")


@pytest.mark.slow
def test_a_collective_that_only_one_rank_begins(disturbed, undisturbed):
    """Gloo may end that process, or wait: whichever it is, the process is replaced."""
    run = disturbed(PLANS["replicas"], "collective@bucket:step=6,rank=1", *PATIENCE).end()
    assert run.events("worker_died")
    run.check(undisturbed(), *{"worker_died", *(e["event"] for e in run.events("hang", "mismatch"))})


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_nothing_and_its_samples_are_listed(disturbed):
    run = disturbed(PLANS["replicas"], "nan@gradient:step=6,rank=1,times=2").end()
    (bad,) = run.events("bad_step")
    assert bad["step"] == 6 and bad["samples"] == [[48, 56]] and bad["reason"] == "not_finite"
    skipped = [r for r in run.records() if r.get("samples_skipped")]
    assert [r["step"] for r in skipped] == [6] and len(run.records()) == 24
    run.check(None, "bad_step")


@pytest.mark.slow
def test_bad_steps_in_a_row_take_the_run_back(disturbed):
    options = ("--resilience.on_bad_step", "rewind", "--resilience.rewind_after", "1")
    run = disturbed(PLANS["replicas"], "nan@gradient:step=12,rank=1,times=2", *options).end()
    (back,) = run.events("rewind")
    assert back["step"] == 12 and back["to_step"] == 10 and len(run.records()) == 24
    run.check(None, "bad_step", "rewind")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["weights", "moments"])
def test_one_flipped_bit_in_one_of_two_replicas_is_seen_within_a_step_and_undone(disturbed, undisturbed, where):
    run = disturbed(PLANS["replicas"], f"flip@{where}:step=6,rank=1,bit=20").end()
    found = run.events("corruption")
    assert found and found[0]["step"] == 7
    run.check(undisturbed(), "corruption", "rewind")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["weights", "moments"])
def test_of_three_replicas_the_one_with_the_flipped_bit_is_blamed_and_healed(disturbed, undisturbed, where):
    plan = "dp_replicate=4,microbatch=2"
    run = disturbed(plan, f"flip@{where}:step=6,rank=2,bit=20").end()
    (found,) = run.events("corruption")
    assert found["step"] == 7 and found["ranks"] == [2] and not run.events("rewind")
    run.check(undisturbed(plan), "corruption")


# ---- the disk ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_waits_for_a_save_leaves_when_the_world_is_over(disturbed, undisturbed):
    """Else it would be killed, and what it holds be lost."""
    run = disturbed(faults="hang@save:step=5,rank=1").wait_for_step(9)
    time.sleep(1)
    assert run.steps() == 10, "the next save waits for this one"
    run.send(1, signal.SIGKILL)
    run.end()
    assert [(r["source"], r["steps_lost"]) for r in run.events("recovered")] == [("live", 0)]
    run.check(undisturbed(), "worker_died")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        *(f"kill@save:fraction={fraction},rank={rank}" for fraction, rank in ((0.5, 0), (0.1, 1), (0.9, 0))),
        *("kill@rename", "kill@renamed", "eio@save", "enospc@save:fraction=0.5"),
    ],
)
def test_a_checkpoint_that_cannot_be_finished_leaves_the_one_before(disturbed, undisturbed, fault):
    run = disturbed(PLANS["replicas"], fault).end()
    assert run.events("fault")
    told = {"kill@save": ["writer_died", "save_failed"], "kill@rename": ["writer_died", "save_failed"],
            "kill@renamed": ["writer_died"]}  # fmt: skip
    run.check(undisturbed(), *told.get(fault.partition(":")[0], ["save_failed"]))


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
    run.check(None)
    run.start().end().check(undisturbed())


@pytest.mark.slow
def test_a_second_sigterm_ends_it_at_once(disturbed, undisturbed):
    run = disturbed(PLANS["replicas"], "sleep@forward:step=9,rank=1,seconds=30").wait_for_step(8)
    assert run.process is not None
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    time.sleep(SAME_S + 0.5)
    run.process.send_signal(signal.SIGTERM)
    run.end(code=75)
    assert time.monotonic() - began < SAME_S + 5
    run.check_nothing_is_left()
    run.faults = ""
    run.start().end().check(undisturbed())


# ---- what is given up ----------------------------------------------------------------------------------------------


def test_the_same_crash_at_the_same_step_again_ends_the_run(disturbed):
    run = disturbed(PLANS["replicas"], "raise@forward:step=6,rank=1,again=true").end(code=70)
    assert len(run.events("worker_died")) == 2 and "step 6" in run.text
    run.check_faults_are_told("worker_died")
    run.check_nothing_is_left()


# ---- nodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(folder, undisturbed):
    """Two agents; one is killed, the run shrinks to what is left, and grows when it is back: the same batches."""
    length = ("--train.steps", "60")
    nodes = ("--launch.processes", "1", "--launch.nodes", "2", "--launch.coordinator", f"127.0.0.1:{free_port()}")
    options = (*nodes, *length, "--resilience.wait_for_nodes_s", "1")
    run = Disturbed(folder, PLANS["replicas"], "slow@forward:seconds=0.4", options)
    run.process = run.launch("--launch.node", "a")
    b = run.launch("--launch.node", "b")
    run.wait_for_step(6)
    b.kill()
    b.communicate()
    run.wait_until(lambda: run.events("generation")[-1]["size"] == 1)
    run.wait_for_step(run.steps() + 2)
    b = run.launch("--launch.node", "b")
    run.wait_until(lambda: run.events("generation")[-1]["size"] == 2)
    run.end()
    b.communicate(timeout=PATIENT_S)
    assert b.returncode == 0
    assert {r["source"] for r in run.events("recovered")} <= {"live"}
    run.check([undisturbed(plan, *length) for plan in (PLANS["replicas"], "dp_replicate=1,microbatch=2")])
