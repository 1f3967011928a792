"""What Kubernetes is asked for, before anything is asked: names that it takes, and the run's place in the volume."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from argosy.config.schema import RunConfig
from argosy.engines.engine import RunJob
from argosy.engines.kubernetes import Kubernetes
from argosy.engines.record import LaunchedJob
from argosy.errors import UserError
from argosy.processes.secret import secret_of


def job(name: str = "mine", run_dir: str = "/shared/runs/mine", **options: Any) -> RunJob:
    given = {"image": "a:1", "volume": "shared", "namespace": "training"} | options
    return RunJob(
        run=RunConfig(name=name), run_dir=Path(run_dir), words=("run.toml",), work_dir=Path("/shared"), **given
    )


def objects(asked: RunJob) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(Kubernetes().script(asked))}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"image": ""},
            "--on kubernetes: no image is given. Build one from Argosy's Dockerfile, push it to a registry",
        ),
        (
            {"volume": ""},
            "--on kubernetes: no volume is given. Name a PersistentVolumeClaim that all pods can write to",
        ),
        ({"volume": ":/data"}, "--on kubernetes: no volume is given."),
        ({"namespace": "Training"}, "--namespace Training: no name that Kubernetes takes. Give small letters, digits"),
        ({"namespace": "a" * 64}, "no name that Kubernetes takes. Give small letters, digits, dashes; at most 63."),
        ({"partition": "-queue"}, "--partition -queue: no name that Kubernetes takes."),
        ({"gpu_resource": "gpu"}, "--gpu-resource gpu: no resource of a device plugin. Try amd.com/gpu."),
    ],
)
def test_what_kubernetes_would_not_take_is_refused_with_the_option(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        Kubernetes().check(job(**options))
    assert said in str(refused.value)
    Kubernetes().check(job(partition="team.queue", gpu_resource="amd.com/gpu"))


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("mine", "mine-00000"),
        ("My_run.2", "my-run-2-00000"),
        ("7b", "r-7b-00000"),  # a name of a service begins with a letter
        (f"{'a' * 29}-b", f"{'a' * 29}-00000"),
    ],
)
def test_objects_are_called_like_the_run_as_far_as_kubernetes_takes_that(name: str, called: str) -> None:
    made = objects(job(name))
    assert made["JobSet"]["metadata"] | {"name": called, "namespace": "training"} == made["JobSet"]["metadata"]


@pytest.mark.parametrize(
    ("volume", "run_dir", "there"),
    [
        ("shared", "/shared/runs/mine", "/data/runs/mine"),
        ("shared:/mnt", "/shared/runs/mine", "/mnt/runs/mine"),
        ("shared:/mnt", "/mnt/else/mine", "/mnt/else/mine"),  # it has that path in the pods already
    ],
)
def test_the_runs_folder_is_in_the_volume(volume: str, run_dir: str, there: str) -> None:
    (nodes,) = objects(job(run_dir=run_dir, volume=volume))["JobSet"]["spec"]["replicatedJobs"]
    (container,) = nodes["template"]["spec"]["template"]["spec"]["containers"]
    words = container["command"]
    assert words[words.index("--run-dir") + 1] == there
    assert there.startswith(container["volumeMounts"][0]["mountPath"])


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("/shared/data/web", "/data/data/web"),
        ("/else/configs/web", "/data/web"),  # a relative path of the run file, which is not in the folder
        ("/data/web", "/data/web"),
        ("/opt/web", "/opt/web"),  # in the image
        ("s3://bucket/web", "s3://bucket/web"),
    ],
)
def test_paths_of_the_run_file_are_in_the_volume_too(path: str, there: str) -> None:
    given = {"data": {"sources": {path: 1.0}, "stages": [{"from_step": 5, "sources": {path: 1.0}}]}}
    run = RunConfig.model_validate(given).with_keys(model={"weights": path if ":" in path else Path(path)})
    made = objects(replace(job(), run=run, words=("/else/configs/run.toml",)))["ConfigMap"]["data"]["run.toml"]
    found = tomllib.loads(made)
    assert list(found["data"]["sources"]) == list(found["data"]["stages"][0]["sources"]) == [there]
    assert found["model"]["weights"] == there


@pytest.mark.parametrize(
    ("volume", "run_dir", "said"),
    [
        ("shared:data", "/shared/runs/a", "--volume shared:data: data is no absolute path. Try shared:/data."),
        (
            "shared",
            "/elsewhere/a",
            "--run-dir /elsewhere/a: the run's folder is in the volume, at /data in the pods. Give",
        ),
    ],
)
def test_a_folder_outside_of_it_is_refused(volume: str, run_dir: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        Kubernetes().script(job(run_dir=run_dir, volume=volume))
    assert said in str(refused.value)


@pytest.mark.parametrize(("name", "namespace"), [("mine", "a b"), ("--all", "training"), ("mine", None)])
def test_a_record_with_what_is_no_name_is_not_given_to_kubectl(name: str, namespace: str | None) -> None:
    place = {} if namespace is None else {"namespace": namespace}
    with pytest.raises(UserError):
        Kubernetes().check_job(LaunchedJob(engine="kubernetes", id=name, submitted_s=0, nodes=1, place=place))


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Have kubectl print this, whatever it is asked."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def prints(said: bytes) -> None:
        (tmp_path / "said").write_bytes(said)
        (tmp_path / "kubectl").write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
        (tmp_path / "kubectl").chmod(0o755)

    return prints


LAUNCHED = LaunchedJob(engine="kubernetes", id="mine", submitted_s=0, nodes=1, place={"namespace": "training"})


@pytest.mark.parametrize("said", [b"Welcome", b'{"items": [', b"[]", b"[" * 9000])
def test_what_is_no_object_is_shown(kubectl, said):
    kubectl(said)
    with pytest.raises(UserError, match=r"kubectl says '.*', which is no object in JSON"):
        Kubernetes().state(LAUNCHED)


def test_pods_may_print_what_is_no_text(kubectl):
    kubectl(b"\xff\xfe step 3/9\nstep 4/9\n")
    assert Kubernetes().step(LAUNCHED) == 4


KUBECTL = """#!/bin/sh
[ "$1" = create ] && cat >> made.txt
echo '{"metadata": {"uid": "1"}, "spec": {"accessModes": ["ReadWriteMany"]}}'
"""


@pytest.mark.parametrize("site", ["oslo", ""])
def test_the_pods_of_all_sites_have_the_secret_of_the_whole_run(tmp_path, monkeypatch, site):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    home = tmp_path / "runs/two"
    home.mkdir(parents=True)
    asked = job("two", str(home / "sites/oslo" if site else home))
    Kubernetes().start(replace(asked, work_dir=tmp_path, run=asked.run.model_copy(update={"site": site})))
    assert (secret_of(home).decode() in Path("made.txt").read_text()) == bool(site)  # other pods have one of their own
