"""The objects of Kubernetes that a run is launched as: a JobSet of one Job, whose pods have an agent each.

A JobSet (jobset.x-k8s.io/v1alpha2), not a Kubeflow TrainJob: a TrainJob becomes a JobSet too, through a runtime that an
administrator has installed and that sets what torchrun needs. Agents need nothing of that, and what they do need, rules
for the exit codes of pods, stands in the runtime there and not in the TrainJob.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from argosy.config.dump import dump
from argosy.config.launch import LeaseUrl
from argosy.config.load import RUN_FILE
from argosy.config.section import Section
from argosy.engines.engine import STOP_SPARE_S, RunJob
from argosy.errors import DataError, Poisoned, RunFailed, StorageError, UserError
from argosy.processes.secret import SECRET_VARIABLE

Object = dict[str, Any]
JOBSET = "jobset.x-k8s.io/v1alpha2"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Names the LocalQueue in which Kueue keeps a JobSet until there is room."""
POD_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
ACCOUNT = "argosy"
"""The service account of the pods, and the role that lets them hold the lease."""
RUN_FOLDER = "/etc/argosy"
LOST_PODS = 6
"""Pods of each node that may end with an error that is none of the run's, such as a kill for memory by the kernel."""
KEPT_S = 7 * 24 * 3600
"""A job that has ended can be looked at for so long."""
FINAL_POD_CODES = sorted(kind.exit_code for kind in (RunFailed, UserError, DataError, Poisoned, StorageError))
"""Exit codes of a pod that end the job: the same command would fail again. That of a machine that computes wrongly (69)
is not among them: another pod may come to another machine."""


@dataclass(frozen=True)
class ClusterPlace:
    """The names of a run's objects, and its folders in the pods."""

    name: str
    """The name of the JobSet, the Secret and the ConfigMap."""
    namespace: str
    claim: str
    mount: PurePosixPath
    run_dir: PurePosixPath


def access(place: ClusterPlace) -> list[Object]:
    """Return the service account of the pods, and its right to hold the lease."""
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": place.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT}
    return [
        _manifest("v1", "ServiceAccount", ACCOUNT, place),
        {**_manifest("rbac.authorization.k8s.io/v1", "Role", ACCOUNT, place), "rules": [rule]},
        {
            **_manifest("rbac.authorization.k8s.io/v1", "RoleBinding", ACCOUNT, place),
            "roleRef": role,
            "subjects": [subject],
        },
    ]


def lease_of(job: RunJob, place: ClusterPlace) -> str:
    """Return the run's lease; empty if it has one node, or launch.coordinator.

    Runs of one name in other folders, and those whose long names begin alike, have others.
    """
    launch = job.run.launch
    if launch.lease or launch.coordinator or job.nodes == 1:
        return launch.lease
    own = hashlib.sha256(f"{place.claim} {place.run_dir}".encode()).hexdigest()[:8]
    return f"kubernetes://{place.namespace}/argosy-{place.name.rpartition('-')[0]}-{own}"


def needs_access(lease: str) -> bool:
    """Return True if the pods hold the lease through Kubernetes."""
    return bool(lease) and LeaseUrl.parse(lease).kind == "kubernetes"


def belongings(job: RunJob, place: ClusterPlace, secret: str, owner: str) -> list[Object]:
    """Return the run's secret and its run file. owner: the JobSet's uid; they are deleted with it; empty: of none."""
    owned: Object = {}
    if owner:
        reference = {"apiVersion": JOBSET, "kind": "JobSet", "name": place.name, "uid": owner}
        owned = {"ownerReferences": [reference]}
    secret_manifest = _manifest("v1", "Secret", place.name, place, **owned)
    file_manifest = _manifest("v1", "ConfigMap", place.name, place, **owned)
    return [
        {**secret_manifest, "type": "Opaque", "immutable": True, "stringData": {"secret": secret}},
        {**file_manifest, "immutable": True, "data": {RUN_FILE: dump(_in_volume(job.run, job, place))}},
    ]


def _in_volume(value: Any, job: RunJob, place: ClusterPlace) -> Any:
    """Return a value of the run, all tables and lists included, with the paths in the folder of the command, or of the
    run file, as the pods have them: in the volume."""

    def moved(inner: Any) -> Any:
        return _in_volume(inner, job, place)

    match value:
        case Section():
            return value.model_copy(update={name: moved(getattr(value, name)) for name in type(value).model_fields})
        case Mapping():
            return {moved(name): moved(inner) for name, inner in value.items()}
        case tuple():
            return tuple(map(moved, value))
        case str() | Path() if Path(value).is_absolute() and not Path(value).is_relative_to(place.mount):
            for folder in (job.work_dir, (job.work_dir / (job.words or (RUN_FILE,))[0]).parent):
                if Path(value).is_relative_to(folder):
                    return type(value)(place.mount / Path(value).relative_to(folder))
    return value


def jobset(job: RunJob, place: ClusterPlace) -> Object:
    """Return the JobSet. Raises: UserError for an --extra that is no JSON object."""
    nodes = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": LOST_PODS * job.nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "agent", "operator": "In", "values": FINAL_POD_CODES},
                },
            ]
        },
        "template": {"spec": _pod(job, place)},
    }
    spec = {
        "ttlSecondsAfterFinished": KEPT_S,
        "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": nodes}}],
    }
    made = _manifest(JOBSET, "JobSet", place.name, place)
    if job.partition:
        made["metadata"]["labels"][QUEUE_LABEL] = job.partition
    return {**made, "spec": spec}


def _pod(job: RunJob, place: ClusterPlace) -> Object:
    """Return the specification of a pod, with the lines of --extra merged into it (RFC 7396)."""
    pod: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(job.grace_s) + STOP_SPARE_S,
        "shareProcessNamespace": True,  # the first process collects what ended; an agent would not
        "affinity": _one_a_node(place),
        "containers": [_container(job, place)],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": place.claim}},
            {"name": "run", "configMap": {"name": place.name}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # heartbeats and copies of the state are there
        ],
    }
    if needs_access(lease_of(job, place)):
        pod["serviceAccountName"] = ACCOUNT
    for line in job.extra:
        try:
            patch = json.loads(line)
        except ValueError:
            patch = None
        if not isinstance(patch, dict):
            raise UserError(
                f"--extra={line}: on kubernetes it is a part of the pod's specification, in JSON. Try "
                '--extra=\'{"nodeSelector": {"KEY": "VALUE"}}\'.'
            )
        pod = _merged(pod, patch)
    return pod


def _container(job: RunJob, place: ClusterPlace) -> Object:
    launch = job.run.launch
    train = ["python3", "-m", "argosy", "train", f"{RUN_FOLDER}/{RUN_FILE}", "--run-dir", str(place.run_dir)]
    if job.nodes > 1:
        nodes = job.nodes if launch.nodes == 1 else launch.nodes
        train += ["--launch.nodes", str(nodes), "--launch.node", "node-$(NODE)", "--launch.address", "$(ADDRESS)"]
        train += ["--launch.lease", lease] if (lease := lease_of(job, place)) else []
    wanted = {
        "cpu": str(job.cpus_per_node or ""),
        "memory": job.memory_per_node,
        job.gpu_resource: str(job.gpus_per_node or ""),
    }
    resources = {name: value for name, value in wanted.items() if value}
    return {
        "name": "agent",
        "image": job.image,
        "workingDir": str(place.mount),
        "command": ["python3", "-m", "argosy.launch.agent_supervisor", str(place.run_dir), *train],
        "env": [
            {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": {"name": place.name, "key": "secret"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": POD_INDEX}}},
            {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "work", "mountPath": str(place.mount)},
            {"name": "run", "mountPath": RUN_FOLDER, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }


def _one_a_node(place: ClusterPlace) -> Object:
    term = {"labelSelector": {"matchLabels": {JOBSET_LABEL: place.name}}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _manifest(version: str, kind: str, name: str, place: ClusterPlace, **metadata: Any) -> Object:
    labels = {"app.kubernetes.io/managed-by": "argosy"}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "namespace": place.namespace, "labels": labels, **metadata},
    }


def _merged(target: Object, patch: Object) -> Object:
    """Apply a merge patch (RFC 7396): null removes, objects are merged, all else replaces."""
    result = {key: value for key, value in target.items() if key not in patch}
    for key, value in patch.items():
        if isinstance(value, dict):
            before = target.get(key)
            result[key] = _merged(before if isinstance(before, dict) else {}, value)
        elif value is not None:
            result[key] = value
    return result


def in_yaml(objects: Sequence[Object]) -> str:
    """Return objects as documents of YAML, each after a line "---"."""
    import yaml  # here: lists of runs and other engines write none

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # which has no types
        """Writes texts of several lines as they are, where YAML can."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, write_text)
    written: str = yaml.dump_all(objects, Dumper=Dumper, explicit_start=True, sort_keys=False, width=sys.maxsize)
    return written
