"""A run on the nodes of a real SLURM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report.network import slurm_topology
from commands import Folder
from matrix import PLANS, Disturbed
from pages import PAGES, commands, try_all
from ports import free_port
from slurm import WHERE_FROM, Slurm, is_installed, slurm
from waiting import PATIENT_S, wait_until

pytestmark = pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)
HERE = ("--launch.address", "127.0.0.1", "--launch.processes", "1")
"""All nodes are on this machine."""


NETWORK = """
name = "three nodes, two leaves"

[[groups]]
device = "h100"
nodes = 3

[topology]
kind = "fat-tree"
nodes_per_leaf = 2
oversubscription = 2.0
hosts = "n[1-3]"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "network.toml").write_text(NETWORK)
    topology = slurm_topology(Cluster.load(folder / "network.toml"))
    with slurm(folder / "of", nodes=3, topology=topology) as running:
        yield running


@pytest.fixture
def job(folder: Folder, cluster: Slurm, monkeypatch: pytest.MonkeyPatch):
    """Return a run that srun starts on so many nodes."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)

    def run(nodes: int, *options: str, srun: tuple[str, ...] = (), faults: str = "") -> Disturbed:
        words = ("srun", f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", *srun)
        return Disturbed(folder, PLANS["replicas"], faults, (*HERE, *options), within=words)

    return run


def test_slurm_reads_the_topology_that_the_planner_writes(cluster):
    shown = cluster.ask("scontrol", "show", "topology")
    leaves = re.findall(r"SwitchName=(\S+) Level=0 \S+ Nodes=(\S+)", shown)
    assert leaves == [("leaf0", "n1,n2"), ("leaf1", "n3")]


def test_srun_starts_a_run_on_its_nodes_and_ranks_are_where_a_rank_map_says(job, folder, cluster, undisturbed):
    """Whether the coordinator deals them out, or SLURM has done so."""
    ranks = folder.path / "ranks.txt"
    ranks.write_text("n3\nn1\n")
    run = job(2, "--launch.rank-map", str(ranks), srun=("--nodelist=n1,n3",)).start().end()
    (world,) = run.events("generation")
    assert world["ranks"] == {"n3/0": 0, "n1/0": 1}
    run.check(undisturbed(PLANS["replicas"]))
    hosts = {**os.environ, **cluster.environment, "SLURM_HOSTFILE": str(ranks)}
    words = ("srun", "-n2", "--distribution=arbitrary", "sh", "-c", "echo $SLURM_PROCID $SLURMD_NODENAME")
    dealt = subprocess.run(words, env=hosts, check=True, capture_output=True, text=True, timeout=PATIENT_S).stdout
    assert sorted(dealt.splitlines()) == ["0 n3", "1 n1"]


@pytest.mark.slow
def test_a_signal_that_slurm_sends_before_the_end_saves(job, cluster):
    run = job(2, "--train.steps", "200", faults="slow@forward:seconds=0.2").start().wait_for_step(4)
    (step,) = cluster.ask("squeue", "--steps", "-h", "-o", "%i").split()
    cluster.ask("scancel", "--signal=USR1", step)
    run.end(code=138)
    (world,) = run.events("generation")
    assert set(world["ranks"]) == {"n1/0", "n2/0"}
    assert store.committed(run.run_dir)[-1].step == run.steps()


@pytest.mark.slow
def test_the_end_of_a_job_s_time_saves(job):
    """SLURM sends SIGTERM twice within 2 ms then, and SIGKILL after KillWait."""
    run = job(2, "--train.steps", "2000", srun=("--time=1",), faults="slow@forward:seconds=0.2").start()
    assert run.process is not None
    assert run.process.wait(180)
    assert store.committed(run.run_dir)[-1].step == run.steps()


@pytest.mark.slow
def test_several_tasks_on_a_node_are_refused(job):
    run = job(1, srun=("--ntasks=2", "--ntasks-per-node=2")).start().end(code=2)
    assert "srun has started 2 tasks on 1 node" in run.text and "--ntasks-per-node=1" in run.text


@pytest.fixture
def launched(folder: Folder, cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disturbed]:
    """A run to launch. Its job is cancelled at the end."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    run = Disturbed(folder, PLANS["replicas"])
    run.write()
    yield run
    cluster.ask("scancel", "--user=root", "--signal=KILL", "--full", "--quiet")  # or it would start, save and end
    cluster.ask("scancel", "--user=root")


def launch(run: Disturbed, *options: str) -> str:
    words = ("launch", "run.toml", "--on", "slurm", "--nodes", "2", "--cpus-per-node", "1", *HERE)
    return run.folder.argosy_here(*words, *options)


def state(run: Disturbed) -> dict[str, Any]:
    (found,) = run.folder.documents("runs")
    return found


def wait_for(run: Disturbed, *states: str, seconds: float = PATIENT_S) -> None:
    wait_until(lambda: state(run)["state"] in states, seconds, story=lambda: (state(run), log(run)))


def log(run: Disturbed) -> str:
    return run.folder.argosy_here("logs", "runs/tiny")


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_is_launched_followed_stopped_and_launched_again(launched, undisturbed, monkeypatch, again):
    """`again`: it is launched a second time too, and runs to its end."""
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@forward:seconds=2")  # not at its end before a slow `stop` comes
    assert "launched tiny on slurm: job " in launch(launched, "--train.steps", "40")
    refused = launched.folder.argosy_here("launch", "run.toml", "--on", "slurm", code=2)
    assert re.search(r"its job \d+ on slurm is (waiting|running)", refused) and "argosy stop" in refused
    wait_until(lambda: launched.steps() >= 1, story=lambda: log(launched))
    found = state(launched)
    assert found["state"] == "training" and found["engine"] == "slurm"
    launched.folder.argosy_here("stop", "runs/tiny")
    wait_for(launched, "stopped")
    assert store.committed(launched.run_dir)[-1].step == launched.steps() < 40
    if not again:
        return
    monkeypatch.setenv("ARGOSY_FAULTS", "")
    launch(launched, "--train.steps", "40")
    assert "done: 40 steps" in launched.folder.argosy_here("logs", "runs/tiny", "-f")
    assert state(launched)["state"] == "finished" and state(launched)["step"] == 40
    assert "the run is finished: the job ends with 0" in log(launched)
    launched.check(undisturbed(PLANS["replicas"], "--train.steps", "40"))


@pytest.mark.slow
def test_the_processes_of_a_launched_run_are_where_the_map_of_a_plan_says(launched, folder, monkeypatch):
    """Each rank's process is one that the slurmd of its host has started."""
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@forward:seconds=0.2")
    (folder.path / "network.toml").write_text(NETWORK)
    folder.argosy_here("plan", "--model", "llama3-8b", "--cluster", "network.toml", "--rank-map", "ranks.txt")
    hosts = (folder.path / "ranks.txt").read_text().split()
    assert sorted(set(hosts)) == ["n1", "n2", "n3"]
    hosts = ["n3", "n1", "n2"]  # in an order that nothing but the map gives
    (folder.path / "ranks.txt").write_text("\n".join(hosts))
    options = ("--plan", "dp_replicate=3", "--train.global-batch", "6", "--train.steps", "1000")
    launch(launched, "--nodes", "3", *options, "--launch.rank-map", "ranks.txt")
    wait_until(lambda: launched.steps() > 2, PATIENT_S, story=lambda: log(launched))
    of_nodes = launched.folder.documents("stacks", "runs/tiny", here=False)
    nodes = {worker["rank"]: node_of(worker["pid"]) for seen in of_nodes for worker in seen["workers"]}
    assert nodes == dict(enumerate(hosts))


def node_of(pid: int) -> str:
    """Return the node whose slurmd has started this process."""
    environment = dict(
        word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word
    )
    return environment["SLURMD_NODENAME"]


@pytest.mark.slow
def test_a_job_whose_time_is_over_is_requeued_until_the_run_has_ended(launched, undisturbed, monkeypatch):
    """SLURM lets a job that is requeued wait for two minutes."""
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@forward:seconds=1")
    launch(launched, "--train.steps", "45", "--time", "2", "--resilience.grace_s", "10")
    wait_for(launched, "finished", seconds=600)
    assert log(launched).count("the job is requeued") == 1
    launched.check(undisturbed(PLANS["replicas"], "--train.steps", "45"))


def until(run: Disturbed, condition: Callable[[], object], seconds: float = 120) -> None:
    wait_until(condition, seconds, story=lambda: (state(run), log(run)))


@pytest.fixture
def losing(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Disturbed, Slurm]]:
    """A run that is launched on two nodes of a SLURM of its own, which then loses that of the batch script."""
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@forward:seconds=0.2")
    with slurm(tmp_path / "slurm", nodes=2) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        run = Disturbed(folder, PLANS["replicas"])
        run.write()
        launch(run, "--train.steps", "60", "--resilience.wait_for_nodes_s", "1")
        until(run, lambda: run.steps() >= 4)
        cluster.lose("n1")
        until(run, lambda: [event["size"] for event in run.events("generation")] == [2, 1])
        yield run, cluster


def job_of(cluster: Slurm) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", cluster.ask("scontrol", "show", "job", "--oneliner")))


@pytest.mark.slow
def test_survivors_of_the_batch_host_end_the_job_of_a_finished_run(losing):
    run, cluster = losing
    wait_for(run, "finished", seconds=180)
    until(run, lambda: job_of(cluster)["JobState"] == "CANCELLED")
    assert job_of(cluster)["Restarts"] == "0"
    assert "the batch host n1 is lost; the run is finished: the job is cancelled, as it would end with 0" in log(run)


@pytest.mark.slow
def test_survivors_of_the_batch_host_have_the_job_of_a_stopped_run_requeued(losing):
    run, cluster = losing
    steps = run.steps()
    until(run, lambda: run.steps() > steps + 2)
    with suppress(subprocess.CalledProcessError):  # the lost node does not get it
        cluster.ask("scancel", "--signal=USR1", "1.0")
    until(run, lambda: job_of(cluster)["Restarts"] == "1")
    assert store.committed(run.run_dir)[-1].step == run.steps()
    assert "the batch host n1 is lost; " in log(run) and "the job is requeued" in log(run)
    wait_for(run, "waiting")


def test_what_slurm_refuses_is_said_and_leaves_nothing(launched):
    refused = launched.folder.argosy_here("launch", "run.toml", "--on", "slurm", "--partition", "fast", code=2)
    assert "sbatch refuses" in refused and "invalid partition" in refused
    assert not launched.run_dir.exists()
    words = ("launch", "run.toml", "--on", "slurm", "--image")
    refused = launched.folder.argosy_here(*words, "/images/none.sqsh", code=2)
    assert "--image /images/none.sqsh: there is no such file" in refused
    refused = launched.folder.argosy_here(*words, "registry/argosy:1", code=2)
    assert "this SLURM knows no container images" in refused
    assert not launched.run_dir.exists()
    script = launched.folder.argosy_here("launch", "run.toml", "--on", "slurm", "--nodes", "4", "--dry-run")
    assert (
        "#SBATCH --nodes=4" in script
        and "argosy train run.toml --run-dir" in script
        and "#SBATCH --exclusive" in script
    )
    assert not launched.run_dir.exists()


def test_a_folder_of_any_name_is_launched_into(launched, cluster):
    name = 'it\'s 50%j of "a b"'
    launch(launched, "--run-dir", f"runs/{name}", "--extra=--begin=now+1hour")
    assert state(launched)["state"] == "waiting" and state(launched)["id"] == name
    cluster.ask("scontrol", "update", f"JobId={state(launched)['job']}", "StartTime=now")
    log = launched.folder.path / "runs" / name / "launch" / f"slurm-{state(launched)['job']}.out"
    wait_until(log.exists, story=lambda: state(launched))


def test_a_job_that_is_stopped_while_it_waits_has_nothing_to_save_and_no_log(launched):
    launch(launched, "--extra=--begin=now+1hour")
    said = launched.folder.argosy_here("stop", "runs/tiny")
    assert "is taken out of the queue" in said and "saves" not in said
    wait_for(launched, "ended")
    why = state(launched)["why"]
    assert "argosy logs" not in why and "cancelled" in why
    assert "nothing was printed: ended cancelled" in log(launched)
    refused = launched.folder.argosy_here("launch", "run.toml", "--on", "slurm", "--launch.nodes", "3", code=2)
    assert "launch.nodes = 3, and --nodes 1. Give --nodes 3 or more" in refused


@pytest.mark.slow
def test_a_controller_that_is_away_has_ended_no_job(launched, cluster):
    launch(launched, "--extra=--begin=now+1hour")
    controller = int((cluster.folder / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        assert state(launched)["state"] == "unknown" and "squeue says" in state(launched)["why"]
        refused = launched.folder.argosy_here("launch", "run.toml", "--on", "slurm", code=2)
        assert "may still be there, and nothing says that it has ended" in refused
        assert "may not have been stopped" in launched.folder.argosy_here("stop", "runs/tiny", code=2)
    finally:
        os.kill(controller, signal.SIGCONT)


@pytest.mark.slow
def test_the_commands_of_the_page_work(launched, cluster):
    """srun's command is what the first tests here give."""
    here = {"--nodes 4": "--nodes 2", "--gpus-per-node 8": "--cpus-per-node 1"}
    try_all("slurm.md", launched.folder, here, (*HERE, "--train.steps", "6"), untried=("srun",))
    assert [line for line in commands("slurm.md") if line.startswith("srun ")] == [
        "srun --nodes 4 --ntasks-per-node 1 argosy train run.toml"
    ]
    assert state(launched)["state"] == "finished"


@pytest.mark.slow
def test_the_small_slurm_of_the_page_runs_a_job(folder: Folder):
    """Its job that is requeued is the one of the test above; here its words are tried as they stand."""
    section = (PAGES / "slurm.md").read_text().partition("## Without a cluster")[2].partition("\n## ")[0]
    setup, tried = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    end = re.findall(r"`(scontrol .*?)`", section)[0]
    setup = "".join(line for line in setup.splitlines(keepends=True) if not line.startswith("apt-get"))
    for port in ("17000", "17001", "17002"):
        setup = setup.replace(port, str(free_port()))
    run, prepared = f'\nargosy() {{ {sys.executable} -m argosy "$@"; }}\n', f"--data.sources '{folder.corpus}' 1"
    shorter = f"--train.minutes 0 --train.steps 4 --evaluate.every-steps 0 {prepared}"
    tried = tried.replace("--train.minutes 4", shorter).replace(" --time 3", "")
    printed = folder.path / "printed"
    try:
        with printed.open("wb") as out:  # no pipe: daemons would hold it
            words = ["bash", "-ec", setup + run + tried]
            done = subprocess.run(words, check=False, cwd=folder.path, stdout=out, stderr=out, timeout=PATIENT_S)
        assert done.returncode == 0, printed.read_text()
        assert re.search(r"demo +finished +step 4 +slurm 1", printed.read_text()), printed.read_text()
    finally:
        conf = {**os.environ, "SLURM_CONF": str(folder.path / "slurm/slurm.conf")}
        subprocess.run(["bash", "-c", end], check=False, cwd=folder.path, env=conf)
