"""A run that kubectl brings to an API server of the tests, which runs its pods."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kubernetes_cluster
from argosy.checkpoint import store
from commands import Folder
from kubernetes_cluster import WHERE_FROM, Cluster, cluster
from matrix import PLANS, Disturbed
from pages import PAGES, try_all
from waiting import wait_until

pytest.importorskip("kubeflow_trainer_api", reason="needs kubeflow-trainer-api: pip install 'argosy[dev]'")
pytestmark = pytest.mark.skipif(not kubernetes_cluster.is_installed(), reason=WHERE_FROM)


@pytest.fixture
def api(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with cluster(folder.path / "cluster") as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        monkeypatch.setenv("HOME", str(folder.path))  # kubectl keeps there what it has found
        running.claim("shared", "ReadWriteMany")
        running.claim("single", "ReadWriteOnce")
        yield running


@pytest.fixture
def run(folder: Folder, api: Cluster, monkeypatch: pytest.MonkeyPatch) -> Disturbed:
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@forward:seconds=0.2")
    run = Disturbed(folder, PLANS["replicas"])
    run.write()
    return run


def launch(run: Disturbed, *options: str, code: int = 0, volume: str = "shared") -> str:
    where = ("--on", "kubernetes", "--nodes", "2", "--volume", f"{volume}:{run.folder.path}")
    words = ("launch", "run.toml", *where, "--image", "registry/argosy:1", "--launch.processes", "1")
    return run.folder.argosy_here(*words, *options, code=code)


def state(run: Disturbed) -> dict[str, Any]:
    (found,) = run.folder.documents("runs")
    return found


def wait(run: Disturbed, is_so: Callable[[], Any]) -> None:
    wait_until(is_so, story=lambda: run.folder.argosy_here("logs", "runs/tiny"))


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_is_launched_followed_stopped_and_launched_again(run, api, undisturbed, monkeypatch, again):
    """`again`: it is launched a second time too, and runs to its end."""
    monkeypatch.setenv("ARGOSY_FAULTS", "slow@forward:seconds=2")  # not at its end before a slow `stop` comes
    assert "launched tiny on kubernetes: job tiny-" in launch(run, "--train.steps", "40")
    assert " on kubernetes is " in launch(run, code=2)
    wait(run, lambda: run.steps() >= 1)
    (world,) = run.events("generation")
    assert set(world["ranks"]) == {"node-0/0", "node-1/0"}
    (lease,) = api.of_kind("Lease")
    assert lease["metadata"]["name"].startswith("argosy-tiny-")
    found = state(run)
    assert found["state"] == "training" and found["engine"] == "kubernetes"
    run.folder.argosy_here("stop", "runs/tiny")
    wait(run, lambda: not api.of_kind("JobSet") and state(run)["state"] == "stopped")
    assert not api.of_kind("Secret") and not api.of_kind("ConfigMap") and not api.of_kind("Pod")
    assert store.committed(run.run_dir)[-1].step == run.steps() < 40
    if not again:
        return
    monkeypatch.setenv("ARGOSY_FAULTS", "")
    launch(run, "--train.steps", "40")
    log = run.folder.argosy_here("logs", "runs/tiny", "-f")
    assert "[pod/tiny-" in log and "done: 40 steps" in log
    wait(run, lambda: "completed" in state_of_job(run))
    assert state(run)["state"] == "finished" and state(run)["step"] == 40
    run.check(undisturbed(PLANS["replicas"], "--train.steps", "40"))


@pytest.mark.slow
def test_a_pod_that_is_evicted_saves_and_another_takes_its_place(run, api, undisturbed):
    launch(run, "--train.steps", "40")
    wait(run, lambda: run.steps() >= 4)
    api.evict(1)
    wait(run, lambda: state(run)["state"] == "finished")
    assert len([pod for pod in api.pods.values() if pod.index == 1]) == 2
    assert len([pod for pod in api.pods.values() if pod.index == 0]) == 1
    assert len(run.events("generation")) == 2
    run.check(undisturbed(PLANS["replicas"], "--train.steps", "40"))


@pytest.mark.slow
def test_a_run_that_fails_is_not_started_again(run, api):
    launch(run, "--data.sources", "nowhere", "1")
    wait(run, lambda: "a pod has ended with 2" in state_of_job(run))
    assert len(api.pods) == 2


def state_of_job(run: Disturbed) -> str:
    from argosy.engines.kubernetes import Kubernetes
    from argosy.engines.record import LaunchedJob

    job = LaunchedJob.load(run.run_dir)
    assert job is not None
    return " ".join(Kubernetes().state(job))


def test_what_kubernetes_lacks_is_said_and_nothing_is_left(run, api):
    assert "no image is given" in launch(run, "--image", "", code=2)
    assert "no volume is given" in launch(run, "--volume", "", code=2)
    assert 'persistentvolumeclaims "none" not found' in launch(run, volume="none", code=2)
    assert "its access modes are ReadWriteOnce, and 2 nodes" in launch(run, volume="single", code=2)
    assert "it is a part of the pod's specification, in JSON" in launch(run, "--extra=nodeSelector", code=2)
    assert "launch.nodes = 3, and --nodes 2" in launch(run, "--launch.nodes", "3", code=2)
    api.forbidden = {"ServiceAccount"}
    assert "--launch.lease folder" in launch(run, code=2)
    api.forbidden = {"Secret"}
    assert "secrets is forbidden" in launch(run, code=2)
    wait(run, lambda: not api.of_kind("JobSet"))
    assert not run.run_dir.exists()


def test_an_image_that_cannot_be_pulled_is_said(run, api):
    launch(run, "--image", "registry/argosy:2")
    wait(run, lambda: "ImagePullBackOff" in state(run)["why"])
    assert state(run)["state"] == "waiting" and "registry/argosy:2" in state(run)["why"]


def test_what_is_shown_is_what_is_made_but_for_the_secret(run, api):
    shown = launch(run, "--dry-run")
    assert re.findall(r"^kind: (\w+)$", shown, re.MULTILINE) == [
        "ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "JobSet",
    ]  # fmt: skip
    assert not api.of_kind("JobSet") and not run.run_dir.exists()


@pytest.mark.slow
def test_the_commands_of_the_page_work(run, api):
    here = {
        "--nodes 4": "--nodes 2",
        "--gpus-per-node 8": "",
        "--volume shared": f"--volume shared:{run.folder.path}",
    }
    options = ("--launch.processes", "1", "--train.steps", "6")
    try_all("kubernetes.md", run.folder, here, options, untried=("docker",))
    assert state(run)["state"] == "finished"
    assert "The image for CUDA was not built" in (PAGES / "kubernetes.md").read_text()
