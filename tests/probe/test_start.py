"""A probe's processes are started for it, and end with it, whatever becomes of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from argosy.config.schema import RunConfig
from argosy.errors import Interrupted, RunFailed
from argosy.parallel.world import World
from argosy.plan.hardware.clusters import Cluster, NodeGroup
from argosy.probe import probe
from argosy.probe.probe import ProbeRequest, catalogue_device, probe_here
from argosy.processes.child import ForkEntry
from waiting import wait_until


def asked(folder: Path) -> ProbeRequest:
    return ProbeRequest(RunConfig(name="tiny"), catalogue_device("cpu", None), folder, seconds=1.0, quiet=True)


# What the processes that are started here do in place of measuring: they import this module to find it.


def main() -> None:
    """Entry: as `probe.main`, but what is measured is how well they can talk."""
    probe.measure = greet
    probe.main()


def greet(asked: ProbeRequest, world: World) -> Cluster:
    (asked.folder / f"rank-{world.rank}").write_text(str(os.getpid()))
    world.barrier()
    match asked.folder.name:
        case "raises" if world.rank == 1:
            raise LookupError("nothing to measure")
        case "dies" if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "hangs":
            time.sleep(1000)
    total = world.sum(torch.tensor(1.0 + world.rank)).item()
    group = NodeGroup(device=asked.device, nodes=1, devices_per_node=world.size)
    return Cluster(name=f"sum {total:.0f}", groups=(group,))


@pytest.fixture
def folder(tmp_path, monkeypatch, request) -> Path:
    monkeypatch.setattr(probe, "PROBE_MEMBER", ForkEntry("probe.test_start"))
    made = tmp_path / request.param
    made.mkdir()
    return made


def wait_until_gone(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.iterdir()]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.parametrize("folder", ["well"], indirect=True)
def test_its_processes_are_a_world_and_are_gone_afterwards(folder):
    assert probe_here(asked(folder), 3).name == "sum 6"
    wait_until_gone(folder)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        pytest.param(
            "raises",
            "process 1 of the probe ended: LookupError: nothing to measure. Nothing was written.",
            marks=pytest.mark.slow,
        ),
        ("dies", "process 1 of the probe ended: killed by SIGKILL. Nothing was written."),
    ],
    indirect=["folder"],
)
def test_if_one_is_lost_the_probe_ends_and_says_which_and_why(folder, said):
    with pytest.raises(RunFailed) as caught:
        probe_here(asked(folder), 2)
    assert str(caught.value) == said
    wait_until_gone(folder)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["hangs"], indirect=True)
def test_a_signal_ends_it(folder):
    def send() -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="stopped by SIGTERM"):
        probe_here(asked(folder), 2)
    assert signal.getsignal(signal.SIGTERM) is before
    wait_until_gone(folder)
