"""Kubernetes as far as a launched run meets it: an API server for kubectl, and what runs the pods of a JobSet.

It is no cluster. It keeps objects with versions, refuses those that do not match the published models, and starts the
command of each pod as a process of this machine, with the environment, signals and exit codes that the manifest says.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes_api import send_json
from published_models import check

WHERE_FROM = "needs kubectl"
JOBSETS = "apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets"
KINDS = {
    "api/v1": {"secrets": "Secret", "configmaps": "ConfigMap", "serviceaccounts": "ServiceAccount", "pods": "Pod",
               "persistentvolumeclaims": "PersistentVolumeClaim"},
    "apis/jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "apis/rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
    "apis/coordination.k8s.io/v1": {"leases": "Lease"},
}  # fmt: skip
SHORT = {"persistentvolumeclaims": ["pvc"]}
Object = dict[str, Any]


def is_installed() -> bool:
    return shutil.which("kubectl") is not None


class Cluster(ThreadingHTTPServer):
    """The API server, and the processes of the pods."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.objects, self.lock = folder, dict[str, Object](), threading.RLock()
        self.version, self.forbidden = 1, set[str]()
        self.images = {"registry/argosy:1"}
        self.pods: dict[str, Pod] = {}
        server = {"server": f"http://127.0.0.1:{self.server_port}"}
        context = {"cluster": "here", "user": "me", "namespace": "training"}
        self.kubeconfig = folder / "kubeconfig.json"
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [{"name": "here", "cluster": server}],
                    "contexts": [{"name": "here", "context": context}],
                    "users": [{"name": "me", "user": {"token": "t"}}],
                }
            )
        )

    def claim(self, name: str, *modes: str) -> None:
        """Make a volume."""
        self.store(
            f"api/v1/namespaces/training/persistentvolumeclaims/{name}",
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name},
                "spec": {"accessModes": modes},
            },
        )

    def of_kind(self, kind: str) -> list[Object]:
        with self.lock:
            return [found for found in self.objects.values() if found["kind"] == kind]

    def store(self, path: str, sent: Object) -> Object:
        with self.lock:
            self.version += 1
            known = sent["metadata"]
            known |= {"resourceVersion": str(self.version), "namespace": "training"}
            known.setdefault("uid", str(uuid.uuid4()))
            self.objects[path] = json.loads(json.dumps(sent))
            return sent

    def begin(self, jobset: Object) -> None:
        """Start the pods of a JobSet."""
        (replicated,) = jobset["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        for index in range(job["parallelism"]):
            self._pod(jobset["metadata"]["name"], job, index)

    def end(self, path: str) -> None:
        """Send SIGTERM to the pods of a JobSet; when they have ended, it and what it owns are gone."""
        name = path.rpartition("/")[2]
        pods = [pod for pod in self.pods.values() if pod.jobset == name]
        for pod in pods:
            pod.is_deleted = True
            pod.signal(signal.SIGTERM)

        def collect() -> None:
            for pod in pods:
                pod.wait()
            with self.lock:
                uid = self.objects.pop(path)["metadata"]["uid"]
                owned = [at for at, found in self.objects.items() if _owner(found) == uid]
                for at in [*owned, *(pod.path for pod in pods)]:
                    self.objects.pop(at, None)

        threading.Thread(target=collect, daemon=True).start()

    def evict(self, index: int) -> None:
        """Drain a pod's node: SIGTERM, then another pod in its place."""
        pod = next(pod for pod in self.pods.values() if pod.index == index and pod.is_running)
        pod.is_evicted = True
        pod.signal(signal.SIGTERM)

    def _pod(self, jobset: str, job: Object, index: int) -> None:
        pod = Pod(self, jobset, job, index)
        with self.lock:
            self.pods[pod.name] = pod
        threading.Thread(target=pod.run, daemon=True).start()

    def ended(self, pod: Pod, code: int) -> None:
        """Do what the Job's policy says of a pod that has ended."""
        rules = pod.job["podFailurePolicy"]["rules"]
        (fail,) = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"]
        peers = [other for other in self.pods.values() if other.jobset == pod.jobset]
        if pod.is_deleted:
            return
        if code in fail and not pod.is_evicted:
            self._condition(pod.jobset, "Failed", f"a pod has ended with {code}")
        elif code:
            self._pod(pod.jobset, pod.job, pod.index)
        elif {other.index for other in peers if other.code == 0} == set(range(pod.job["completions"])):
            self._condition(pod.jobset, "Completed", "jobset completed successfully")

    def _condition(self, jobset: str, kind: str, message: str) -> None:
        path = f"{JOBSETS.format('training')}/{jobset}"
        with self.lock:
            condition = {"type": kind, "status": "True", "message": message}
            self.store(path, {**self.objects[path], "status": {"conditions": [condition]}})


class Deleted(Exception):
    """The pod was deleted before it began."""


class Pod:
    """A pod of the Job, and its one process."""

    def __init__(self, cluster: Cluster, jobset: str, job: Object, index: int):
        self.cluster, self.jobset, self.job, self.index = cluster, jobset, job, index
        self.name = f"{jobset}-nodes-0-{index}-{uuid.uuid4().hex[:5]}"
        self.path = f"api/v1/namespaces/training/pods/{self.name}"
        self.log = cluster.folder / f"{self.name}.log"
        self.is_deleted = self.is_evicted = False
        self.code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = threading.Event()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self.code is None

    def run(self) -> None:
        (container,) = self.job["template"]["spec"]["containers"]
        if container["image"] not in self.cluster.images:
            reason = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{container["image"]}"'}
            self._tell("Pending", {"waiting": reason})
            self._has_ended.set()
            return
        try:
            files, environment = self._files(), self._environment(container["env"])
        except Deleted:
            self._has_ended.set()
            return
        words = [_expanded(word, environment).replace("/etc/argosy", str(files)) for word in container["command"]]
        words = [sys.executable if word == "python3" else word for word in words]
        inherited = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                words, cwd=container["workingDir"], env={**inherited, **environment}, stdout=log, stderr=log
            )
        self._tell("Running", {"running": {}})
        if self.is_deleted:
            self.signal(signal.SIGTERM)
        code = self._process.wait()
        self.code = 128 - code if code < 0 else code
        self._tell("Failed" if self.code else "Succeeded", {"terminated": {"exitCode": self.code}})
        self._has_ended.set()
        self.cluster.ended(self, self.code)

    def signal(self, number: int) -> None:
        if self._process is not None and self.code is None:
            self._process.send_signal(number)

    def wait(self) -> None:
        """Wait for its end; kill it when its time is over."""
        grace_s = self.job["template"]["spec"]["terminationGracePeriodSeconds"]
        if not self._has_ended.wait(grace_s):
            self.signal(signal.SIGKILL)
            self._has_ended.wait()

    def _files(self) -> Path:
        """Wait for the ConfigMap, as a kubelet does, and mount it."""
        (volume,) = [v for v in self.job["template"]["spec"]["volumes"] if "configMap" in v]
        found = self._of("ConfigMap", volume["configMap"]["name"])
        folder = self.cluster.folder / f"{self.name}.files"
        folder.mkdir()
        for name, text in found["data"].items():
            (folder / name).write_text(text)
        return folder

    def _environment(self, env: list[Object]) -> dict[str, str]:
        found = {}
        for variable in env:
            match variable:
                case {"name": name, "value": value}:
                    found[name] = value
                case {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}:
                    found[name] = self._of("Secret", secret)["stringData"][key]
                case {"name": name, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}:
                    found[name] = "127.0.0.1"
                case {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}:
                    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                    found[name] = str(self.index)
        return found

    def _of(self, kind: str, name: str) -> Object:
        end = time.monotonic() + 20
        while True:
            for found in self.cluster.of_kind(kind):
                if found["metadata"]["name"] == name:
                    return found
            if self.is_deleted:
                raise Deleted
            assert time.monotonic() < end, f"no {kind} {name}"
            time.sleep(0.05)

    def _tell(self, phase: str, state: Object) -> None:
        labels = {"jobset.sigs.k8s.io/jobset-name": self.jobset}
        containers = [{"name": "agent"}]
        statuses = [{"name": "agent", "state": state}]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "labels": labels},
            "spec": {"containers": containers},
            "status": {"phase": phase, "containerStatuses": statuses},
        }
        self.cluster.store(self.path, pod)


class Handler(BaseHTTPRequestHandler):
    server: Cluster

    def do_GET(self) -> None:
        path, asked = self._asked()
        if (known := self._discovery(path)) is not None:
            return self._answer(200, known)
        if path.endswith("/log"):
            return self._print(path, asked)
        kind = path.rpartition("/")[2]
        if kind in {kind for kinds in KINDS.values() for kind in kinds}:
            return self._list(path, asked)
        with self.server.lock:
            found = self.server.objects.get(path)
        return self._answer(404 if found is None else 200, found or self._missing(path))

    def do_POST(self) -> None:
        path, _ = self._asked()
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if sent["kind"] in self.server.forbidden:
            return self._answer(403, _status(403, f'{path.rpartition("/")[2]} is forbidden: User "me" cannot create'))
        if sent["kind"] != "Lease":
            check(sent)
        at = f"{path}/{sent['metadata']['name']}"
        with self.server.lock:
            if at in self.server.objects:
                return self._answer(409, _status(409, "AlreadyExists"))
            made = self.server.store(at, sent)
        if sent["kind"] == "JobSet":
            self.server.begin(made)
        return self._answer(201, made)

    def do_PUT(self) -> None:
        path, _ = self._asked()
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            known = self.server.objects.get(path)
            if known is None:
                return self._answer(404, self._missing(path))
            if sent["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
                return self._answer(409, _status(409, "Conflict"))
            return self._answer(200, self.server.store(path, sent))

    def do_DELETE(self) -> None:
        path, _ = self._asked()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            found = self.server.objects.get(path)
            if found is None:
                return self._answer(404, self._missing(path))
            if found["kind"] == "JobSet" and "deletionTimestamp" not in found["metadata"]:
                found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                self.server.end(path)
            return self._answer(200, found)

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return parts.path.strip("/"), parse_qs(parts.query)

    @staticmethod
    def _discovery(path: str) -> Object | None:
        known: dict[str, Callable[[], Object]] = {
            "version": lambda: {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
            "api": lambda: {"kind": "APIVersions", "versions": ["v1"]},
            "apis": _groups,
            "api/v1/namespaces/training": lambda: {
                "kind": "Namespace",
                "apiVersion": "v1",
                "metadata": {"name": "training"},
            },
            "openapi/v3": lambda: {"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}"} for name in KINDS}},
            **{name: partial(_resources, name) for name in KINDS},
            **{f"openapi/v3/{name}": partial(_validates, name) for name in KINDS},
        }
        return known[path]() if path in known else None

    def _list(self, path: str, asked: dict[str, list[str]]) -> None:
        wanted = dict(text.split("=") for text in asked.get("labelSelector", []))
        with self.server.lock:
            items = [
                found
                for at, found in self.server.objects.items()
                if at.startswith(f"{path}/") and wanted.items() <= found["metadata"].get("labels", {}).items()
            ]
        group, plural = path.partition("/namespaces/")[0], path.rpartition("/")[2]
        known = {"kind": f"{KINDS[group][plural]}List", "apiVersion": group.partition("/")[2]}
        self._answer(200, {**known, "metadata": {}, "items": items})

    def _print(self, path: str, asked: dict[str, list[str]]) -> None:
        pod = self.server.pods[path.split("/")[-2]]
        self.send_response(200)
        self.end_headers()
        at = 0
        while True:
            has_ended = pod.code is not None
            text = pod.log.read_bytes() if pod.log.exists() else b""
            self.wfile.write(text[at:])
            at = len(text)
            if has_ended or "follow" not in asked:
                return
            time.sleep(0.1)

    @staticmethod
    def _missing(path: str) -> Object:
        kind, name = ["", *path.split("/")][-2:]
        return _status(404, f'{kind} "{name}" not found')

    def _answer(self, code: int, body: Object) -> None:
        send_json(self, code, body)

    def log_message(self, *_: Any) -> None:
        pass


def _groups() -> Object:
    groups = [name.split("/")[1:] for name in KINDS if name != "api/v1"]
    versions = [{"groupVersion": f"{group}/{version}", "version": version} for group, version in groups]
    named = [
        {"name": group, "versions": [it], "preferredVersion": it}
        for (group, _), it in zip(groups, versions, strict=True)
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}


def _resources(version: str) -> Object:
    verbs = ["create", "delete", "get", "list", "update"]
    found = [
        {"name": name, "kind": kind, "namespaced": True, "verbs": verbs, "shortNames": SHORT.get(name, [])}
        for name, kind in KINDS[version].items()
    ]
    group = version.partition("/")[2]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": found}


def _validates(version: str) -> Object:
    """Return what tells kubectl that objects are validated here, and not by it."""
    *_, group, name = ["", "", *version.split("/")]
    group = "" if group == "api" else group
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {}
    for plural, kind in KINDS[version].items():
        known = {"group": group, "version": name, "kind": kind}
        paths[f"/{version}/{plural}"] = {
            "patch": {"parameters": [parameter], "responses": {}, "x-kubernetes-group-version-kind": known}
        }
    return {"openapi": "3.0.0", "info": {"title": "tests", "version": "1"}, "paths": paths}


def _status(code: int, message: str) -> Object:
    reason = {403: "Forbidden", 404: "NotFound", 409: "Conflict"}[code]
    about = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return {**about, "code": code, "reason": reason, "message": message}


def _owner(found: Object) -> str:
    owners = found["metadata"].get("ownerReferences", [])
    return owners[0]["uid"] if owners else ""


def _expanded(word: str, environment: dict[str, str]) -> str:
    for name, value in environment.items():
        word = word.replace(f"$({name})", value)
    return word


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """The server, running."""
    folder.mkdir(parents=True, exist_ok=True)
    with Cluster(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            for pod in list(server.pods.values()):
                pod.is_deleted = True
                pod.signal(signal.SIGKILL)
            server.shutdown()
            thread.join()
