"""A run on the nodes of a real SLURM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from argosy.checkpoint import store
from commands import Folder
from matrix import ONE_THREAD, PLANS, Disturbed
from slurm import WHERE_FROM, Slurm, is_installed, slurm

pytestmark = pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)
HERE = ("--launch.address", "127.0.0.1", "--launch.processes", "1")
"""All nodes are on this machine."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=3) as running:
        yield running


@pytest.fixture
def job(folder: Folder, cluster: Slurm, monkeypatch: pytest.MonkeyPatch):
    """Return a run that srun starts on so many nodes."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)

    def run(nodes: int, *options: str, srun: tuple[str, ...] = (), faults: str = "") -> Disturbed:
        words = ("srun", f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", *srun)
        return Disturbed(folder, PLANS["replicas"], faults, (*HERE, *ONE_THREAD, *options), within=words)

    return run


def test_srun_starts_a_run_on_its_nodes(job, undisturbed):
    run = job(2).start().end()
    (world,) = run.events("generation")
    assert set(world["ranks"]) == {"n1/0", "n2/0"}
    run.check(undisturbed(PLANS["replicas"], *ONE_THREAD))


def test_a_signal_that_slurm_sends_before_the_end_saves(job, cluster):
    run = job(2, "--train.steps", "200", faults="slow@forward:seconds=0.2").start().wait_for_step(4)
    (step,) = cluster.ask("squeue", "--steps", "-h", "-o", "%i").split()
    cluster.ask("scancel", "--signal=USR1", step)
    run.end(code=138)
    assert store.committed(run.run_dir)[-1].step == run.steps()


@pytest.mark.slow
def test_the_end_of_a_job_s_time_saves(job):
    """SLURM sends SIGTERM twice within 2 ms then, and SIGKILL after KillWait."""
    run = job(2, "--train.steps", "2000", srun=("--time=1",), faults="slow@forward:seconds=0.2").start()
    assert run.process is not None
    assert run.process.wait(180)
    assert store.committed(run.run_dir)[-1].step == run.steps()


def test_several_tasks_on_a_node_are_refused(job):
    run = job(1, srun=("--ntasks=2", "--ntasks-per-node=2")).start().end(code=2)
    assert "srun has started 2 tasks on 1 node" in run.text and "--ntasks-per-node=1" in run.text
