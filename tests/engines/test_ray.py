"""The engine of Ray, as far as it goes without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.cli import launch as launch_command
from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.engines.engine import RunJob
from argosy.engines.ray import Ray, command
from argosy.errors import UserError
from argosy.launch import ray_job
from argosy.processes.ray_cluster import Share
from ports import free_port

REQUEST = RunJob(
    run=RunConfig(name="mine"), run_dir=Path("/shared/runs/mine"), words=("run.toml", "--train.steps", "10"),
    work_dir=Path("/shared/my work"), nodes=4,
)  # fmt: skip


def with_launch(**keys: object) -> RunJob:
    return replace(REQUEST, run=RunConfig(launch=LaunchConfig(**keys)))  # type: ignore[arg-type]


def test_the_job_is_the_same_command_in_the_same_folder():
    said = Ray().script(replace(REQUEST, gpus_per_node=8))
    assert "cd '\"'\"'/shared/my work'\"'\"' && exec" in said
    words = "argosy launch run.toml --train.steps 10 --on ray --nodes 4 --gpus-per-node 8 --run-dir /shared/runs/mine"
    assert words in said
    said = command(REQUEST.work_dir, words.split(), Path("/shared/my log"))
    assert said.startswith("cd '/shared/my work' || exit 2; ") and said.endswith(f"{words} >> '/shared/my log' 2>&1")


def test_the_secret_does_not_get_into_what_ray_shows(monkeypatch):
    for name in ("ARGOSY_SECRET", "ARGOSY_WATCH_TOKEN", "ARGOSY_METRICS_TOKEN"):
        monkeypatch.setenv(name, "x" * 64)
    monkeypatch.setenv("ARGOSY_FAULTS", "none")
    said = Ray().script(replace(REQUEST, extra=('--runtime-env-json={"env_vars": {"A": "b"}}',)))
    assert "x" * 64 not in said
    environment = json.loads(said.split("--runtime-env-json '")[1].split("' ")[0])["env_vars"]
    assert environment == {"ARGOSY_FAULTS": "none", "RAY_JOB_STOP_WAIT_TIME_S": "150", "A": "b"}


def test_a_python_in_a_folder_with_a_space_is_started(tmp_path, monkeypatch):
    python = tmp_path / "my venv" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/echo")
    monkeypatch.setattr(sys, "executable", str(python))
    done = subprocess.run(["sh", "-c", command(tmp_path, ["-m", "argosy"])], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("-m argosy\n", "")


@pytest.mark.parametrize(
    "extra",
    ["--constraint=h100", "--runtime-env-json={", "--runtime-env-json=[]", '--runtime-env-json={"env_vars": [1]}',
     "--entrypoint-memory=much"],
)  # fmt: skip
def test_a_wrong_extra_is_refused(extra):
    with pytest.raises(UserError, match="--extra="):
        Ray().script(replace(REQUEST, extra=(extra,)))


def test_options_of_other_engines_are_refused():
    with pytest.raises(UserError, match=r"--on ray: --image, --partition has no meaning there.*--address"):
        Ray().check(replace(REQUEST, partition="fast", image="a/b"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["--launch.nodes", "4", "--launch.lease", "folder"]),
        ({"nodes": 3}, ["--launch.lease", "folder"]),
        ({"coordinator": "h:1"}, ["--launch.nodes", "4"]),
        ({"lease": "etcd://h1:2379"}, ["--launch.nodes", "4"]),
    ],
)
def test_nodes_and_lease_follow_from_what_is_asked_for(given, words):
    assert ray_job.words_of_launch(with_launch(**given), Share(4, 8, 0)) == words


def test_an_agent_has_threads_for_the_cpus_that_were_asked_for():
    request = replace(with_launch(processes=2), cpus_per_node=8)
    assert ray_job.words_of_launch(request, Share(4, 8, 0))[-2:] == ["--launch.threads", "4"]


def test_more_nodes_in_the_run_file_than_are_asked_for_are_refused():
    with pytest.raises(UserError, match=r"launch\.nodes = 8, and --nodes 4.*--nodes 8"):
        Ray().check(with_launch(nodes=8))


def test_a_folder_that_ray_copies_to_each_node_is_no_run_s(monkeypatch):
    packages = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs/mine")
    with pytest.raises(UserError, match=r"on a disk that all of them see.*--run-dir"):
        ray_job.hold(replace(REQUEST, run_dir=packages), "raysubmit_1")


@pytest.mark.parametrize("login", ["", ', login = "me@there", folder = "/home/me"'])
def test_the_job_of_a_site_holds_that_site(tmp_path, monkeypatch, login):
    sites = f"""[[sites]]\nname = "oslo"\naddress = "oslo:7100"\nlaunch = {{ on = "ray"{login} }}
        [[sites]]\nname = "lyon"\naddress = "lyon:7100"\n"""
    (tmp_path / "run.toml").write_text(f'name = "two"\nplan = "auto,sync=diloco"\n[train]\nsteps = 4\n{sites}')
    monkeypatch.setenv(ray_job.JOB_CONFIG, json.dumps({"metadata": {"job_submission_id": "argosy-two-oslo-1"}}))
    held: list[tuple[RunJob, str]] = []
    monkeypatch.setattr(ray_job, "hold", lambda *given: held.append(given) or 0)
    folder = tmp_path / "runs/two/sites/oslo"
    words = [str(tmp_path / "run.toml"), "--site", "oslo", "--on", "ray", "--run-dir", str(folder)]
    assert launch_command.main(words) == 0
    ((request, job_id),) = held
    assert (request.name, request.run_dir, job_id) == ("two-oslo", folder, "argosy-two-oslo-1")


def test_a_run_without_enough_agents_that_can_start_is_not_waited_for():
    with pytest.raises(UserError, match=r"needs 2 nodes, and agents can run on 1: n2 .*must see /shared/my work"):
        ray_job.check_enough(REQUEST, [None, 2], -1, "n2 has ended with 2")
    ray_job.check_enough(with_launch(nodes=2), [None, 2, None], -1, "there was a spare")
    ray_job.check_enough(REQUEST, [None, 2], -2, "it has made steps: it goes on smaller")


def test_no_cluster_there_is_said():
    pytest.importorskip("ray", reason="needs Ray: pip install 'argosy[ray]'")
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"no cluster of Ray answers at {address}.*refused"):
        Ray().start(replace(REQUEST, address=address))


def test_no_ray_here_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--on ray needs the package `ray`.*argosy\[ray\]"):
        Ray().start(REQUEST)
