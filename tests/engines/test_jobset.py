"""The objects of Kubernetes are valid by the published models, and say what a run needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from argosy.config.schema import RunConfig
from argosy.engines.engine import RunJob
from argosy.engines.jobset import ClusterPlace, access, belongings, in_yaml, jobset, lease_of
from argosy.engines.kubernetes import Kubernetes
from argosy.errors import UserError
from published_models import check

pytest.importorskip("kubeflow_trainer_api", reason="needs kubeflow-trainer-api: pip install 'argosy[dev]'")
PLACE = ClusterPlace("mine-0a1b2", "training", "shared", PurePosixPath("/data"), PurePosixPath("/data/runs/mine"))


def request(**options: Any) -> RunJob:
    run = options.pop("run", RunConfig())
    return RunJob(
        run=run, run_dir=Path("/data/runs/mine"), words=("run.toml",), work_dir=Path("/data"),
        image="a:1", volume="shared", **options,
    )  # fmt: skip


def pod_of(asked: RunJob) -> dict[str, Any]:
    (replicated,) = jobset(asked, PLACE)["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "options", [{}, {"nodes": 4, "gpus_per_node": 8, "cpus_per_node": 64, "memory_per_node": "1Ti"}]
)
def test_all_objects_are_valid(options):
    asked = request(**options)
    for made in [*access(PLACE), *belongings(asked, PLACE, "s" * 32, "uid"), jobset(asked, PLACE)]:
        check(made)


def test_kueue_is_told_the_queue_on_the_jobset_alone():
    assert "kueue.x-k8s.io/queue-name" not in jobset(request(), PLACE)["metadata"]["labels"]
    made = jobset(asked := request(partition="research"), PLACE)
    check(made)
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert "research" not in str(made["spec"]) + str(belongings(asked, PLACE, "s" * 32, "uid"))


def test_gpus_are_asked_for_as_their_device_plugin_calls_them():
    def asked(**options: Any) -> dict[str, str]:
        (container,) = pod_of(request(gpus_per_node=8, **options))["containers"]
        return container["resources"]["limits"]

    assert asked() == {"nvidia.com/gpu": "8"}
    assert asked(gpu_resource="habana.ai/gaudi") == {"habana.ai/gaudi": "8"}
    with pytest.raises(UserError, match=r"--gpu-resource amd: no resource of a device plugin\. Try amd\.com/gpu"):
        Kubernetes().check(request(gpu_resource="amd"))


@pytest.mark.parametrize("option", ["partition", "namespace"])
def test_a_name_that_kubernetes_does_not_take_is_refused(option):
    with pytest.raises(UserError, match=f"--{option} a b: no name that Kubernetes takes"):
        Kubernetes().check(request(**{option: "a b"}))


def test_a_key_that_kubernetes_does_not_know_is_found():
    made = jobset(request(), PLACE)
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolice"] = {}
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
    with pytest.raises(AssertionError, match=r"unknown .*backofLimit"):
        check(made)


def test_a_pod_has_the_time_to_save_and_some():
    run = RunConfig.model_validate({"resilience": {"grace_s": 120}})
    assert pod_of(request(run=run))["terminationGracePeriodSeconds"] == 150


def test_exit_codes_that_come_again_fail_the_job_and_disruptions_do_not_count():
    (replicated,) = jobset(request(nodes=2), PLACE)["spec"]["replicatedJobs"]
    ignore, fail = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert fail["action"] == "FailJob" and fail["onExitCodes"]["values"] == [1, 2, 65, 70, 74]


def test_nodes_beyond_those_of_the_run_are_spares_and_each_pod_has_its_own_name():
    run = RunConfig.model_validate({"launch": {"nodes": 2}})
    words = pod_of(request(run=run, nodes=3))["containers"][0]["command"]
    assert words[words.index("--launch.nodes") + 1] == "2"
    assert words[words.index("--launch.node") + 1] == "node-$(NODE)"
    assert words[words.index("--launch.lease") + 1].startswith("kubernetes://training/argosy-mine-")


def test_runs_of_one_name_in_other_folders_have_leases_of_their_own():
    def lease(folder: str, claim: str = "shared") -> str:
        return lease_of(request(nodes=2), replace(PLACE, claim=claim, run_dir=PurePosixPath(folder)))

    assert len({lease("/data/ann/runs/mine"), lease("/data/bob/runs/mine"), lease("/data/ann/runs/mine", "other")}) == 3
    again = replace(PLACE, name="mine-9f9f9")  # the next launch of the same run
    assert lease_of(request(nodes=2), again) == lease_of(request(nodes=2), PLACE)


def test_a_lease_that_is_given_is_kept_and_needs_no_service_account():
    run = RunConfig.model_validate({"launch": {"lease": "folder"}})
    pod = pod_of(request(run=run, nodes=2))
    words = pod["containers"][0]["command"]
    assert words[words.index("--launch.lease") + 1] == "folder" and "serviceAccountName" not in pod


def test_extra_lines_are_merged_into_the_pod():
    lines = ('{"nodeSelector": {"gpu": "h100"}, "affinity": null}', '{"nodeSelector": {"zone": "a"}}')
    pod = pod_of(request(extra=lines))
    assert pod["nodeSelector"] == {"gpu": "h100", "zone": "a"} and "affinity" not in pod
    assert pod["restartPolicy"] == "Never"


def test_objects_are_printed_in_yaml_that_means_the_same():
    run = RunConfig.model_validate({"name": "mine", "train": {"steps": 7}})
    asked = request(run=run, nodes=2, gpus_per_node=8, extra=('{"nodeSelector": {"on": "yes", "a b": "1", "t": ""}}',))
    made = [*access(PLACE), *belongings(asked, PLACE, "s: #" * 9, ""), jobset(asked, PLACE)]
    text = in_yaml(made)
    assert list(yaml.safe_load_all(text)) == made
    assert "kind: JobSet" in text.splitlines() and "  run.toml: |" in text.splitlines()  # a run file that people read


@pytest.mark.parametrize(
    "text", ["a\nb\n", "a\n\nb\n", " a\nb\n", "\na\n", "a\nb", "a\nb\n\n", "a\tb\nc\n", "\x1b[2J\n\n", "x: y\n"]
)
def test_any_text_is_the_same_in_yaml(text):
    made = [{"a": text, "b": [text, [1, {"c": text}], [], {}, None, True, 1.5], "null": "null"}]
    assert list(yaml.safe_load_all(in_yaml(made))) == made
