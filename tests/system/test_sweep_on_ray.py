"""A sweep whose trials are jobs of a real cluster of Ray."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Folder
from ray_cluster import WHERE_FROM, Cluster, cluster, is_installed
from sweep_folders import losses, result, starts, sweeps_of, write
from waiting import PATIENT_S, wait_until

pytestmark = pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)
SLOW = {"ARGOSY_FAULTS": "slow@forward:seconds=0.2"}
TOO_LONG_S = "8"


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_JOB_START_TIMEOUT_SECONDS", TOO_LONG_S)
        with cluster("n1", "n2", cpus=1) as started:
            yield started


@pytest.fixture
def sweeping(folder: Folder) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start sweeps. At the end, end them and the trials that they have left."""
    with sweeps_of(folder) as start:
        yield start


def trials(folder: Folder) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = folder.documents("runs", "sweeps/lr")
    return found


@pytest.mark.slow
def test_a_killed_sweep_finds_its_trials_again_and_promotes_them(folder: Folder, sweeping, running: Cluster):
    sweep = write(folder, "method = 'halving'\ntrials = 4\nhalving.eta = 4\n[parameters]\n"
                  "optimizer.lr = { min = 1e-3, max = 1e-1, log = true }", steps=40)  # fmt: skip
    here = ("--on", "ray", "--address", running.dashboard)
    process = sweeping(*here, **SLOW)
    wait_until(lambda: len(losses(sweep / "0001")) > 1 and len(losses(sweep / "0000")) > 1, process=process)
    process.kill()
    process.communicate()
    before = {trial["id"]: trial["job"] for trial in trials(folder)}
    assert [trial["state"] for trial in trials(folder)][:2] == ["training"] * 2 and len(before) == 2
    (sweep / "0001" / "launch" / "job.json").unlink()  # as if it had been killed before it wrote this down
    os.kill(int((sweep / "0000" / ".lock").read_text().split()[0]), signal.SIGKILL)

    out, err = sweeping(*here).communicate(timeout=400)
    found = result(folder)["trials"]
    assert sorted((t["state"], t["steps"]) for t in found) == [("done", 40), *[("stopped", 10)] * 3], out + err
    assert len(starts(sweep / "0001")) == 1 + (found[1]["steps"] == 40), out + err  # it was not started anew
    promoted = next(t["trial"] for t in found if t["steps"] == 40)
    assert starts(sweep / f"{promoted:04d}")[-1] >= 10
    assert all(trial["engine"] == "ray" for trial in trials(folder))
    assert "the state is saved in" in folder.argosy("logs", "sweeps/lr/0001")
    assert (sweep / "best.toml").exists() and "best" in out


@pytest.mark.slow
def test_ctrl_c_saves_what_runs(folder: Folder, sweeping, running: Cluster):
    sweep = write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e-3, 1e-2]", steps=40)
    process = sweeping("--on", "ray", "--address", running.dashboard, **SLOW)
    wait_until(lambda: all(len(losses(sweep / f"000{n}")) > 3 for n in (0, 1)), process=process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 130 and "2 trials save their state" in out + err, out + err
    made = [len(losses(sweep / f"000{n}")) for n in (0, 1)]
    assert all(list((sweep / f"000{n}" / "checkpoints").glob(f"step-*{steps}")) for n, steps in enumerate(made))


@pytest.mark.slow
def test_a_trial_waits_for_a_node_that_fits_and_one_that_never_will_is_said(folder: Folder, sweeping, running: Cluster):
    sweep = write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e-2]", steps=6)
    (folder.path / "run.toml").write_text((folder.path / "run.toml").read_text().replace("threads = 1", "threads = 2"))
    here = ("--on", "ray", "--address", running.dashboard)
    process = sweeping(*here)
    wait_until((sweep / "0000" / "launch" / "job.json").exists, process=process)
    assert [(trial["state"], trial["why"]) for trial in trials(folder)] == [("waiting", "pending")]
    _, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 2, err
    assert re.search(r"lr-\w+-0000 needs 2 CPUs, 0\.\d+ GB of memory of one node, .*\(1 CPUs, [\d.]+ GB", err), err

    running.add("n3", cpus=2)
    held = subprocess.Popen(  # others use it, until the trial has waited for longer than Ray lets a job wait
        ["ray", "job", "submit", "--address", running.dashboard, "--entrypoint-num-cpus", "2", "--",
         "sh", "-c", f"touch {folder.path}/held; while [ -e {folder.path}/held ]; do sleep 0.2; done"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until((folder.path / "held").exists, process=held)
    process = sweeping(*here)
    wait_until((sweep / "0000" / "launch" / "job.json").exists, process=process)
    before = trials(folder)[0]["job"]
    wait_until(lambda: trials(folder)[0]["job"] != before, process=process)
    (folder.path / "held").unlink()
    out, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 0 and result(folder)["trials"][0]["state"] == "done", out + err
    assert held.wait(60) == 0
    running.lose("n3")


@pytest.mark.slow
def test_the_command_of_the_page_works(folder: Folder, running: Cluster):
    page = (Path(__file__).parents[2] / "docs/sweeps.md").read_text()
    (command,) = re.findall(r"^argosy (sweep .*--on ray.*)$", page, re.MULTILINE)
    write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e-2]", steps=6)
    (folder.path / "lr.toml").rename(folder.path / "sweep.toml")
    here = command.replace("http://head:8265", running.dashboard).replace("--gpus-per-trial 1", "")
    assert "best" in folder.argosy(*shlex.split(here))


def test_where_no_cluster_answers_one_message_says_so(folder: Folder, refused, monkeypatch):
    write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e-2]")
    said = ("--on ray: no cluster of Ray answers at 127.0.0.1:9",)
    refused("sweep", "lr.toml", "--on", "ray", "--address", "127.0.0.1:9", said=said)
    refused("sweep", "lr.toml", "--on", "ray", "--partition", "fast", said=("--on ray: --partition has no meaning",))
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    refused("sweep", "lr.toml", "--on", "ray", said=("no cluster of Ray",))
    assert not (folder.path / "sweeps").exists()
