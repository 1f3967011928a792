"""A run on hosts that a real ssh reaches."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store
from commands import Folder
from matrix import PLANS, STEPS, Disturbed
from pages import try_all
from ssh import WHERE_FROM, Hosts, hosts, is_installed
from waiting import wait_until

pytestmark = pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(tmp_path_factory.mktemp("ssh"), 2) as running:
        yield running


@pytest.fixture
def run(folder: Folder, network: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disturbed]:
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@forward:seconds=0.2")
    run = Disturbed(folder, PLANS["replicas"])
    run.write()
    yield run
    if (run.run_dir / "launch/job.json").exists():
        for agent in agents(run).values():
            try:
                os.killpg(int(agent.partition("@")[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue


def launch(
    run: Disturbed, network: Hosts, *options: str, names: str = "h1,h2", processes: int = 1, code: int = 0
) -> str:
    words = ("launch", "run.toml", "--on", "ssh", "--hosts", names, network.option)
    give = run.folder.argosy_here if code else run.folder.argosy
    return give(*words, "--launch.processes", processes, *options, code=code)


def agents(run: Disturbed) -> dict[str, str]:
    place = json.loads((run.run_dir / "launch/job.json").read_text())["place"]
    return {name.removeprefix("agent of "): agent for name, agent in place.items() if name.startswith("agent of ")}


def state(run: Disturbed) -> dict[str, Any]:
    (found,) = run.folder.documents("runs")
    return found


def wait(run: Disturbed, is_so: Callable[[], Any]) -> None:
    wait_until(is_so, story=lambda: run.folder.argosy_here("logs", "runs/tiny"))


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_is_launched_on_hosts_followed_stopped_and_launched_again(run, network, undisturbed, monkeypatch, again):
    """First with a secret that is given, which is in no command and no file. `again`: and then on one host, with a
    secret that is made, to its end.
    """
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@forward:seconds=3")  # not at its end before a slow `stop` comes
    monkeypatch.setenv("ARGOSY_SECRET", "c0ffee" * 8)
    assert "launched tiny on ssh: job h1,h2" in launch(run, network)
    refused = launch(run, network, code=2)
    assert "its job h1,h2 on ssh is running" in refused and "argosy stop" in refused
    wait(run, lambda: run.steps() >= 1)
    (world,) = run.events("generation")
    assert set(world["ranks"]) == {"h1/0", "h2/0"}
    assert state(run)["state"] == "training"
    for supervisor in agents(run).values():
        pid = supervisor.partition("@")[0]
        assert b"c0ffee" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"c0ffee" in Path(f"/proc/{pid}/environ").read_bytes()
    assert not [path for path in (run.run_dir / "launch").iterdir() if b"c0ffee" in path.read_bytes()]
    assert not (run.run_dir / ".secret").exists()
    run.folder.argosy_here("stop", "runs/tiny")
    wait(run, lambda: not any(Path("/proc", agent.partition("@")[0]).exists() for agent in agents(run).values()))
    assert state(run)["state"] == "stopped"
    log = run.folder.argosy_here("logs", "runs/tiny")
    assert "h1: " in log and "h2: " in log
    assert store.committed(run.run_dir)[-1].step == run.steps() < STEPS
    if not again:
        return
    monkeypatch.setenv("ARGOSY_FAULTS", "")
    monkeypatch.delenv("ARGOSY_SECRET")
    launch(run, network, names="h2", processes=2)
    wait(run, lambda: run.steps() == STEPS)  # meanwhile, `logs` would look at the hosts each second
    assert f"done: {STEPS} steps" in run.folder.argosy_here("logs", "runs/tiny", "-f")
    found = state(run)
    assert found["state"] == "finished" and found["step"] == STEPS
    assert (run.run_dir / ".secret").exists()
    run.check(undisturbed(PLANS["replicas"]))


@pytest.mark.slow
def test_an_agent_that_is_killed_is_started_again(run, network):
    launch(run, network, "--train.steps", "40")
    wait(run, lambda: run.steps() >= 4)
    supervisor = int(agents(run)["h2"].partition("@")[0])
    (agent,) = _children(supervisor)
    os.kill(agent, signal.SIGKILL)
    assert "done: 40 steps" in run.folder.argosy_here("logs", "runs/tiny", "-f")
    assert "h2: argosy launch: the agent ended with 137 " in run.folder.argosy_here("logs", "runs/tiny")
    assert len(run.events("generation")[-1]["ranks"]) == 2


def test_hosts_that_cannot_take_part_are_named_and_nothing_is_left(run, network, tmp_path, monkeypatch):
    refused = launch(run, network, names="h1,nowhere,noname.invalid", code=2)
    assert "no way to nowhere (ssh: connect to host" in refused and "noname.invalid (" in refused
    assert "h1 (" not in refused
    assert "h1 and alias are the same host" in launch(run, network, names="h1,alias", code=2)
    assert "--hosts: h1 is given twice" in launch(run, network, names="h1,h2,me@h1", code=2)
    assert "'-oProxyCommand=x' is no name of a host" in launch(run, network, names="h1,-oProxyCommand=x", code=2)
    assert "no hosts are given" in launch(run, network, names="", code=2)
    assert "launch.nodes = 3, and --hosts names 2" in launch(run, network, "--launch.nodes", "3", code=2)
    assert not run.run_dir.exists()


def test_the_commands_are_shown_and_nothing_is_started(run, network):
    shown = launch(run, network, "--dry-run")
    assert "# h1\n" in shown and "--launch.node h2" in shown and "--launch.lease folder" in shown
    assert not run.run_dir.exists()


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_and_its_agent_is_stopped_by_the_folder(run, tmp_path):
    with hosts(tmp_path / "ssh", 2) as network:
        launch(run, network, "--train.steps", "60")
        wait(run, lambda: run.steps() >= 4)
        network.lose("h2")
        from argosy.engines.record import LaunchedJob
        from argosy.engines.ssh import Ssh

        job = LaunchedJob.load(run.run_dir)
        assert job is not None
        assert "on 1 of 2 hosts; no way to h2 (ssh: connect" in Ssh().state(job)[1]
        refused = run.folder.argosy_here("stop", "runs/tiny", code=2)
        assert "there is no way to h2 (" in refused and "The other hosts' agents save and end" in refused
        wait(run, lambda: state(run)["state"] == "stopped")
        supervisor = Path("/proc") / agents(run)["h2"].partition("@")[0]
        wait(run, lambda: not supervisor.exists())
        assert store.committed(run.run_dir)[-1].step == run.steps() < 60


@pytest.mark.slow
def test_the_commands_of_the_page_work(run, network):
    options = (network.option, "--launch.processes", "1", "--train.steps", "6")
    try_all("ssh.md", run.folder, {"node1,node2": "h1,h2"}, options)
    assert state(run)["state"] == "finished"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
